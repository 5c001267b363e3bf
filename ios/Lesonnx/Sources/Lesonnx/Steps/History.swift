import LesonnxScheduler

/// What a sequence has run so far: its tokens, their positions, and the pictures that some of them stand for. Owned by a runner.
///
/// It knows nothing of states: how far these go back, they say themselves.
struct History {
    private(set) var tokenIds: [Int] = []
    private var positions: Positions
    /// Of every token, the picture that it is an image token of.
    private var keys: [PictureKey?] = []

    /// `positionRows`: how many positions a token has.
    init(positionRows: Int) {
        positions = Positions(rows: positionRows)
    }

    /// The positions of the next `count` tokens, by row: those that a prompt with pictures gives them, or those that come next.
    func next(_ count: Int, of pictures: PromptPictures?) -> [[Int]] {
        let range = tokenIds.count..<tokenIds.count + count
        return pictures?.positions.map { Array($0[range]) } ?? positions.next(count)
    }

    /// These tokens have run, at these positions.
    mutating func append(_ ids: [Int], at places: [[Int]], of pictures: PromptPictures?) {
        keys += (tokenIds.count..<tokenIds.count + ids.count).map { pictures?.key(at: $0) }
        tokenIds += ids
        positions.append(places)
    }

    /// Only the first tokens have run.
    mutating func rewind(to numTokens: Int) {
        tokenIds.removeSubrange(numTokens...)
        keys.removeSubrange(numTokens...)
        positions.rewind(to: numTokens)
    }

    /// How many tokens a prompt begins with that have run: the same ids, for the same pictures, at the same places. The prompt's last
    /// token never counts, since it must run.
    func common(_ prompt: [Int], _ pictures: PromptPictures?) -> Int {
        zip(tokenIds, prompt.dropLast()).enumerated().prefix { place, tokens in
            tokens.0 == tokens.1 && keys[place] == pictures?.key(at: place)
                && positions.isEqual(at: place, to: pictures?.positions)
        }.count
    }
}
