import Foundation
import LesonnxScheduler

/// A Hugging Face `tokenizer.json` with byte-pair merges, byte-level or with byte fallback, as the exported families have. Nothing
/// but Foundation, so it is the same on a phone and elsewhere. What it does not know of a file it refuses by name.
public struct BytePairTokenizer: Tokenizer, @unchecked Sendable {  // unchecked: compiled expressions never change
    private let decoder: TokenDecoder
    private let model: BytePairModel
    private let normalizers: [Normalizer]
    private let preTokenizers: [PreTokenizer]
    private let isByteLevel: Bool
    /// Tokens with names of their own, found before and after the text is normalized.
    private let rawNames: AddedTokens
    private let normalizedNames: AddedTokens
    private let prefix: [Int]
    private let suffix: [Int]

    /// Read a `tokenizer.json`. Throws `bundle` where it is missing, broken, or has what is not known here.
    public init(file: URL) throws(LesonnxError) {
        let source = file.path(percentEncoded: false)
        guard let text = try? Data(contentsOf: file) else { throw .bundle("\(source): cannot be read") }
        try self.init(parsing: text, source: source)
    }

    /// From the bytes of a `tokenizer.json`.
    public init(parsing text: some Collection<UInt8>, source: String = "tokenizer.json") throws(LesonnxError) {
        let document: JSON
        do {
            document = try JSON(parsing: text)
        } catch {
            throw .bundle("\(source): \(error)")
        }
        decoder = try TokenDecoder(document, source: source)
        model = try BytePairModel(document["model"] ?? .null, source: source)
        normalizers = try Normalizer.read(document["normalizer"], source: source)
        preTokenizers = try PreTokenizer.read(document["pre_tokenizer"], source: source)
        isByteLevel = preTokenizers.contains(where: \.isByteLevel)
        let added = document["added_tokens"]?.array ?? []
        rawNames = try AddedTokens(added.filter { $0["normalized"]?.bool != true }, source: source)
        normalizedNames = try AddedTokens(added.filter { $0["normalized"]?.bool == true }, source: source)
        (prefix, suffix) = try Self.around(document["post_processor"], source: source)
    }

    public func decode(_ ids: [Int], skipSpecialTokens: Bool = true) -> String {
        decoder.decode(ids, skipSpecialTokens: skipSpecialTokens)
    }

    public func isSilent(_ token: Int) -> Bool { decoder.isSilent(token) }

    public func encode(_ text: String, addSpecialTokens: Bool) -> [Int] {
        var ids = addSpecialTokens ? prefix : []
        for piece in rawNames.cut(text) {
            if let id = piece.id {
                ids.append(id)
                continue
            }
            let normal = normalizers.reduce(piece.text) { $1.apply(to: $0) }
            for piece in normalizedNames.cut(normal) {
                ids += piece.id.map { [$0] } ?? words(piece.text).flatMap { model.tokens(of: $0) }
            }
        }
        return ids + (addSpecialTokens ? suffix : [])
    }

    private func words(_ text: String) -> [String] {
        let words = preTokenizers.reduce([text]) { $1.apply(to: $0) }
        return isByteLevel ? words.map(byteLevel) : words
    }

    /// What the post-processor puts around a single text.
    private static func around(_ json: JSON?, source: String) throws(LesonnxError) -> (prefix: [Int], suffix: [Int]) {
        switch json?["type"]?.string {
        case nil, "ByteLevel":
            return ([], [])
        case "Sequence":
            var (prefix, suffix): ([Int], [Int]) = ([], [])
            for step in json?["processors"]?.array ?? [] {
                let (before, after) = try around(step, source: source)
                prefix = before + prefix
                suffix += after
            }
            return (prefix, suffix)
        case "TemplateProcessing":
            var (prefix, suffix): ([Int], [Int]) = ([], [])
            var isBefore = true
            for piece in json?["single"]?.array ?? [] {
                guard let name = piece["SpecialToken"]?["id"]?.string else {
                    isBefore = false
                    continue
                }
                guard let ids = json?["special_tokens"]?[name]?["ids"]?.array?.compactMap(\.int) else {
                    throw .bundle("\(source): post_processor: the token '\(name)' is not among its special_tokens")
                }
                if isBefore {
                    prefix += ids
                } else {
                    suffix += ids
                }
            }
            return (prefix, suffix)
        case let other:
            throw .bundle("\(source): post_processor: \(other ?? "none") is not known here")
        }
    }
}

/// Tokens that stand in texts by name, the first and then the longest counts.
private struct AddedTokens {
    private let expression: NSRegularExpression?
    private let ids: [[UInt8]: Int]

    init(_ tokens: [JSON], source: String) throws(LesonnxError) {
        var ids: [[UInt8]: Int] = [:]
        var patterns: [(name: String, pattern: String)] = []
        for token in tokens {
            guard let name = token["content"]?.string, let id = token["id"]?.int else {
                throw .bundle("\(source): added_tokens: expected objects with id and content")
            }
            if token["single_word"]?.bool == true {
                throw .bundle("\(source): added_tokens: '\(name)' is a single_word, which is not known here")
            }
            if name.isEmpty {
                continue
            }
            ids[Array(name.utf8)] = id
            let before = token["lstrip"]?.bool == true ? #"\s*"# : ""
            let after = token["rstrip"]?.bool == true ? #"\s*"# : ""
            patterns.append((name, before + "(" + NSRegularExpression.escapedPattern(for: name) + ")" + after))
        }
        patterns.sort { $0.name.unicodeScalars.count > $1.name.unicodeScalars.count }
        let pattern = patterns.map(\.pattern).joined(separator: "|")
        expression = pattern.isEmpty ? nil : try? NSRegularExpression(pattern: pattern)
        self.ids = ids
    }

    func cut(_ text: String) -> [(text: String, id: Int?)] {
        guard let expression else { return text.isEmpty ? [] : [(text, nil)] }
        return pieces(of: text, by: expression).map { piece in
            guard piece.isMatch else { return (piece.text, nil) }
            let bare = [UInt8](piece.text.utf8)
            return (piece.text, ids[bare] ?? ids[Array(piece.text.trimmingCharacters(in: .whitespacesAndNewlines).utf8)])
        }
    }
}

/// The alphabet in which byte-level vocabularies write bytes: printable Latin-1 as itself, the others from U+0100 on.
private let scalarOfByte: [Unicode.Scalar] = {
    var next: UInt32 = 0x100
    return (UInt8.min...UInt8.max).map { byte in
        let isItself = (0x21...0x7E).contains(byte) || (0xA1...0xAC).contains(byte) || byte >= 0xAE
        defer { next += isItself ? 0 : 1 }
        return isItself ? Unicode.Scalar(byte) : Unicode.Scalar(next)!
    }
}()

private func byteLevel(_ word: String) -> String {
    var text = String.UnicodeScalarView()
    text.append(contentsOf: word.utf8.map { scalarOfByte[Int($0)] })
    return String(text)
}
