// Whether a manifest's twins fit the parts that they stand for: what they take and give, and the caches they read.

extension BundleManifest {
    private typealias Shape = (dtype: ElementType, shape: [TensorDimension])

    /// Throws `bundle` for twins that no host could use in their parts' places.
    func check(_ twins: TwinsRecord) throws(LesonnxError) {
        if twins.selections.map(\.part) != parts.filter({ $0.role == .segment }).map(\.name) {
            throw .bundle("twins: every segment needs its selection, in the order of the segments")
        }
        for value in twins.positions.inputs where value.name != "position_ids" && value.name != "total_sequence_length" {
            throw .bundle("twins: positions takes '\(value.name)', which no host has for it")
        }
        for twin in twins.parts {
            let found = parts.first { $0.name == twin.part }
            guard let part = found, part.role == .segment || (part.role == .head && twin.rows == 1) else {
                throw .bundle("twins: '\(twin.part)' with \(twin.rows) rows is no twin of a segment or of the head")
            }
            try check(twin, of: part, twins)
        }
        for rows in Set(twins.parts.map(\.rows)) {
            if let none = twins.selections.first(where: { twins.twin(of: $0.part, rows: rows) == nil }) {
                throw .bundle("twins: '\(none.part)' has none of \(rows) rows")
            }
        }
        for twin in twins.parts where twins.parts.count(where: { $0.part == twin.part && $0.rows == twin.rows }) > 1 {
            throw .bundle("twins: '\(twin.part)' has two of \(twin.rows) rows")
        }
        for selection in twins.selections {
            try check(selection, twins)
        }
    }

    private func fixed(_ shape: [TensorDimension], rows: Int, _ twins: TwinsRecord) -> [TensorDimension] {
        let known = ["T": rows, "S": twins.capacityTokens, "R": 1]
        return shape.map { size in
            if case .symbol(let letter) = size, let number = known[letter] { return .size(number) }
            return size
        }
    }

    /// A twin takes what its part or positions has for it, and gives what its part gives, or what a host knows.
    private func check(_ twin: Twin, of part: Part, _ twins: TwinsRecord) throws(LesonnxError) {
        let own = states.filter { $0.part == part.name }
        if let other = own.first(where: { !$0.kind.isAttention }) {
            throw .bundle("twins: state '\(other.name)' of part '\(part.name)' is no attention cache")
        }
        func known(_ values: [Value]) -> [String: Shape] {
            let pairs = values.map { ($0.name, (dtype: $0.dtype, shape: fixed($0.shape, rows: twin.rows, twins))) }
            return Dictionary(pairs, uniquingKeysWith: { first, _ in first })
        }
        let takes = known(part.inputs).merging(known(twins.positions.outputs)) { _, positions in positions }
        var gives = known(part.outputs)
        for state in own {
            let shape = state.shape.map { $0 == .symbol("S") ? .size(twin.rows) : $0 }
            gives[TwinsRecord.rowsName(state.output)] = (state.dtype, shape)
        }
        for (values, known) in [(twin.inputs, takes), (twin.outputs, gives)] {
            for value in values {
                let sizes = value.shape.compactMap(\.size)
                if sizes.count < value.shape.count || sizes.contains(where: { $0 < 1 }) {
                    throw .bundle("twins: shape \(value.shape) of '\(value.name)' of '\(twin.path)' is not fixed")
                }
                if let (dtype, shape) = known[value.name], dtype != value.dtype || shape != value.shape {
                    throw .bundle(
                        "twins: '\(value.name)' of '\(twin.path)' is \(value.dtype.rawValue) \(value.shape), expected "
                            + "\(dtype.rawValue) \(shape)")
                }
            }
        }
        if let other = twin.inputs.first(where: { takes[$0.name] == nil }) {
            throw .bundle("twins: '\(twin.path)' takes '\(other.name)', which neither its part nor positions has")
        }
        let needed = own.map { TwinsRecord.rowsName($0.output) } + (part.role == .segment ? ["residual_out", "moe_input"] : [])
        if let missing = needed.first(where: { name in !twin.outputs.contains { $0.name == name } }) {
            throw .bundle("twins: '\(twin.path)' does not give '\(missing)'")
        }
        let pieces = twin.outputs.filter { $0.name.hasPrefix(TwinsRecord.logitsPrefix) }
        let logits = pieces.reduce(0) { min(countLimit, $0 + min(countLimit, $1.shape.last?.size ?? 0)) }
        if part.role == .head && logits != model.vocabSize {
            throw .bundle("twins: the pieces of logits of '\(twin.path)' are not \(model.vocabSize) in all")
        }
    }

    /// A selection takes what every twin of its segment ends at, and gives what the segment gives of its router.
    private func check(_ selection: TwinSelection, _ twins: TwinsRecord) throws(LesonnxError) {
        for twin in twins.parts where twin.part == selection.part {
            for value in selection.inputs {
                let given = twin.outputs.first { $0.name == value.name }
                if given?.dtype != value.dtype || given?.shape != fixed(value.shape, rows: twin.rows, twins) {
                    throw .bundle(
                        "twins: the selection of '\(selection.part)' takes '\(value.name)', unlike what '\(twin.path)' gives")
                }
            }
        }
        let expected = parts.first { $0.name == selection.part }?.outputs ?? []
        for value in selection.outputs where expected.first(where: { $0.name == value.name })?.shape != value.shape {
            throw .bundle("twins: the selection of '\(selection.part)' gives '\(value.name)', which its segment does not")
        }
        for name in ["router_scores", "shared_weights_out", "topk_ids", "topk_weights_out"]
        where expected.contains(where: { $0.name == name }) && !selection.outputs.contains(where: { $0.name == name }) {
            throw .bundle("twins: the selection of '\(selection.part)' does not give '\(name)'")
        }
    }
}
