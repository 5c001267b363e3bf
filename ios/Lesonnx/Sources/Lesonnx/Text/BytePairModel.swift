import LesonnxScheduler

/// Byte-pair merges: a word's first symbols in, its tokens out. Immutable.
///
/// By code points (as bytes of UTF-8): a vocabulary may hold texts that Swift takes for equal.
struct BytePairModel: Sendable {
    private struct Merge {
        let rank: Int32
        let id: Int32
    }

    private let ids: [[UInt8]: Int32]
    private let merges: [UInt64: Merge]
    /// Whole words that are in the vocabulary are not split.
    private let ignoresMerges: Bool
    private let unknown: Int32?
    private let fusesUnknown: Bool
    /// The tokens <0x00> to <0xFF> for characters that are not in the vocabulary; nil without byte fallback.
    private let fallback: [Int32]?

    /// From the `model` of a tokenizer.json. Throws `bundle`, naming `source`.
    init(_ model: JSON, source: String) throws(LesonnxError) {
        guard model["type"]?.string ?? "BPE" == "BPE", let vocabulary = model["vocab"]?.object else {
            throw .bundle("\(source): model: expected BPE with a vocab, found \(model["type"]?.string ?? "none")")
        }
        for key in ["continuing_subword_prefix", "end_of_word_suffix"] where !(model[key]?.string ?? "").isEmpty {
            throw .bundle("\(source): model.\(key): is not known here")
        }
        var ids = [[UInt8]: Int32](minimumCapacity: vocabulary.count)
        for entry in vocabulary {
            guard let id = entry.value.int.flatMap(Int32.init(exactly:)), id >= 0 else {
                throw .bundle("\(source): model.vocab: expected ids from 0")
            }
            ids[Array(entry.key.utf8)] = id
        }
        var merges = [UInt64: Merge](minimumCapacity: model["merges"]?.array?.count ?? 0)
        for (rank, merge) in (model["merges"]?.array ?? []).enumerated() {
            let pair = Self.pair(merge)
            guard pair.count == 2, let left = ids[pair[0]], let right = ids[pair[1]], let id = ids[pair[0] + pair[1]] else {
                throw .bundle("\(source): model.merges.\(rank): expected two tokens whose join is a token")
            }
            if merges[Self.key(left, right)] == nil {
                merges[Self.key(left, right)] = Merge(rank: Int32(rank), id: id)
            }
        }
        unknown = model["unk_token"]?.string.flatMap { ids[Array($0.utf8)] }
        fusesUnknown = model["fuse_unk"]?.bool ?? false
        ignoresMerges = model["ignore_merges"]?.bool ?? false
        if model["byte_fallback"]?.bool == true {
            let tokens = (0..<256).map { byte in
                let digits = String(byte, radix: 16, uppercase: true)
                return ids[Array("<0x\(byte < 16 ? "0" : "")\(digits)>".utf8)]
            }
            fallback = tokens.contains(nil) ? nil : tokens.compactMap { $0 }
        } else {
            fallback = nil
        }
        self.ids = ids
        self.merges = merges
    }

    private static func pair(_ merge: JSON) -> [[UInt8]] {
        if let pair = merge.array {
            return pair.map { Array(($0.string ?? "").utf8) }
        }
        return Array((merge.string ?? "").utf8).split(separator: 0x20).map { Array($0) }
    }

    private static func key(_ left: Int32, _ right: Int32) -> UInt64 {
        UInt64(UInt32(bitPattern: left)) << 32 | UInt64(UInt32(bitPattern: right))
    }

    /// A word's tokens. Its characters are the first symbols.
    func tokens(of word: String) -> [Int] {
        if ignoresMerges, let id = ids[Array(word.utf8)] {
            return [Int(id)]
        }
        var symbols: [Int32] = []
        var followsUnknown = false
        for scalar in word.unicodeScalars {
            let bytes = Array(String(scalar).utf8)
            if let id = ids[bytes] {
                symbols.append(id)
                followsUnknown = false
            } else if let fallback {
                symbols += bytes.map { fallback[Int($0)] }
                followsUnknown = false
            } else if let unknown {
                if !(followsUnknown && fusesUnknown) {
                    symbols.append(unknown)
                }
                followsUnknown = true
            }
        }
        return merged(symbols)
    }

    /// Merge pairs by rank, the leftmost of equals first, until none is left.
    private func merged(_ symbols: [Int32]) -> [Int] {
        struct Candidate: Comparable {
            let rank: Int32
            let place: Int
            let left: Int32
            let right: Int32
            static func < (a: Candidate, b: Candidate) -> Bool { (a.rank, a.place) < (b.rank, b.place) }
        }
        var symbols = symbols
        var next = symbols.indices.map { $0 + 1 }
        var previous = symbols.indices.map { $0 - 1 }
        var heap = Heap<Candidate>()
        func consider(_ place: Int) {
            guard place >= 0, next[place] < symbols.count else { return }
            let (left, right) = (symbols[place], symbols[next[place]])
            if let merge = merges[Self.key(left, right)] {
                heap.push(Candidate(rank: merge.rank, place: place, left: left, right: right))
            }
        }
        symbols.indices.forEach(consider)
        while let best = heap.pop() {
            let place = best.place
            let after = next[place]
            // What has changed since is another pair: a symbol that was swallowed is -1.
            guard symbols[place] == best.left, after < symbols.count, symbols[after] == best.right,
                let merge = merges[Self.key(best.left, best.right)]
            else { continue }
            symbols[place] = merge.id
            symbols[after] = -1
            next[place] = next[after]
            if next[place] < symbols.count {
                previous[next[place]] = place
            }
            consider(previous[place])
            consider(place)
        }
        return symbols.filter { $0 >= 0 }.map(Int.init)
    }
}

/// A binary heap, least element first.
private struct Heap<Element: Comparable> {
    private var elements: [Element] = []

    mutating func push(_ element: Element) {
        elements.append(element)
        var at = elements.count - 1
        while at > 0, elements[at] < elements[(at - 1) / 2] {
            elements.swapAt(at, (at - 1) / 2)
            at = (at - 1) / 2
        }
    }

    mutating func pop() -> Element? {
        guard let last = elements.popLast() else { return nil }
        guard let first = elements.first else { return last }
        elements[0] = last
        var at = 0
        while true {
            var least = at
            for child in [2 * at + 1, 2 * at + 2] where child < elements.count && elements[child] < elements[least] {
                least = child
            }
            if least == at {
                return first
            }
            elements.swapAt(at, least)
            at = least
        }
    }
}
