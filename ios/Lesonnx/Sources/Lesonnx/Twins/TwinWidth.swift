import LesonnxScheduler

/// The twins of one width of steps, open: a step's segment as twin, cache rows and selection. Owned by `Twins`; one thread at a time.
///
/// It owns sessions and what they hand to each other, and knows neither the schedule nor what flows between parts.
final class TwinWidth {
    let rows: Int
    let capacityTokens: Int
    private let manifest: BundleManifest
    private let record: TwinsRecord
    /// By part.
    private let twins: [String: Session]
    /// By path.
    private let others: [String: Session]
    /// What twins take beside activations and caches, by name.
    private let given: [String: Tensor]
    /// Between a twin and its selection, or the caches: the same for every segment.
    private var between: [Place: Tensor] = [:]

    private struct Place: Hashable {
        let name: String
        let dtype: ElementType
        let shape: [Int]
    }

    init(
        _ manifest: BundleManifest, _ record: TwinsRecord, rows: Int, twins: [String: Session], others: [String: Session]
    ) {
        self.manifest = manifest
        self.record = record
        self.rows = rows
        self.twins = twins
        self.others = others
        capacityTokens = record.capacityTokens
        let outputs = record.positions.outputs.map { ($0.name, Tensor($0.dtype, $0.shape.map { $0.size ?? rows })) }
        given = Dictionary(uniqueKeysWithValues: outputs)
    }

    /// Whether the head has one; only steps of one token have.
    var hasHead: Bool { record.twin(of: Role.head.rawValue, rows: rows) != nil }

    /// Compute what all twins of a step take: angles of the positions, and which slots of the caches are seen.
    func begin(_ positionIds: Tensor, _ totalSequenceLength: Tensor) throws {
        let positions = record.positions
        let known = ["position_ids": positionIds, "total_sequence_length": totalSequenceLength]
        try Binding(other(positions.path), inputs: known.of(positions.inputs), outputs: given).run()
    }

    /// A segment's twin between the tensors of a step, by the part's names; valid as long as these and the caches stay where they
    /// are.
    func bind(_ part: Part, _ inputs: [String: Tensor], _ outputs: [String: Tensor]) throws -> BoundTwin {
        let twin = try twin(of: part.name)
        let caches = caches(of: part.name)
        var (made, rows): ([String: Tensor], [String: Tensor]) = ([:], [:])
        for (number, value) in twin.outputs.enumerated() {
            if let known = outputs[value.name] {
                made[value.name] = known
                continue
            }
            let state = caches[value.name]
            // Rows of caches differ in their name from segment to segment, and lie at the same place among its outputs.
            let place = Place(
                name: state == nil ? value.name : "\(number)", dtype: value.dtype, shape: value.shape.compactMap(\.size))
            let tensor = between[place] ?? Tensor(place.dtype, place.shape)
            between[place] = tensor
            made[value.name] = tensor
            state.map { rows[$0] = tensor }
        }
        let binding = try Binding(session(of: part.name), inputs: known(inputs).of(twin.inputs), outputs: made)
        guard let select = record.selections.first(where: { $0.part == part.name }) else {
            throw LesonnxError.failure("\(part.name) has no selection")
        }
        let selection = try Binding(
            other(select.path), inputs: made.of(select.inputs), outputs: outputs.of(select.outputs))
        return BoundTwin(twin: binding, selection: selection, rows: rows)
    }

    /// The head's twin; the pieces of `logits` [1,V] lie side by side.
    func bindHead(_ head: Part, _ inputs: [String: Tensor], _ logits: Tensor) throws -> BoundTwin {
        let twin = try twin(of: head.name)
        let caches = caches(of: head.name)
        var (made, rows): ([String: Tensor], [String: Tensor]) = ([:], [:])
        var start = 0
        for value in twin.outputs {
            let shape = value.shape.compactMap(\.size)
            if value.name.hasPrefix(TwinsRecord.logitsPrefix) {
                let end = start + (shape.last ?? 0)
                made[value.name] = logits.slice(start..<end, axis: 1)
                start = end
            } else {
                made[value.name] = Tensor(value.dtype, shape)
            }
            caches[value.name].map { rows[$0] = made[value.name] }
        }
        let binding = try Binding(session(of: head.name), inputs: known(inputs).of(twin.inputs), outputs: made)
        return BoundTwin(twin: binding, selection: nil, rows: rows)
    }

    /// The states of a part, by what its twin calls their rows.
    private func caches(of part: String) -> [String: String] {
        let own = manifest.states.filter { $0.part == part }
        return Dictionary(uniqueKeysWithValues: own.map { (TwinsRecord.rowsName($0.output), $0.name) })
    }

    private func known(_ inputs: [String: Tensor]) -> [String: Tensor] { inputs.merging(given) { _, given in given } }

    private func twin(of part: String) throws -> Twin {
        guard let twin = record.twin(of: part, rows: rows) else { throw LesonnxError.failure("\(part) has no twin of \(rows) rows") }
        return twin
    }

    private func session(of part: String) throws -> Session {
        guard let session = twins[part] else { throw LesonnxError.failure("the twin of \(part) is not loaded") }
        return session
    }

    private func other(_ path: String) throws -> Session {
        guard let session = others[path] else { throw LesonnxError.failure("\(path) is not loaded") }
        return session
    }
}

/// A twin between the tensors of a step.
struct BoundTwin {
    fileprivate let twin: Binding
    fileprivate let selection: Binding?
    /// The step's rows of caches, by the states' names.
    fileprivate let rows: [String: Tensor]

    /// Runs it, puts its rows into the caches, and selects experts.
    func run(_ states: LayerStates) throws {
        try twin.run()
        states.write(rows: rows)
        try selection?.run()
    }
}

extension [String: Tensor] {
    /// Those that the values name.
    fileprivate func of(_ values: [LesonnxScheduler.Value]) -> [String: Tensor] {
        filter { name, _ in values.contains { $0.name == name } }
    }
}
