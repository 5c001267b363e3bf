import Foundation
import LesonnxScheduler

/// Plain ONNX Runtime: a session from each expert's own .onnx is the cache entry. A load reads the expert's bytes, then ONNX
/// Runtime packs them.
///
/// Unchecked: sessions are under a lock, since reading threads enter them; the rest never changes.
final class SessionEngine: ExpertEngine, @unchecked Sendable {
    let name = "session"
    /// Measured: packed copies, their allocator's rounding, and what a session needs beside its weights.
    let memoryPerByte = 1.8
    private static let readBytes = 1 << 20

    private let bundle: ModelBundle
    private let environment: OrtEnvironment
    private let lock = NSLock()
    private var sessions: [Int: Loaded] = [:]

    private struct Loaded {
        let session: Session
        let output: String
    }

    init(_ bundle: ModelBundle, _ environment: OrtEnvironment) throws {
        self.bundle = bundle
        self.environment = environment
    }

    /// Sessions lie where ONNX Runtime puts them.
    func resize(_ slabBytes: [Int]) {}

    func load(_ expert: Expert, slab: Int, offsetBytes: Int) throws -> Int {
        let path = try bundle.packFile(layerIdx: expert.layerIdx).path(percentEncoded: false)
        let descriptor = open(path, O_RDONLY | O_CLOEXEC)
        if descriptor < 0 {
            throw LesonnxError.load("\(path): \(lastError())")
        }
        defer { Foundation.close(descriptor) }
        // A plain read first: faulting a mapping in page by page is far slower than one sequential read.
        try read(expert, descriptor)
        let model = try bundle.file(bundle.modelPath(of: expert)).path(percentEncoded: false)
        let session = try environment.session(model, .expert)
        let loaded = Loaded(session: session, output: try session.firstOutputName())
        lock.withLock { sessions[expert.number] = loaded }
        #if os(Linux)
        // The session has its own packed copy: do not keep a second one in the page cache.
        _ = posix_fadvise(descriptor, off_t(expert.offsetBytes), off_t(expert.costBytes), Int32(POSIX_FADV_DONTNEED))
        #endif
        return expert.costBytes
    }

    private func read(_ expert: Expert, _ descriptor: Int32) throws {
        let block = UnsafeMutableRawPointer.allocate(byteCount: Self.readBytes, alignment: pageBytes)
        defer { block.deallocate() }
        let end = expert.offsetBytes + expert.costBytes
        var offset = expert.offsetBytes
        while offset < end {
            let count = pread(descriptor, block, min(Self.readBytes, end - offset), off_t(offset))
            if count < 0 && errno == EINTR {
                continue
            }
            if count < 0 {
                throw LesonnxError.load("\(expert): \(lastError())")
            }
            if count == 0 {
                throw LesonnxError.load("\(expert): the pack ends at byte \(offset), expected \(end)")
            }
            offset += count
        }
    }

    func compute(_ experts: [Expert], _ work: LayerWork) throws {
        let hiddenSize = work.hidden.shape[1]
        let slots = work.expertOut.shape[1]
        for expert in experts {
            guard let loaded = lock.withLock({ sessions[expert.number] }) else {
                throw LesonnxError.failure("\(expert): is not in memory")
            }
            if expert.expertIdx == nil {
                try run(loaded, work.hidden, work.sharedOut)
                continue
            }
            let rows = work.rows(of: expert)
            let result = Tensor(.float32, [rows.count, hiddenSize])
            if work.hidden.shape[0] == 1 {
                try run(loaded, work.hidden, result)
            } else {
                let input = Tensor(.float32, [rows.count, hiddenSize])
                for (place, row) in rows.enumerated() {
                    copyRow(work.hidden, Int(row) / slots, input, place, hiddenSize)
                }
                try run(loaded, input, result)
            }
            for (place, row) in rows.enumerated() {
                copyRow(result, place, work.expertOut, Int(row), hiddenSize)
            }
        }
    }

    private func run(_ expert: Loaded, _ input: Tensor, _ output: Tensor) throws {
        try Binding(expert.session, inputs: ["x": input], outputs: [expert.output: output]).run()
    }

    private func copyRow(_ source: Tensor, _ from: Int, _ target: Tensor, _ to: Int, _ size: Int) {
        (target.pointer + to * size * 4).copyMemory(from: source.pointer + from * size * 4, byteCount: size * 4)
    }

    func evict(_ expert: Expert) {
        lock.withLock { sessions[expert.number] = nil }
    }

    func close() {
        lock.withLock { sessions.removeAll() }
    }
}
