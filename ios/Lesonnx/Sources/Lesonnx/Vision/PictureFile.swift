import Foundation
import LesonnxScheduler

#if canImport(ImageIO)
import Accelerate
import CoreGraphics
import ImageIO
#endif

extension Picture {
    /// A picture in a file. Throws `input` in one line where it is none that this system can decode.
    ///
    /// Systems of Apple's decode what ImageIO knows: the first frame, upright as its orientation says, in sRGB, alpha left out. A binary
    /// PPM (P6) is read anywhere. `longestSide`: larger pictures are made smaller while they are decoded, so that they take less memory;
    /// a PPM is not.
    public init(file: URL, longestSide: Int? = nil) throws(LesonnxError) {
        let path = file.path(percentEncoded: false)
        guard let data = try? Data(contentsOf: file, options: .mappedIfSafe) else { throw .input("\(path): not readable") }
        try self.init(encoded: data, name: path, longestSide: longestSide)
    }

    /// A picture as a file has it; `name` is what errors call it.
    public init(encoded data: Data, name: String = "the picture", longestSide: Int? = nil) throws(LesonnxError) {
        if Self.isPixMap(data) {
            try self.init(pixMap: Array(data), name: name)
            return
        }
        #if canImport(ImageIO)
        guard let image = upright(data, longestSide) else { throw .input("\(name): not a picture that this system can decode") }
        guard let (height, width, rgb) = pixels(of: image) else { throw .input("\(name): its colours cannot be made sRGB") }
        try self.init(height: height, width: width, rgb: rgb)
        #else
        throw .input("\(name): not a binary PPM (P6), the only pictures that are decoded on this system")
        #endif
    }
}

#if canImport(ImageIO)
/// The first frame, turned as its orientation says, at most so large.
private func upright(_ data: Data, _ longestSide: Int?) -> CGImage? {
    guard let source = CGImageSourceCreateWithData(data as CFData, nil), CGImageSourceGetCount(source) > 0,
        let facts = CGImageSourceCopyPropertiesAtIndex(source, 0, nil) as? [CFString: Any],
        let width = facts[kCGImagePropertyPixelWidth] as? Int, let height = facts[kCGImagePropertyPixelHeight] as? Int
    else { return nil }
    let orientation = facts[kCGImagePropertyOrientation] as? Int ?? 1
    let longest = max(width, height)
    if orientation == 1 && longest <= longestSide ?? longest {
        return CGImageSourceCreateImageAtIndex(source, 0, [kCGImageSourceShouldCache: false] as CFDictionary)
    }
    // What ImageIO calls a thumbnail is turned upright, and may be as large as the picture.
    let options: [CFString: Any] = [
        kCGImageSourceCreateThumbnailFromImageAlways: true, kCGImageSourceCreateThumbnailWithTransform: true,
        kCGImageSourceThumbnailMaxPixelSize: min(longest, longestSide ?? longest), kCGImageSourceShouldCache: false,
    ]
    return CGImageSourceCreateThumbnailAtIndex(source, 0, options as CFDictionary)
}

/// 8-bit sRGB. A transparent pixel keeps its colour: it is not laid over another.
private func pixels(of image: CGImage) -> (height: Int, width: Int, rgb: [UInt8])? {
    guard let space = CGColorSpace(name: CGColorSpace.sRGB),
        let format = vImage_CGImageFormat(
            bitsPerComponent: 8, bitsPerPixel: 32, colorSpace: space,
            bitmapInfo: CGBitmapInfo(rawValue: CGImageAlphaInfo.last.rawValue)),
        let buffer = try? vImage_Buffer(cgImage: image, format: format)
    else { return nil }
    defer { buffer.free() }
    let (height, width) = (Int(buffer.height), Int(buffer.width))
    var rgb = [UInt8](repeating: 0, count: height * width * 3)
    for row in 0..<height {
        let line = buffer.data.advanced(by: row * buffer.rowBytes).assumingMemoryBound(to: UInt8.self)
        for column in 0..<width {
            for channel in 0..<3 {
                rgb[(row * width + column) * 3 + channel] = line[4 * column + channel]
            }
        }
    }
    return (height, width, rgb)
}
#endif
