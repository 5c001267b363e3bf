// How a picture is cut: which views of it are seen, in which sizes. Pure; golden vectors in tests/data/vision.json hold it to Python's.
// All of it is float64, each operation rounded once, in the order that is written here; only the logarithms are a library's.

#if canImport(Darwin)
import Darwin
#else
import Glibc
#endif

/// Height and width, in pixels, patches or tokens.
public struct Extent: Equatable, Hashable, Sendable {
    public var height: Int
    public var width: Int

    public init(_ height: Int, _ width: Int) {
        self.height = height
        self.width = width
    }

    func divided(by count: Int) -> Extent { Extent(height / count, width / count) }
}

/// The whole picture in a size, cut in `grid.height` rows of `grid.width` crops; the overview is one crop.
public struct PictureView: Equatable, Hashable, Sendable {
    /// In pixels.
    public let size: Extent
    public let grid: Extent

    public init(size: Extent, grid: Extent = Extent(1, 1)) {
        self.size = size
        self.grid = grid
    }

    public var numCrops: Int { grid.height * grid.width }

    /// In pixels; all crops of a view are alike.
    public var crop: Extent { Extent(size.height / grid.height, size.width / grid.width) }
}

extension VisionRecord {
    /// The sides of an image token in pixels: crops are whole multiples of it.
    var unit: Int { tokenPatches * patchSize }

    /// The patches of a crop of a view.
    public func patches(_ view: PictureView) -> Extent { view.crop.divided(by: patchSize) }

    /// The image tokens of a crop of a view.
    public func tokens(_ view: PictureView) -> Extent { view.crop.divided(by: unit) }

    /// The image tokens of pictures that are seen as these views.
    public func numTokens(_ views: some Sequence<PictureView>) -> Int {
        views.reduce(0) { $0 + $1.numCrops * tokens($1).height * tokens($1).width }
    }

    /// Image tokens of the largest crop that `views` gives: twice those of a square one. Sides are never less than a token, so a crop
    /// grows without bound as a picture gets narrower; this bounds what the tower needs of memory.
    public var maxCropTokens: Int {
        let side = (scaleResolution + unit - 1) / unit
        return product(2, side, side) ?? countLimit
    }

    /// How a picture of that many pixels is seen: as a whole, its overview, and if it is large in slices; one view or two. Throws
    /// `input` for a picture without pixels, and for one so narrow that a crop would have more than `maxCropTokens`.
    public func views(height: Int, width: Int) throws(LesonnxError) -> [PictureView] {
        if height < 1 || width < 1 {
            throw .input("a picture has at least one pixel, found \(width) x \(height)")
        }
        if max(height, width) > 1 << 31 {
            throw .input("a picture of \(width) x \(height) pixels is too large")
        }
        let found = cut(Extent(height, width))
        for crop in found.map(tokens) where product(crop.height, crop.width) ?? Int.max > maxCropTokens {
            throw .input(
                "a picture of \(width) x \(height) pixels is too narrow: a crop of it would have \(crop.width) x \(crop.height) image "
                    + "tokens, expected at most \(maxCropTokens)")
        }
        return found
    }

    /// `views` without its bound: what the model's own processor does with any size.
    func cut(_ whole: Extent) -> [PictureView] {
        guard let grid = grid(whole) else { return [PictureView(size: fit(whole, isForced: true))] }
        func part(_ side: Int, _ count: Int) -> Int { max(rounded(Double(side) / Double(count)), 1) }
        let cell = fit(Extent(part(whole.height, grid.height), part(whole.width, grid.width)), isForced: true)
        let size = Extent(grid.height * cell.height, grid.width * cell.width)
        return [PictureView(size: fit(whole, isForced: false)), PictureView(size: size, grid: grid)]
    }

    /// A size near `scaleResolution` squared pixels where there are more, or where forced, of whole image tokens.
    private func fit(_ whole: Extent, isForced: Bool) -> Extent {
        var (height, width) = (Double(whole.height), Double(whole.width))
        if isForced || whole.height * whole.width > scaleResolution * scaleResolution {
            let ratio = width / height
            height = (Double(scaleResolution) / ratio.squareRoot()).rounded(.down)
            width = (height * ratio).rounded(.down)
        }
        func units(_ side: Double) -> Int { max(rounded(side / Double(unit)) * unit, unit) }
        return Extent(units(height), units(width))
    }

    /// Rows and columns of slices; nil where there are none.
    private func grid(_ whole: Extent) -> Extent? {
        let squares = Double(whole.width * whole.height) / Double(scaleResolution * scaleResolution)
        let most = Int(min(squares.rounded(.up), Double(maxSliceNums)))
        if most <= 1 {
            return nil
        }
        let wanted = log(Double(whole.width) / Double(whole.height))
        var best = Extent(1, 1)
        var least = Double.infinity
        for count in [most - 1, most, most + 1] where count > 1 && count <= maxSliceNums {
            for rows in 1...count where count % rows == 0 {
                let distance = abs(wanted - log(Double(count / rows) / Double(rows)))
                if distance < least || (distance == least && rows > best.height) {
                    best = Extent(rows, count / rows)
                    least = distance
                }
            }
        }
        return best
    }
}

/// The nearest whole number, ties to even.
func rounded(_ value: Double) -> Int { Int(value.rounded(.toNearestOrEven)) }
