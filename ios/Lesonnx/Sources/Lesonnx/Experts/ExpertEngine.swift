import LesonnxScheduler

/// What a layer's router asked for in one step of T rows.
///
/// `hidden` [T,H] is what experts read; a routed expert writes its rows of `expertOut` [T,k,H], the shared one `sharedOut` [T,H].
struct LayerWork: Sendable {
    /// The number of the layer's first expert.
    let first: Int
    let hidden: Tensor
    let expertOut: Tensor
    let sharedOut: Tensor
    /// By row, as the router gave them.
    let topkIds: [[Int]]
    /// Routed experts that a row names.
    let numUsed: Int
    private let places: [Int64]  // flat places t * k + slot, expert after expert
    private let starts: [Int]  // by `expert_idx`, and one more

    /// `topkIds` int64 [T,k]. Throws `failure` for an expert that is not there.
    init(first: Int, numExperts: Int, topkIds: Tensor, hidden: Tensor, expertOut: Tensor, sharedOut: Tensor) throws {
        self.first = first
        self.hidden = hidden
        self.expertOut = expertOut
        self.sharedOut = sharedOut
        let flat = topkIds[Int64.self]
        let slots = topkIds.shape[1]
        self.topkIds = stride(from: 0, to: flat.count, by: slots).map { row in flat[row..<row + slots].map { Int($0) } }
        // A stable counting sort by expert.
        var starts = [Int](repeating: 0, count: numExperts + 1)
        for id in flat {
            if id < 0 || id >= numExperts {
                throw LesonnxError.failure("a router names expert \(id), the layer has \(numExperts)")
            }
            starts[Int(id) + 1] += 1
        }
        numUsed = starts.reduce(0) { $0 + ($1 > 0 ? 1 : 0) }
        for expert in 0..<numExperts {
            starts[expert + 1] += starts[expert]
        }
        var next = starts
        var places = [Int64](repeating: 0, count: flat.count)
        for (place, id) in flat.enumerated() {
            places[next[Int(id)]] = Int64(place)
            next[Int(id)] += 1
        }
        self.starts = starts
        self.places = places
    }

    /// A routed expert's flat places `t * k + slot`, ascending.
    func rows(of expert: Expert) -> ArraySlice<Int64> {
        guard let expertIdx = expert.expertIdx else { return [] }
        return places[starts[expertIdx]..<starts[expertIdx + 1]]
    }
}

/// Loads, computes and evicts experts. `load` may run in several threads at once, the rest in one.
protocol ExpertEngine: AnyObject, Sendable {
    var name: String { get }
    /// Memory that a byte of experts takes, for a budget of the whole process.
    var memoryPerByte: Double { get }

    /// The cache's slabs by number; a slab that shrinks gives its end back to the system.
    func resize(_ slabBytes: [Int]) throws

    /// Bring an expert to its place in the cache; gives the bytes read.
    func load(_ expert: Expert, slab: Int, offsetBytes: Int) throws -> Int

    /// Compute loaded experts of one layer.
    func compute(_ experts: [Expert], _ work: LayerWork) throws

    /// Forget a loaded expert: its place may be taken.
    func evict(_ expert: Expert)

    /// Forget all. Nothing is loaded or computed after it.
    func close()
}

/// Which engine computes experts.
public enum EngineChoice: String, Equatable, Sendable, CaseIterable {
    /// The kernel, or sessions where the bundle has no stages for it.
    case auto
    /// The C kernel, straight from the bytes of the pack.
    case kernel
    /// A plain ONNX Runtime session for each expert in memory.
    case session
}

/// The engine of that name, and why another was taken where that is worth a line to the user.
func makeEngine(
    _ choice: EngineChoice, _ bundle: ModelBundle, _ environment: OrtEnvironment
) throws -> (engine: any ExpertEngine, note: String?) {
    if choice == .session {
        return (try SessionEngine(bundle, environment), nil)
    }
    if bundle.manifest.expertKinds.allSatisfy({ $0.stage != nil }) {
        return (try KernelEngine(bundle, environment), nil)
    }
    let reason = "the bundle has no stages (export it again)"
    if choice == .kernel {
        throw LesonnxError.input("engine kernel cannot be used: \(reason)")
    }
    let note = "engine session is used, since the faster kernel cannot be: \(reason)"
    return (try SessionEngine(bundle, environment), note)
}
