/// A JSON value. Objects keep every entry in its order: a vocabulary may hold keys that Swift takes for equal, since it compares
/// text by meaning and not by code points.
public indirect enum JSON: Equatable, Sendable {
    case null
    case bool(Bool)
    case int(Int)
    case double(Double)
    case string(String)
    case array([JSON])
    case object([Entry])

    public struct Entry: Equatable, Sendable {
        public var key: String
        public var value: JSON
    }

    /// The value in a UTF-8 text. Throws `input` that says what is wrong, and at which byte.
    public init(parsing text: some Collection<UInt8>) throws(LesonnxError) {
        var parser = JSONParser(bytes: Array(text))
        self = try parser.document()
    }

    /// The first value of that key; nil where this is no object or has none.
    public subscript(key: String) -> JSON? {
        guard case .object(let entries) = self else { return nil }
        return entries.first { $0.key == key }?.value
    }

    public var string: String? {
        if case .string(let value) = self { return value }
        return nil
    }

    public var int: Int? {
        if case .int(let value) = self { return value }
        return nil
    }

    public var bool: Bool? {
        if case .bool(let value) = self { return value }
        return nil
    }

    public var array: [JSON]? {
        if case .array(let values) = self { return values }
        return nil
    }

    public var object: [Entry]? {
        if case .object(let entries) = self { return entries }
        return nil
    }

    /// The value as an error names it: short, in one line.
    var excerpt: String {
        switch self {
        case .null: return "null"
        case .bool(let value): return "\(value)"
        case .int(let value): return "\(value)"
        case .double(let value): return "\(value)"
        case .string(let value):
            let short = value.unicodeScalars.prefix(60).map { $0.value < 0x20 ? " " : String($0) }.joined()
            return "'\(short)'"
        case .array(let values): return "an array of \(values.count)"
        case .object(let entries): return "an object of \(entries.count) keys"
        }
    }
}

/// RFC 8259, by descent; nested at most `maxDepth` levels.
private struct JSONParser {
    private static let maxDepth = 100
    let bytes: [UInt8]
    var at = 0

    init(bytes: [UInt8]) {
        self.bytes = bytes
    }

    mutating func document() throws(LesonnxError) -> JSON {
        let value = try self.value(depth: 0)
        skipSpace()
        if at < bytes.count {
            throw wrong("expected the end")
        }
        return value
    }

    private func wrong(_ what: String) -> LesonnxError {
        .input("not JSON: \(what) at byte \(at)")
    }

    private mutating func skipSpace() {
        while at < bytes.count, [0x20, 0x0A, 0x0D, 0x09].contains(bytes[at]) {
            at += 1
        }
    }

    private mutating func skip(_ character: Unicode.Scalar) -> Bool {
        skipSpace()
        if at < bytes.count && bytes[at] == UInt8(ascii: character) {
            at += 1
            return true
        }
        return false
    }

    private mutating func value(depth: Int) throws(LesonnxError) -> JSON {
        if depth > Self.maxDepth {
            throw wrong("nested too deeply")
        }
        skipSpace()
        guard at < bytes.count else { throw wrong("expected a value") }
        switch bytes[at] {
        case UInt8(ascii: "{"): return try object(depth: depth)
        case UInt8(ascii: "["): return try array(depth: depth)
        case UInt8(ascii: "\""): return .string(try string())
        case UInt8(ascii: "t"): return try word("true", .bool(true))
        case UInt8(ascii: "f"): return try word("false", .bool(false))
        case UInt8(ascii: "n"): return try word("null", .null)
        default: return try number()
        }
    }

    private mutating func object(depth: Int) throws(LesonnxError) -> JSON {
        at += 1
        var entries: [JSON.Entry] = []
        if skip("}") {
            return .object(entries)
        }
        repeat {
            skipSpace()
            guard at < bytes.count, bytes[at] == UInt8(ascii: "\"") else { throw wrong("expected a key") }
            let key = try string()
            if !skip(":") {
                throw wrong("expected ':'")
            }
            entries.append(JSON.Entry(key: key, value: try value(depth: depth + 1)))
        } while skip(",")
        if !skip("}") {
            throw wrong("expected ',' or '}'")
        }
        return .object(entries)
    }

    private mutating func array(depth: Int) throws(LesonnxError) -> JSON {
        at += 1
        var values: [JSON] = []
        if skip("]") {
            return .array(values)
        }
        repeat {
            values.append(try value(depth: depth + 1))
        } while skip(",")
        if !skip("]") {
            throw wrong("expected ',' or ']'")
        }
        return .array(values)
    }

    private mutating func word(_ word: StaticString, _ value: JSON) throws(LesonnxError) -> JSON {
        let expected = UnsafeBufferPointer(start: word.utf8Start, count: word.utf8CodeUnitCount)
        if !bytes[at...].starts(with: expected) {
            throw wrong("expected \(word)")
        }
        at += expected.count
        return value
    }

    private mutating func number() throws(LesonnxError) -> JSON {
        let start = at
        func digits(_ at: inout Int) -> Int {
            let first = at
            while at < bytes.count, (0x30...0x39).contains(bytes[at]) {
                at += 1
            }
            return at - first
        }
        var end = at
        if end < bytes.count && bytes[end] == UInt8(ascii: "-") {
            end += 1
        }
        let whole = end
        let count = digits(&end)
        if count == 0 || (count > 1 && bytes[whole] == 0x30) {
            throw wrong("expected a value")
        }
        var isWhole = true
        if end < bytes.count && bytes[end] == UInt8(ascii: ".") {
            isWhole = false
            end += 1
            if digits(&end) == 0 {
                throw wrong("a number without digits behind its point")
            }
        }
        if end < bytes.count && (bytes[end] | 0x20) == UInt8(ascii: "e") {
            isWhole = false
            end += 1
            if end < bytes.count && (bytes[end] == UInt8(ascii: "+") || bytes[end] == UInt8(ascii: "-")) {
                end += 1
            }
            if digits(&end) == 0 {
                throw wrong("a number without digits in its exponent")
            }
        }
        let text = String(decoding: bytes[start..<end], as: UTF8.self)
        at = end
        if isWhole, let value = Int(text) {
            return .int(value)
        }
        guard let value = Double(text), value.isFinite else { throw wrong("a number that is too large") }
        return .double(value)
    }

    private mutating func string() throws(LesonnxError) -> String {
        at += 1
        let start = at
        // Most strings hold no escape: they are taken as they are.
        while at < bytes.count, bytes[at] != UInt8(ascii: "\""), bytes[at] != UInt8(ascii: "\\"), bytes[at] >= 0x20 {
            at += 1
        }
        var text: [UInt8] = Array(bytes[start..<at])
        while true {
            guard at < bytes.count else { throw wrong("a string without its end") }
            let byte = bytes[at]
            if byte == UInt8(ascii: "\"") {
                at += 1
                break
            }
            if byte < 0x20 {
                throw wrong("a control character in a string")
            }
            if byte == UInt8(ascii: "\\") {
                at += 1
                text += try escaped().utf8
                continue
            }
            text.append(byte)
            at += 1
        }
        guard let valid = String(validating: text, as: UTF8.self) else { throw wrong("a string that is not UTF-8") }
        return valid
    }

    private mutating func escaped() throws(LesonnxError) -> String {
        guard at < bytes.count else { throw wrong("a string without its end") }
        let byte = bytes[at]
        at += 1
        switch byte {
        case UInt8(ascii: "\""), UInt8(ascii: "\\"), UInt8(ascii: "/"): return String(Unicode.Scalar(byte))
        case UInt8(ascii: "b"): return "\u{8}"
        case UInt8(ascii: "f"): return "\u{c}"
        case UInt8(ascii: "n"): return "\n"
        case UInt8(ascii: "r"): return "\r"
        case UInt8(ascii: "t"): return "\t"
        case UInt8(ascii: "u"):
            var code = try fourDigits()
            if (0xD800..<0xDC00).contains(code) {
                guard at + 1 < bytes.count, bytes[at] == UInt8(ascii: "\\"), bytes[at + 1] == UInt8(ascii: "u") else {
                    throw wrong("half of a surrogate pair")
                }
                at += 2
                let low = try fourDigits()
                guard (0xDC00..<0xE000).contains(low) else { throw wrong("half of a surrogate pair") }
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            }
            guard let scalar = Unicode.Scalar(code) else { throw wrong("half of a surrogate pair") }
            return String(scalar)
        default: throw wrong("an escape that is none")
        }
    }

    private mutating func fourDigits() throws(LesonnxError) -> UInt32 {
        var code: UInt32 = 0
        for _ in 0..<4 {
            guard at < bytes.count, let digit = Character(Unicode.Scalar(bytes[at])).hexDigitValue else {
                throw wrong("an escape without four digits")
            }
            code = code << 4 | UInt32(digit)
            at += 1
        }
        return code
    }
}
