import LesonnxScheduler

/// The words of a command line: options by name, each with its value or none, and what stands alone. Each is taken once; `end`
/// refuses what is left.
struct Arguments {
    private var options: [(name: String, value: String?)] = []
    private var alone: [String] = []

    /// `flags` are the options without a value. A value follows its option, or an equals sign.
    init(_ words: some Sequence<String>, flags: Set<String>) throws(LesonnxError) {
        var waiting: String?
        for word in words {
            if let name = waiting {
                options.append((name, word))
                waiting = nil
            } else if !word.hasPrefix("--") {
                alone.append(word)
            } else if let equals = word.firstIndex(of: "=") {
                options.append((String(word[..<equals]), String(word[word.index(after: equals)...])))
            } else if flags.contains(word) {
                options.append((word, nil))
            } else {
                waiting = word
            }
        }
        if let waiting {
            throw .input("\(waiting) needs a value")
        }
    }

    mutating func next(_ what: String) throws(LesonnxError) -> String {
        if alone.isEmpty {
            throw .input("expected \(what)")
        }
        return alone.removeFirst()
    }

    mutating func flag(_ name: String) -> Bool {
        let count = options.count
        options.removeAll { $0.name == name && $0.value == nil }
        return options.count < count
    }

    mutating func text(_ name: String) -> String? {
        guard let at = options.firstIndex(where: { $0.name == name }) else { return nil }
        return options.remove(at: at).value
    }

    mutating func number<Number: LosslessStringConvertible>(_ name: String, _: Number.Type = Number.self) throws(LesonnxError)
        -> Number?
    {
        guard let text = text(name) else { return nil }
        guard let number = Number(text) else { throw .input("\(name) is '\(text)', expected a number") }
        return number
    }

    mutating func bytes(_ name: String) throws(LesonnxError) -> Int? {
        guard let text = text(name) else { return nil }
        return try parseBytes(text)
    }

    mutating func choice<Choice: RawRepresentable & CaseIterable>(_ name: String, _: Choice.Type = Choice.self)
        throws(LesonnxError) -> Choice? where Choice.RawValue == String
    {
        guard let text = text(name) else { return nil }
        guard let choice = Choice(rawValue: text) else {
            let all = Choice.allCases.map(\.rawValue).joined(separator: ", ")
            throw .input("\(name) is '\(text)', expected one of \(all)")
        }
        return choice
    }

    /// `--name` or `--no-name`; nil where neither is given.
    mutating func onOff(_ name: String) -> Bool? {
        flag("--\(name)") ? true : flag("--no-\(name)") ? false : nil
    }

    func end() throws(LesonnxError) {
        if let option = options.first {
            throw .input("unknown option \(option.name)")
        }
        if let word = alone.first {
            throw .input("'\(word)' is one word too many")
        }
    }
}
