import Foundation
import LesonnxScheduler

/// A step that changes a text before it is cut into words: the `normalizer` of a tokenizer.json.
enum Normalizer: Sendable {
    case nfc, nfd, nfkc, nfkd
    case prepend(String)
    case replace(pattern: String, content: String)

    static func read(_ json: JSON?, source: String) throws(LesonnxError) -> [Normalizer] {
        guard let json, json != .null else { return [] }
        switch json["type"]?.string {
        case "NFC": return [.nfc]
        case "NFD": return [.nfd]
        case "NFKC": return [.nfkc]
        case "NFKD": return [.nfkd]
        case "Prepend": return [.prepend(json["prepend"]?.string ?? "")]
        case "Replace":
            guard let pattern = json["pattern"]?["String"]?.string, let content = json["content"]?.string else {
                throw .bundle("\(source): normalizer: expected Replace with a pattern of type String")
            }
            return [.replace(pattern: pattern, content: content)]
        case "Sequence":
            var steps: [Normalizer] = []
            for step in json["normalizers"]?.array ?? [] {
                steps += try read(step, source: source)
            }
            return steps
        case let other:
            throw .bundle("\(source): normalizer: \(other ?? "none") is not known here")
        }
    }

    func apply(to text: String) -> String {
        switch self {
        case .nfc: return text.precomposedStringWithCanonicalMapping
        case .nfd: return text.decomposedStringWithCanonicalMapping
        case .nfkc: return text.precomposedStringWithCompatibilityMapping
        case .nfkd: return text.decomposedStringWithCompatibilityMapping
        case .prepend(let prefix): return text.isEmpty ? text : prefix + text
        case .replace(let pattern, let content):
            return (text as NSString).replacingOccurrences(
                of: pattern, with: content, options: .literal, range: NSRange(location: 0, length: (text as NSString).length))
        }
    }
}

/// A step that cuts a text into words: the `pre_tokenizer` of a tokenizer.json.
///
/// Unchecked: a compiled expression never changes.
enum PreTokenizer: @unchecked Sendable {
    /// The matches, and what lies between them.
    case split(NSRegularExpression)
    /// What lies between the matches.
    case remove(NSRegularExpression)
    case metaspace(replacement: String, prepends: Bool, splits: NSRegularExpression?)
    /// Words in the alphabet in which byte-level vocabularies write bytes.
    case byteLevel(prefixesSpace: Bool)

    /// How the models of GPT-2's kind cut texts.
    private static let gpt2 = #"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"#

    static func read(_ json: JSON?, source: String) throws(LesonnxError) -> [PreTokenizer] {
        guard let json, json != .null else { return [] }
        switch json["type"]?.string {
        case "ByteLevel":
            let prefixes = PreTokenizer.byteLevel(prefixesSpace: json["add_prefix_space"]?.bool ?? true)
            return json["use_regex"]?.bool ?? true ? [prefixes, .split(try expression(gpt2, source))] : [prefixes]
        case "Digits":
            let single = json["individual_digits"]?.bool ?? false
            return [.split(try expression(single ? #"\p{N}"# : #"\p{N}+"#, source))]
        case "Split":
            let regex = json["pattern"]?["Regex"]?.string
            let literal = json["pattern"]?["String"]?.string.map { NSRegularExpression.escapedPattern(for: $0) }
            guard let pattern = regex ?? literal else { throw .bundle("\(source): pre_tokenizer: Split needs a pattern") }
            let behavior = json["behavior"]?.string ?? ""
            // Inverted, what is taken for a match lies between the matches.
            let isInverted = json["invert"]?.bool ?? false
            switch behavior {
            case "Isolated": return [.split(try expression(pattern, source))]
            case "Removed" where !isInverted: return [.remove(try expression(pattern, source))]
            default:
                throw .bundle("\(source): pre_tokenizer: Split with \(behavior)\(isInverted ? ", inverted," : "") is not known here")
            }
        case "Metaspace":
            let replacement = json["replacement"]?.string ?? "▁"
            let mark = NSRegularExpression.escapedPattern(for: replacement)
            let splits = json["split"]?.bool ?? true
            return [
                .metaspace(
                    replacement: replacement, prepends: json["prepend_scheme"]?.string ?? "always" != "never",
                    splits: splits ? try expression("\(mark)[^\(mark)]*", source) : nil)
            ]
        case "Sequence":
            var steps: [PreTokenizer] = []
            for step in json["pretokenizers"]?.array ?? [] {
                steps += try read(step, source: source)
            }
            return steps
        case let other:
            throw .bundle("\(source): pre_tokenizer: \(other ?? "none") is not known here")
        }
    }

    private static func expression(_ pattern: String, _ source: String) throws(LesonnxError) -> NSRegularExpression {
        do {
            return try NSRegularExpression(pattern: pattern)
        } catch {
            throw .bundle("\(source): pre_tokenizer: the expression '\(pattern)' cannot be read")
        }
    }

    var isByteLevel: Bool {
        if case .byteLevel = self { return true }
        return false
    }

    func apply(to words: [String]) -> [String] {
        switch self {
        case .split(let expression):
            return words.flatMap { pieces(of: $0, by: expression).map(\.text) }
        case .remove(let expression):
            return words.flatMap { pieces(of: $0, by: expression).filter { !$0.isMatch }.map(\.text) }
        case .byteLevel(let prefixesSpace):
            return prefixesSpace ? words.map { $0.utf8.first == 0x20 ? $0 : " " + $0 } : words
        case .metaspace(let replacement, let prepends, let splits):
            let marked = words.map { word in
                let text = Normalizer.replace(pattern: " ", content: replacement).apply(to: word)
                return prepends && !text.utf8.starts(with: replacement.utf8) ? replacement + text : text
            }
            guard let splits else { return marked }
            return marked.flatMap { pieces(of: $0, by: splits).map(\.text) }
        }
    }
}

/// A text cut at the matches of an expression: these, and what lies between them, in order.
func pieces(of text: String, by expression: NSRegularExpression) -> [(text: String, isMatch: Bool)] {
    let whole = text as NSString
    var pieces: [(String, Bool)] = []
    var end = 0
    for match in expression.matches(in: text, range: NSRange(location: 0, length: whole.length)) {
        let range = match.range
        if range.length == 0 {
            continue
        }
        if range.location > end {
            pieces.append((whole.substring(with: NSRange(location: end, length: range.location - end)), false))
        }
        pieces.append((whole.substring(with: range), true))
        end = range.location + range.length
    }
    if end < whole.length {
        pieces.append((whole.substring(from: end), false))
    }
    return pieces
}
