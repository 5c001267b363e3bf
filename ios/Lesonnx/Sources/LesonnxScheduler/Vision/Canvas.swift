// Positions of a prompt with pictures: text counts up, a picture's tokens lie on a canvas of heights and widths. Pure; golden vectors
// in tests/data/vision.json hold it to Python's.

extension VisionRecord {
    /// Time, height and width of each token of a prompt whose pictures, in order, have these views.
    ///
    /// The position of a token that follows is the greatest of them plus one. Throws `input` where the prompt's image tokens and marks
    /// are not those of these pictures. Linear in the number of tokens.
    public func positions(_ tokenIds: [Int], _ pictures: [[PictureView]]) throws(LesonnxError) -> [[Int]] {
        var positions = Array(repeating: Array(repeating: 0, count: tokenIds.count), count: 3)
        func text(_ range: Range<Int>, from position: Int) {
            for place in range {
                for row in 0..<3 {
                    positions[row][place] = position + place - range.lowerBound
                }
            }
        }
        let images = tokenIds.indices.filter { tokenIds[$0] == tokens.image }
        let marks = Set(tokens.byName.map(\.id)).subtracting([tokens.image])
        var laid: [[PictureView]: Canvas] = [:]
        var (done, next, seen) = (0, 0, 0)
        for (number, views) in pictures.enumerated() {
            let canvas = laid[views] ?? Canvas(views, self)
            laid[views] = canvas
            if seen == images.count {
                throw .input("the prompt has no image tokens for picture \(number + 1) of \(pictures.count)")
            }
            let start = images[seen] - 1
            let end = start + canvas.tokenIds.count
            if start < done || end > tokenIds.count || !tokenIds[start..<end].elementsEqual(canvas.tokenIds) {
                throw .input(
                    "the prompt's image tokens at \(start + 1) are not those of picture \(number + 1): expected "
                        + "\(canvas.tokenIds.count) tokens with their marks, as its size gives them")
            }
            text(done..<start, from: next)
            let origin = next + start - done
            for (offset, place) in canvas.places.enumerated() {
                positions[0][start + offset] = origin
                positions[1][start + offset] = max(origin + place.height, 0)
                positions[2][start + offset] = max(origin + place.width, 0)
            }
            // Marks straight after it, but for one that opens the next picture.
            done = end
            while done < tokenIds.count, marks.contains(tokenIds[done]),
                done + 1 == tokenIds.count || tokenIds[done + 1] != tokens.image
            {
                for row in 0..<3 {
                    positions[row][done] = origin
                }
                done += 1
            }
            next = origin + canvas.extent + 1
            seen += canvas.numImageTokens
        }
        if seen != images.count {
            throw .input(
                "the prompt has \(images.count) image tokens, expected \(seen), those of \(pictures.count) pictures")
        }
        text(done..<tokenIds.count, from: next)
        return positions
    }
}

/// A picture's tokens with its marks, and where they lie from its origin on.
private struct Canvas {
    private(set) var tokenIds: [Int] = []
    private(set) var places: [Extent] = []
    private(set) var numImageTokens = 0
    /// The longer side.
    let extent: Int

    init(_ views: [PictureView], _ vision: VisionRecord) {
        let (tokens, own) = (vision.tokens, vision.tokens(views[0]))
        let sliced = views.count > 1 ? views[1] : nil
        let (cell, grid) = (sliced.map(vision.tokens) ?? own, sliced?.grid ?? Extent(1, 1))
        let canvas = Extent(grid.height * cell.height, grid.width * cell.width)
        extent = max(canvas.height, canvas.width)
        add(tokens.imageStart, Extent(-1, -1))
        add(product(spread(own.height, canvas.height), spread(own.width, canvas.width)), tokens.image)
        add(tokens.imageEnd, canvas)
        if sliced == nil {
            return
        }
        for row in 0..<grid.height {
            if row > 0 {
                add(tokens.newline, Extent(row * cell.height - 1, canvas.width))
            }
            for column in 0..<grid.width {
                let first = Extent(row * cell.height, column * cell.width)
                let last = Extent(first.height + cell.height - 1, first.width + cell.width - 1)
                add(tokens.sliceStart, first)
                add(product(Array(first.height...last.height), Array(first.width...last.width)), tokens.image)
                add(tokens.sliceEnd, last)
            }
        }
    }

    private mutating func add(_ mark: Int, _ place: Extent) {
        tokenIds.append(mark)
        places.append(place)
    }

    private mutating func add(_ places: [Extent], _ image: Int) {
        tokenIds += Array(repeating: image, count: places.count)
        self.places += places
        numImageTokens += places.count
    }
}

private func product(_ heights: [Int], _ widths: [Int]) -> [Extent] {
    heights.flatMap { height in widths.map { Extent(height, $0) } }
}

/// `count` places in 0..<length, both ends among them, evenly, each rounded, ties to even; 0 if it is one.
///
/// In float32, counted from the nearer end, as the model's own code has it: the sum of what is rounded decides ties.
private func spread(_ count: Int, _ length: Int) -> [Int] {
    if count == 1 {
        return [0]
    }
    let last = Float(length - 1)
    let step = last / Float(count - 1)
    return (0..<count).map { place in
        let exact = place < count / 2 ? step * Float(place) : last - step * Float(count - 1 - place)
        return Int(exact.rounded(.toNearestOrEven))
    }
}
