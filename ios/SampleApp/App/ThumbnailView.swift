import LesonnxScheduler
import SampleModels
import SwiftUI

/// A picture that goes with a question, small.
struct ThumbnailView: View {
    let attachment: Attachment

    var body: some View {
        Group {
            if let image = attachment.thumbnail.image {
                Image(decorative: image, scale: 1).resizable().scaledToFit()
            } else {
                Image(systemName: "photo")
            }
        }
        .frame(maxWidth: 96, maxHeight: 96)
        .clipShape(RoundedRectangle(cornerRadius: 8))
        .accessibilityLabel("Picture of \(attachment.picture.width) by \(attachment.picture.height) pixels")
    }
}

extension Picture {
    fileprivate var image: CGImage? {
        guard let space = CGColorSpace(name: CGColorSpace.sRGB), let provider = CGDataProvider(data: Data(rgb) as CFData) else { return nil }
        return CGImage(
            width: width, height: height, bitsPerComponent: 8, bitsPerPixel: 24, bytesPerRow: 3 * width, space: space,
            bitmapInfo: CGBitmapInfo(rawValue: CGImageAlphaInfo.none.rawValue), provider: provider, decode: nil,
            shouldInterpolate: true, intent: .defaultIntent)
    }
}
