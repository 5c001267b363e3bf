/// What tells pictures apart: a digest of size and pixels. Image tokens of different pictures have the same ids.
public struct PictureKey: Equatable, Hashable, Sendable {
    let digest: String
}

/// A decoded picture: 8-bit RGB, upright, without alpha. Immutable, safe to share; copies share the pixels.
public struct Picture: Sendable {
    public let height: Int
    public let width: Int
    /// Row by row from the top, three bytes a pixel.
    public let rgb: [UInt8]
    public let key: PictureKey

    /// Throws `input` where the bytes are not those of a picture of this size.
    public init(height: Int, width: Int, rgb: [UInt8]) throws(LesonnxError) {
        let count = product(height, width).flatMap { product($0, 3) }
        if height < 1 || width < 1 || count != rgb.count {
            throw .input("a picture of \(width) x \(height) pixels has \(rgb.count) bytes, expected three a pixel and at least one pixel")
        }
        self.height = height
        self.width = width
        self.rgb = rgb
        var digest = Sha256()
        [UInt64(height).littleEndian, UInt64(width).littleEndian].withUnsafeBytes { digest.update($0) }
        rgb.withUnsafeBytes { digest.update($0) }
        key = PictureKey(digest: digest.finish())
    }
}

extension Picture: Equatable {
    public static func == (one: Picture, other: Picture) -> Bool { one.key == other.key }
}
