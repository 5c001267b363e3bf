import LesonnxScheduler

/// A picture that goes with a question.
public struct Attachment: Identifiable, Equatable, Sendable {
    /// Larger pictures are made smaller while they are decoded: a bundle cuts at most about ten squares of 448 pixels from one.
    static let longestSide = 2048
    static let thumbnailSide = 192

    public let id: Int
    public let picture: Picture
    /// The same, small enough to be drawn at any time.
    public let thumbnail: Picture
}

extension Picture {
    /// The picture at most so large, of the pixels nearest to those of the smaller one.
    func thumbnail(longestSide: Int) -> Picture {
        let longest = max(height, width)
        if longest <= longestSide {
            return self
        }
        func side(_ length: Int) -> Int { max(1, length * longestSide / longest) }
        let (rows, columns) = (side(height), side(width))
        var small: [UInt8] = []
        small.reserveCapacity(rows * columns * 3)
        for row in 0..<rows {
            let line = row * height / rows * width
            for column in 0..<columns {
                let at = 3 * (line + column * width / columns)
                small += rgb[at..<at + 3]
            }
        }
        // The sizes fit by the loops above, so it cannot be refused.
        return (try? Picture(height: rows, width: columns, rgb: small)) ?? self
    }
}
