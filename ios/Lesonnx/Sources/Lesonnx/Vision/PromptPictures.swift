import LesonnxScheduler

/// The pictures of a prompt among its tokens: where these lie, and what stands in the place of image tokens. Used from one thread at
/// a time.
final class PromptPictures {
    /// By row (time, height, width), of every token of the prompt.
    let positions: [[Int]]
    let keys: [PictureKey]
    let views: [[PictureView]]
    let numImageTokens: Int
    /// The pixels of all of them, which whoever gave them may go on holding.
    let pixelBytes: Int
    /// The pictures that are not seen yet; their pixels go once they are.
    private var pictures: [Picture?]
    private var features: [Tensor?]
    /// Of each token: the picture whose row of features it is, and which.
    private var places: [Place?]

    private struct Place {
        let picture: Int
        let row: Int
    }

    /// `tokenIds` with every picture expanded, seen as `views`. Throws `input` where they are not these pictures'.
    init(_ tokenIds: [Int], _ pictures: [Picture], views: [[PictureView]], _ vision: VisionRecord) throws(LesonnxError) {
        positions = try vision.positions(tokenIds, views)
        keys = pictures.map(\.key)
        self.views = views
        self.pictures = pictures
        features = Array(repeating: nil, count: pictures.count)
        places = Array(repeating: nil, count: tokenIds.count)
        let distinct = Dictionary(pictures.map { ($0.key, $0.rgb.count) }, uniquingKeysWith: { first, _ in first })
        pixelBytes = distinct.values.reduce(0, +)
        let counts = views.map(vision.numTokens)
        numImageTokens = counts.reduce(0, +)
        let images = tokenIds.indices.filter { tokenIds[$0] == vision.tokens.image }
        let rows = counts.enumerated().flatMap { number, count in (0..<count).map { Place(picture: number, row: $0) } }
        for (place, row) in zip(images, rows) {
            places[place] = row
        }
    }

    /// The picture of an image token; nil for text.
    func key(at place: Int) -> PictureKey? { places[place].map { keys[$0.picture] } }

    /// The pictures with image tokens at or behind a place that have no features yet.
    func unseen(from place: Int) -> [Int] {
        let needed = Set(places[place...].compactMap { $0?.picture })
        return needed.filter { features[$0] == nil }.sorted()
    }

    /// A picture that is not seen yet.
    func picture(_ number: Int) -> Picture? { pictures[number] }

    /// The features [I,H] of a picture; its pixels are let go of.
    func see(_ number: Int, _ features: Tensor) {
        self.features[number] = features
        pictures[number] = nil
    }

    /// Put features over the rows of `hidden` [1,T,H] that are image tokens; its first row is that of token number `place`.
    func write(to hidden: Tensor, from place: Int) throws {
        let rowBytes = hidden.shape[2] * hidden.dtype.byteCount
        for row in 0..<hidden.shape[1] {
            guard let image = places[place + row] else { continue }
            guard let source = features[image.picture] else { throw LesonnxError.failure("picture \(image.picture) was not seen") }
            (hidden.pointer + row * rowBytes).copyMemory(from: source.pointer + image.row * rowBytes, byteCount: rowBytes)
        }
    }
}
