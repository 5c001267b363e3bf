import Foundation
import LesonnxScheduler

/// Experts computed by the operator `lesonnx::Experts` straight from the bytes of the pack. The cache is a few slabs; a load is
/// one direct read to its place and nothing else.
///
/// Unchecked: places are under a lock, since reading threads enter them; bindings belong to the computing thread; slabs change
/// in `resize` alone, while nothing is being loaded or computed.
final class KernelEngine: ExpertEngine, @unchecked Sendable {
    let name = "kernel"
    let memoryPerByte = 1.0
    /// Bindings that are kept, by what they are bound to: those of decode steps and of steps with drafts, whose tensors stay.
    private static let maxBindings = 512
    private static let keptRows = BundleManifest.rewindableTokens

    private struct Piece {
        let memory: MappedMemory
        let tensor: Tensor
    }

    private struct Location {
        var piece: Int
        var offsetBytes: Int
    }

    private var packs: [Int: PackFile] = [:]
    private let stages: [Session]
    private var pieces: [Piece] = []
    /// Each slab of the scheduler's: where it starts, and its greatest length.
    private var slabs: [(start: Location, most: Int)] = []
    private let lock = NSLock()
    private var places: [Location?]
    private var bindings: [RowKey: RowBinding] = [:]

    init(_ bundle: ModelBundle, _ environment: OrtEnvironment) throws {
        for layer in bundle.manifest.expertLayers {
            let file = try bundle.packFile(layerIdx: layer.layerIdx)
            packs[layer.layerIdx] = try PackFile(path: file.path(percentEncoded: false))
        }
        stages = try bundle.manifest.expertKinds.map { kind in
            guard let stage = kind.stage else { throw LesonnxError.bundle("expert kind \(kind.name) has no stage; export again") }
            let path = try bundle.file(stage).path(percentEncoded: false)
            return try environment.session(path, .stage, registersExperts: true)
        }
        places = Array(repeating: nil, count: bundle.experts.count)
    }

    func resize(_ slabBytes: [Int]) throws {
        // What is new comes as one piece of memory, so that a batch whose experts lie in several slabs is one run.
        let new = slabBytes.dropFirst(slabs.count)
        if !new.isEmpty {
            let memory = try MappedMemory(byteCount: new.reduce(0, +))
            pieces.append(Piece(memory: memory, tensor: Tensor(.uint8, [memory.byteCount], at: memory.pointer, of: memory)))
            var start = Location(piece: pieces.count - 1, offsetBytes: 0)
            for length in new {
                slabs.append((start, length))
                start.offsetBytes += length
            }
        }
        for (slab, length) in zip(slabs, slabBytes) {
            let start = slab.start.offsetBytes
            pieces[slab.start.piece].memory.giveBack(start + length..<start + slab.most)
        }
    }

    func load(_ expert: Expert, slab: Int, offsetBytes: Int) throws -> Int {
        var location = slabs[slab].start
        location.offsetBytes += offsetBytes
        guard let pack = packs[expert.layerIdx] else { throw LesonnxError.load("\(expert): has no pack") }
        let start = pieces[location.piece].memory.pointer + location.offsetBytes
        try pack.read(into: UnsafeMutableRawBufferPointer(start: start, count: expert.costBytes), from: expert.offsetBytes)
        lock.withLock { places[expert.number] = location }
        return expert.costBytes
    }

    func evict(_ expert: Expert) {
        lock.withLock { places[expert.number] = nil }
    }

    func compute(_ experts: [Expert], _ work: LayerWork) throws {
        // A run takes one kind and one piece of memory: almost always one run, two with a shared expert.
        struct Group {
            let piece: Int
            let isShared: Bool
            var experts: [Expert] = []
            var offsets: [Int64] = []
        }
        var groups: [Group] = []
        try lock.withLock {
            for expert in experts {
                guard let location = places[expert.number] else { throw LesonnxError.failure("\(expert): is not in memory") }
                let isShared = expert.expertIdx == nil
                var place = groups.firstIndex { $0.piece == location.piece && $0.isShared == isShared }
                if place == nil {
                    place = groups.count
                    groups.append(Group(piece: location.piece, isShared: isShared))
                }
                groups[place!].experts.append(expert)
                groups[place!].offsets.append(Int64(location.offsetBytes))
            }
        }
        for group in groups {
            let out = group.isShared ? work.sharedOut : work.expertOut
            try computeRows(group.experts, group.offsets, group.piece, out, work)
        }
    }

    /// The rows of a group. In steps of few rows the tensors are the same every time, so bindings are kept, and keep them.
    private func computeRows(_ experts: [Expert], _ offsets: [Int64], _ piece: Int, _ out: Tensor, _ work: LayerWork) throws {
        var rows: [Int64] = []
        var starts: [Int64] = [0]
        for expert in experts {
            rows += expert.expertIdx == nil ? (0..<Int64(work.hidden.shape[0])).map { $0 }[...] : work.rows(of: expert)
            starts.append(Int64(rows.count))
        }
        let key = RowKey(
            kind: experts[0].kind, piece: piece, experts: experts.count, rows: rows.count, out: ObjectIdentifier(out),
            hidden: ObjectIdentifier(work.hidden))
        let binding = try bindings[key]
            ?? RowBinding(stages[key.kind], work.hidden, pieces[piece].tensor, out, experts.count, rows.count)
        if work.hidden.shape[0] <= Self.keptRows && bindings[key] == nil {
            if bindings.count >= Self.maxBindings {
                bindings.removeAll()
            }
            bindings[key] = binding
        }
        _ = binding.offsets[Int64.self].update(fromContentsOf: offsets)
        _ = binding.starts[Int64.self].update(fromContentsOf: starts)
        _ = binding.rows[Int64.self].update(fromContentsOf: rows)
        try binding.binding.run()
    }

    func close() {
        lock.withLock { places = places.map { _ in nil } }
        bindings.removeAll()
        pieces.removeAll()
        slabs.removeAll()
        packs.removeAll()
    }
}

private struct RowKey: Hashable {
    let kind: Int
    let piece: Int
    let experts: Int
    let rows: Int
    let out: ObjectIdentifier
    let hidden: ObjectIdentifier
}

/// So many rows of so many experts: tensors to fill in, then run.
private struct RowBinding {
    let offsets: Tensor
    let starts: Tensor
    let rows: Tensor
    let binding: Binding
    /// A tensor whose identity names this binding must live as long as it does; the binding keeps the others.
    private let out: Tensor

    init(_ stage: Session, _ hidden: Tensor, _ cache: Tensor, _ out: Tensor, _ numExperts: Int, _ numRows: Int) throws {
        offsets = Tensor(.int64, [numExperts])
        starts = Tensor(.int64, [numExperts + 1])
        rows = Tensor(.int64, [numRows])
        self.out = out
        let inputs = ["hidden": hidden, "cache": cache, "offsets": offsets, "row_starts": starts, "rows": rows]
        binding = try Binding(stage, inputs: inputs, outputs: ["expert_out": withSlots(out)])
    }
}

/// [T,slots,H]; a shared expert's output [T,H] has one slot.
private func withSlots(_ out: Tensor) -> Tensor {
    out.shape.count == 3 ? out : out.reshaped([out.shape[0], 1, out.shape[1]])
}
