// Reading JSON strictly: every key is known, every value in its range, and an error names the field, what was expected and what
// was found.

/// An object whose fields are taken one by one; `end` refuses what is left.
struct Record {
    let path: String
    private var fields: [String: JSON]
    private let keys: [String]

    init(_ field: Field) throws(LesonnxError) {
        guard let entries = field.value.object else { throw field.wrong("an object") }
        path = field.path
        keys = entries.map(\.key)
        fields = Dictionary(entries.map { ($0.key, $0.value) }, uniquingKeysWith: { first, _ in first })
        if fields.count < entries.count {
            throw .bundle("\(path.isEmpty ? "document" : path): holds a key twice")
        }
    }

    private func path(of key: String) -> String { path.isEmpty ? key : "\(path).\(key)" }

    mutating func required(_ key: String) throws(LesonnxError) -> Field {
        guard let value = fields.removeValue(forKey: key) else { throw .bundle("\(path(of: key)): missing") }
        return Field(path: path(of: key), value: value)
    }

    /// The field, where the document has it.
    mutating func optional(_ key: String) -> Field? {
        fields.removeValue(forKey: key).map { Field(path: path(of: key), value: $0) }
    }

    /// The field, where the document has it and it is not null.
    mutating func nullable(_ key: String) -> Field? {
        guard let field = optional(key), field.value != .null else { return nil }
        return field
    }

    func end() throws(LesonnxError) {
        if let key = keys.first(where: { fields[$0] != nil }) {
            throw .bundle("\(path(of: key)): unknown key; this bundle may need a newer lesonnx")
        }
    }
}

/// A value and where it stands.
struct Field {
    let path: String
    let value: JSON

    func wrong(_ expected: String) -> LesonnxError {
        .bundle("\(path.isEmpty ? "document" : path): expected \(expected), found \(value.excerpt)")
    }

    func string() throws(LesonnxError) -> String {
        guard let value = value.string else { throw wrong("a string") }
        return value
    }

    /// A whole number; no count of a model or a file is larger than the range says, and what is, would only exhaust memory.
    func int(_ range: ClosedRange<Int>) throws(LesonnxError) -> Int {
        guard let value = value.int, range.contains(value) else {
            throw wrong("a whole number from \(range.lowerBound) to \(range.upperBound)")
        }
        return value
    }

    func int(of choices: [Int]) throws(LesonnxError) -> Int {
        guard let value = value.int, choices.contains(value) else {
            throw wrong("one of \(choices.map(String.init).joined(separator: ", "))")
        }
        return value
    }

    func double() throws(LesonnxError) -> Double {
        switch value {
        case .int(let value): return Double(value)
        case .double(let value): return value
        default: throw wrong("a number")
        }
    }

    func choice<Choice: RawRepresentable & CaseIterable>() throws(LesonnxError) -> Choice where Choice.RawValue == String {
        guard let value = value.string, let choice = Choice(rawValue: value) else {
            throw wrong("one of \(Choice.allCases.map(\.rawValue).joined(separator: ", "))")
        }
        return choice
    }

    /// A path as the bundle's files are named: relative, and nothing that could leave the bundle.
    func bundlePath() throws(LesonnxError) -> String {
        let path = try string()
        if !isBundlePath(path) {
            throw wrong("a relative path that stays inside the bundle")
        }
        return path
    }

    func fields() throws(LesonnxError) -> [Field] {
        guard let values = value.array else { throw wrong("an array") }
        return values.enumerated().map { Field(path: "\(path).\($0)", value: $1) }
    }

    func array<Element>(_ read: (Field) throws(LesonnxError) -> Element) throws(LesonnxError) -> [Element] {
        var elements: [Element] = []
        for field in try fields() {
            elements.append(try read(field))
        }
        return elements
    }

    func dictionary<Element>(_ read: (Field) throws(LesonnxError) -> Element) throws(LesonnxError) -> [String: Element] {
        guard let entries = value.object else { throw wrong("an object") }
        var elements: [String: Element] = [:]
        for entry in entries {
            elements[entry.key] = try read(Field(path: "\(path).\(entry.key)", value: entry.value))
        }
        return elements
    }
}

/// Whether a path is relative and cannot leave the bundle. By bytes, as the file system sees it.
public func isBundlePath(_ path: String) -> Bool {
    let bytes = path.utf8
    let odd = [UInt8(ascii: "\\"), UInt8(ascii: ":"), 0]
    return !bytes.isEmpty && bytes.first != UInt8(ascii: "/") && !bytes.contains(where: odd.contains)
        && !bytes.split(separator: UInt8(ascii: "/")).contains { $0.elementsEqual("..".utf8) }
}
