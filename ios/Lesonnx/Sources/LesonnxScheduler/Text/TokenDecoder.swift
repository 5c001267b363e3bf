/// Token ids to text by a Hugging Face `tokenizer.json`: its vocabulary and its decoder. Immutable, safe to share.
///
/// It knows the decoders of the families that are exported: byte-level, byte fallback, metaspace, and sequences of these with
/// replacements, fusing and stripping. It does not encode.
public struct TokenDecoder: TokenDecoding {
    private let names: [String?]  // by id
    private let silent: Set<Int>
    private let steps: [DecoderStep]

    /// From the bytes of a `tokenizer.json`. Throws `bundle`, naming `source`, for what it is not or has that is not known.
    public init(parsing text: some Collection<UInt8>, source: String = "tokenizer.json") throws(LesonnxError) {
        let document: JSON
        do {
            document = try JSON(parsing: text)
        } catch {
            throw .bundle("\(source): \(error)")
        }
        try self.init(document, source: source)
    }

    /// From a `tokenizer.json` that is parsed already.
    public init(_ document: JSON, source: String = "tokenizer.json") throws(LesonnxError) {
        guard let vocabulary = document["model"]?["vocab"]?.object else {
            throw .bundle("\(source): model.vocab: expected an object of tokens and ids")
        }
        var named: [(Int, String)] = []
        for entry in vocabulary {
            guard let id = entry.value.int, (0..<maxTokens).contains(id) else {
                throw .bundle("\(source): model.vocab: expected ids from 0, found \(entry.value.excerpt)")
            }
            named.append((id, entry.key))
        }
        var silent: Set<Int> = []
        for token in document["added_tokens"]?.array ?? [] {
            guard let id = token["id"]?.int, (0..<maxTokens).contains(id), let content = token["content"]?.string else {
                throw .bundle("\(source): added_tokens: expected objects with id and content")
            }
            named.append((id, content))
            if token["special"]?.bool == true {
                silent.insert(id)
            }
        }
        var names = [String?](repeating: nil, count: (named.map(\.0).max() ?? -1) + 1)
        for (id, name) in named {
            names[id] = name
        }
        self.names = names
        self.silent = silent
        steps = try DecoderStep.read(document["decoder"] ?? .null, source: source)
    }

    /// Number of tokens, added ones included; the model's vocabulary may be padded beyond it.
    public var vocabSize: Int { names.count }

    /// The name of a token, as the vocabulary writes it; nil beyond the vocabulary.
    public func name(of token: Int) -> String? {
        names.indices.contains(token) ? names[token] : nil
    }

    public func isSilent(_ token: Int) -> Bool {
        silent.contains(token) || name(of: token) == nil
    }

    public func decode(_ ids: [Int], skipSpecialTokens: Bool = true) -> String {
        var tokens: [String] = []
        for id in ids {
            if let name = name(of: id), !(skipSpecialTokens && silent.contains(id)) {
                tokens.append(name)
            }
        }
        for step in steps {
            tokens = step.apply(to: tokens)
        }
        return tokens.joined()
    }
}

/// No vocabulary is larger; a larger id would only exhaust memory.
private let maxTokens = 1 << 24

/// What a tokenizer's `decoder` does with the list of tokens; the text is what is left, joined.
private enum DecoderStep: Sendable {
    case byteLevel
    case byteFallback
    case fuse
    case replace(pattern: String, content: String)
    case strip(content: Unicode.Scalar, start: Int, stop: Int)
    case metaspace(replacement: Unicode.Scalar, dropsFirst: Bool)

    static func read(_ decoder: JSON, source: String) throws(LesonnxError) -> [DecoderStep] {
        switch decoder["type"]?.string {
        case "ByteLevel": return [.byteLevel]
        case "ByteFallback": return [.byteFallback]
        case "Fuse": return [.fuse]
        case "Replace":
            guard let pattern = decoder["pattern"]?["String"]?.string, let content = decoder["content"]?.string else {
                throw .bundle("\(source): decoder: expected Replace with a pattern of type String")
            }
            return [.replace(pattern: pattern, content: content)]
        case "Strip":
            guard let content = decoder["content"]?.string?.unicodeScalars, content.count == 1,
                let start = decoder["start"]?.int, let stop = decoder["stop"]?.int
            else { throw .bundle("\(source): decoder: expected Strip with content, start and stop") }
            return [.strip(content: content.first!, start: start, stop: stop)]
        case "Metaspace":
            let replacement = decoder["replacement"]?.string?.unicodeScalars.first ?? "▁"
            return [.metaspace(replacement: replacement, dropsFirst: decoder["prepend_scheme"]?.string != "never")]
        case "Sequence":
            var steps: [DecoderStep] = []
            for step in decoder["decoders"]?.array ?? [] {
                steps += try read(step, source: source)
            }
            return steps
        default:
            throw .bundle("\(source): decoder: \(decoder["type"]?.excerpt ?? "none") is not known here")
        }
    }

    func apply(to tokens: [String]) -> [String] {
        switch self {
        case .byteLevel:
            return [String(decoding: tokens.flatMap(bytesOfByteLevel), as: UTF8.self)]
        case .byteFallback:
            return fallBack(tokens)
        case .fuse:
            return [tokens.joined()]
        case .replace(let pattern, let content):
            return tokens.map { replacing($0, pattern, content) }
        case .strip(let content, let start, let stop):
            return tokens.map { stripped($0, content, start, stop) }
        case .metaspace(let replacement, let dropsFirst):
            return tokens.enumerated().map { place, token in
                var text = String.UnicodeScalarView()
                for scalar in token.unicodeScalars {
                    if scalar != replacement {
                        text.append(scalar)
                    } else if place > 0 || !dropsFirst {
                        text.append(" ")
                    }
                }
                return String(text)
            }
        }
    }
}

/// The alphabet in which byte-level vocabularies write bytes: printable Latin-1 as itself, the others from U+0100 on.
private let byteOfScalar: [Unicode.Scalar: UInt8] = {
    var bytes: [Unicode.Scalar: UInt8] = [:]
    var next: UInt32 = 0x100
    for byte in UInt8.min...UInt8.max {
        let isItself = (0x21...0x7E).contains(byte) || (0xA1...0xAC).contains(byte) || byte >= 0xAE
        bytes[isItself ? Unicode.Scalar(byte) : Unicode.Scalar(next)!] = byte
        next += isItself ? 0 : 1
    }
    return bytes
}()

/// A token that is not written in the byte alphabet stands for itself.
private func bytesOfByteLevel(_ token: String) -> [UInt8] {
    var bytes: [UInt8] = []
    for scalar in token.unicodeScalars {
        guard let byte = byteOfScalar[scalar] else { return Array(token.utf8) }
        bytes.append(byte)
    }
    return bytes
}

/// Runs of tokens such as <0xE2> become the characters that their bytes are, or U+FFFD each where they are none.
private func fallBack(_ tokens: [String]) -> [String] {
    var result: [String] = []
    var run: [UInt8] = []
    func endRun() {
        if run.isEmpty {
            return
        }
        if let text = String(validating: run, as: UTF8.self) {
            result.append(text)
        } else {
            result += Array(repeating: "\u{FFFD}", count: run.count)
        }
        run = []
    }
    for token in tokens {
        let characters = Array(token.utf8)
        if characters.count == 6, token.hasPrefix("<0x"), token.hasSuffix(">"),
            let byte = UInt8(String(decoding: characters[3..<5], as: UTF8.self), radix: 16)
        {
            run.append(byte)
        } else {
            endRun()
            result.append(token)
        }
    }
    endRun()
    return result
}

/// By code points: Swift's own search takes a mark that follows for a part of the character before.
private func replacing(_ text: String, _ pattern: String, _ content: String) -> String {
    let sought = Array(pattern.unicodeScalars)
    if sought.isEmpty {
        return text
    }
    let scalars = Array(text.unicodeScalars)
    var result = String.UnicodeScalarView()
    var at = 0
    while at < scalars.count {
        if scalars[at...].starts(with: sought) {
            result.append(contentsOf: content.unicodeScalars)
            at += sought.count
        } else {
            result.append(scalars[at])
            at += 1
        }
    }
    return String(result)
}

private func stripped(_ text: String, _ content: Unicode.Scalar, _ start: Int, _ stop: Int) -> String {
    let scalars = text.unicodeScalars
    let head = scalars.prefix(max(0, start)).prefix { $0 == content }.count
    let rest = scalars.dropFirst(head)
    let tail = rest.reversed().prefix(max(0, stop)).prefix { $0 == content }.count
    return String(String.UnicodeScalarView(rest.dropLast(tail)))
}
