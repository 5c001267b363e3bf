import COnnxRuntime
import LesonnxScheduler

/// Memory of a shape, zeroed, on a 64-byte boundary, that sessions read and write in place.
///
/// Unchecked: it is memory and no more. Who may touch which part of it when is said where it is shared.
final class Tensor: @unchecked Sendable {
    let dtype: ElementType
    let shape: [Int]
    let pointer: UnsafeMutableRawPointer
    let byteCount: Int
    /// Whoever owns the memory; nil where this object does.
    private let owner: AnyObject?

    init(_ dtype: ElementType, _ shape: [Int]) {
        self.dtype = dtype
        self.shape = shape
        byteCount = shape.reduce(dtype.byteCount, *)
        pointer = UnsafeMutableRawPointer.allocate(byteCount: max(byteCount, 1), alignment: 64)
        pointer.initializeMemory(as: UInt8.self, repeating: 0, count: byteCount)
        owner = nil
    }

    /// Memory of another's, which lives as long as this tensor.
    init(_ dtype: ElementType, _ shape: [Int], at pointer: UnsafeMutableRawPointer, of owner: AnyObject) {
        self.dtype = dtype
        self.shape = shape
        byteCount = shape.reduce(dtype.byteCount, *)
        self.pointer = pointer
        self.owner = owner
    }

    convenience init(_ values: [Int64]) {
        self.init(.int64, [values.count])
        _ = self[Int64.self].initialize(fromContentsOf: values)
    }

    deinit {
        if owner == nil {
            pointer.deallocate()
        }
    }

    /// Its elements, in row-major order.
    subscript<Element>(type: Element.Type) -> UnsafeMutableBufferPointer<Element> {
        let count = byteCount / MemoryLayout<Element>.stride
        return UnsafeMutableBufferPointer(start: pointer.assumingMemoryBound(to: type), count: count)
    }

    func zero() { pointer.initializeMemory(as: UInt8.self, repeating: 0, count: byteCount) }

    /// The same memory under another shape of as many elements.
    func reshaped(_ shape: [Int]) -> Tensor { Tensor(dtype, shape, at: pointer, of: self) }

    /// The beginning of a tensor [1,T,n] as [1,count,n], in the same memory.
    func rows(_ count: Int) -> Tensor { first(count, axis: 1) }

    /// The first `count` along an axis, in the same memory; axes before it have one element.
    func first(_ count: Int, axis: Int) -> Tensor { slice(0..<count, axis: axis) }

    /// A range along an axis, in the same memory; axes before it have one element.
    func slice(_ range: Range<Int>, axis: Int) -> Tensor {
        var shape = shape
        shape[axis] = range.count
        let stride = shape[(axis + 1)...].reduce(dtype.byteCount, *)
        return Tensor(dtype, shape, at: pointer + range.lowerBound * stride, of: self)
    }
}

extension ElementType {
    var onnx: ONNXTensorElementDataType {
        switch self {
        case .float32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
        case .float16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16
        case .int64: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
        case .int32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32
        case .bool: return ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL
        case .uint8: return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8
        case .int8: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8
        }
    }
}
