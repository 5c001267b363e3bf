private let replacement: Unicode.Scalar = "\u{FFFD}"  // what decoding puts in place of bytes that are no character, or not yet
private let maxBytesMissing = 3  // a character has at most 4 bytes, so the beginning of one at most 3 tokens
private let longWindowTokens = 16  // from here on a window without whole characters is shortened
private let maxWindowTokens = 64

/// Turns tokens into text as they come; belongs to one sequence.
///
/// The pieces together are what decoding all tokens at once gives, and no piece ends inside a character. Each step decodes a short
/// window: the tokens of the last piece, which tell whether a leading space belongs to the text, and those since. (Prefix and read
/// offsets, as text-generation-inference, vLLM and mlx-lm have them.)
public struct StreamDecoder: Sendable {
    private let tokenizer: any TokenDecoding
    private let skipSpecialTokens: Bool
    private var window: [Int] = []
    private var contextTokens = 0  // tokens of the window whose text is out
    private var emittedScalars = 0  // of the window's text

    /// Start an empty text.
    public init(_ tokenizer: any TokenDecoding, skipSpecialTokens: Bool = true) {
        self.tokenizer = tokenizer
        self.skipSpecialTokens = skipSpecialTokens
    }

    /// Add a token; the text that is certain by now, perhaps none.
    public mutating func push(_ token: Int) -> String {
        if skipSpecialTokens && tokenizer.isSilent(token) {
            return ""
        }
        window.append(token)
        let text = decode(window[...])
        // With byte fallback a whole run of bytes is U+FFFD until its last character is complete, so none of it is sure.
        let certain = text.count - text.reversed().prefix { $0 == replacement }.count
        var piece = emittedScalars < certain ? Array(text[emittedScalars..<certain]) : []
        emittedScalars += piece.count
        if !piece.isEmpty && certain == text.count {
            window.removeFirst(contextTokens)
            contextTokens = window.count
            emittedScalars = decode(window[...]).count
        } else if window.count - contextTokens >= longWindowTokens {
            piece += shorten(text)
        }
        return join(piece)
    }

    /// The rest, at the end of the text: bytes that never became a character are U+FFFD. Then it is empty again.
    public mutating func flush() -> String {
        let piece = decode(window[...]).dropFirst(emittedScalars)
        window = []
        contextTokens = 0
        emittedScalars = 0
        return join(piece)
    }

    private func decode(_ ids: ArraySlice<Int>) -> [Unicode.Scalar] {
        Array(tokenizer.decode(Array(ids), skipSpecialTokens: skipSpecialTokens).unicodeScalars)
    }

    /// Take the beginning off a long window of broken bytes where its text falls apart, by force when very long.
    private mutating func shorten(_ text: [Unicode.Scalar]) -> [Unicode.Scalar] {
        var keep = maxBytesMissing
        var head = Array(text.prefix(max(0, text.count - keep)))
        let apart = (maxBytesMissing + 1..<longWindowTokens).first { count in
            decode(window.dropLast(count)) + decode(window.suffix(count)) == text
        }
        if let apart {
            keep = apart
            head = decode(window.dropLast(apart))
        } else if window.count < maxWindowTokens {
            return []
        }
        let piece = head.dropFirst(emittedScalars)
        emittedScalars = max(0, emittedScalars - head.count)
        contextTokens = 0
        window.removeFirst(window.count - keep)
        return Array(piece)
    }
}

/// Ends a streamed text before the first stop string, wherever the pieces' borders lie; belongs to one sequence.
///
/// The stop string that is complete first counts (of several, the longest). Text that may become one is held back. By code
/// points, as on every host.
public struct StopChecker: Sendable {
    private let stops: [[Unicode.Scalar]]
    private var held: [Unicode.Scalar] = []
    /// The stop string that ended the text.
    public private(set) var stoppedBy: String?

    /// Throws `input` where a stop string is empty.
    public init(_ stops: [String]) throws(LesonnxError) {
        if stops.contains(where: \.isEmpty) {
            throw .input("a stop string is empty, expected at least one character")
        }
        self.stops = stops.map { Array($0.unicodeScalars) }
    }

    /// Add a piece; what may be shown of the text. After a stop (`stoppedBy`) nothing more comes.
    public mutating func push(_ piece: String) -> String {
        if stoppedBy != nil {
            return ""
        }
        if stops.isEmpty {
            return piece
        }
        let text = held + Array(piece.unicodeScalars)
        if let (stop, start) = firstStop(in: text) {
            stoppedBy = join(stop)
            held = []
            return join(text[..<start])
        }
        let overlap = stops.map { Self.overlap(text, $0) }.max() ?? 0
        held = Array(text.suffix(overlap))
        return join(text.dropLast(overlap))
    }

    /// What was held back, at the end of the text.
    public mutating func flush() -> String {
        defer { held = [] }
        return join(held)
    }

    private func firstStop(in text: [Unicode.Scalar]) -> (stop: [Unicode.Scalar], start: Int)? {
        var first: (stop: [Unicode.Scalar], start: Int)?
        for stop in stops where stop.count <= text.count {
            guard let start = (0...(text.count - stop.count)).first(where: { text[$0...].starts(with: stop) }) else { continue }
            guard let best = first else {
                first = (stop, start)
                continue
            }
            let (end, bestEnd) = (start + stop.count, best.start + best.stop.count)
            if end < bestEnd || (end == bestEnd && start < best.start) {
                first = (stop, start)
            }
        }
        return first
    }

    /// The longest proper beginning of `stop` that `text` ends with.
    private static func overlap(_ text: [Unicode.Scalar], _ stop: [Unicode.Scalar]) -> Int {
        let longest = min(text.count, stop.count - 1)
        return stride(from: longest, to: 0, by: -1).first { text.suffix($0).elementsEqual(stop.prefix($0)) } ?? 0
    }
}

private func join(_ scalars: some Sequence<Unicode.Scalar>) -> String {
    var text = String.UnicodeScalarView()
    text.append(contentsOf: scalars)
    return String(text)
}
