import LesonnxScheduler

/// The tensors of a step of T rows, and the parts bound to them. Valid until a state moves.
///
/// What flows from one part to the next is there twice, since a part may not write what it reads.
final class StepBuffers {
    struct Stream {
        let residual: Tensor
        let topkWeights: Tensor
        let sharedWeights: Tensor
    }

    let rows: Int
    let inputIds: Tensor
    let positionIds: Tensor
    let hidden: Tensor
    let streams: [Stream]
    /// What a mixer makes of the residual: it may not write the one it reads, and the other one's weights are in use.
    let mixedResidual: Tensor
    let moeInput: Tensor
    let topkIds: Tensor
    let routerScores: Tensor
    let expertOut: Tensor
    let sharedOut: Tensor
    let ready: Tensor
    let lookaheadScores: Tensor
    let logitRows = Tensor(.int64, [1])
    let logits: Tensor
    /// What drafters read: the output of each layer, by its name. The embedding's, which lasts as long as a step, is `hidden`.
    let layerOutputs: [String: Tensor]
    /// The same side by side: [T,n*H].
    let layerRows: Tensor
    /// Of a step with drafts, every row's; nil in steps that are wider.
    let draftLogits: Tensor?
    var bindings: [Bound: Binding] = [:]
    /// The head, by number of logit rows.
    var heads: [Head: Binding] = [:]
    /// By part.
    var twins: [String: BoundTwin] = [:]

    /// A part, bound for one side of the states.
    struct Bound: Hashable {
        let part: String
        let side: Int
    }

    struct Head: Hashable {
        let rows: Int
        let side: Int
    }

    /// `layerIdxs`: layers whose outputs a drafter reads.
    init(_ manifest: BundleManifest, rows: Int, layerIdxs: [Int] = []) {
        let (model, residual) = (manifest.model, manifest.residualSize)
        let (hidden, slots, experts) = (model.hiddenSize, model.numExpertsPerTok, model.numExperts)
        self.rows = rows
        inputIds = Tensor(.int64, [1, rows])
        positionIds = Tensor(.int64, manifest.positionRows == 1 ? [1, rows] : [manifest.positionRows, 1, rows])
        self.hidden = Tensor(.float32, [1, rows, hidden])
        streams = (0..<2).map { _ in
            Stream(
                residual: Tensor(.float32, [1, rows, residual]), topkWeights: Tensor(.float32, [rows, slots]),
                sharedWeights: Tensor(.float32, [rows, 1]))
        }
        mixedResidual = Tensor(.float32, [1, rows, manifest.part(.mixer) == nil ? 0 : residual])
        moeInput = Tensor(.float32, [rows, hidden])
        topkIds = Tensor(.int64, [rows, slots])
        routerScores = Tensor(.float32, [rows, experts])
        expertOut = Tensor(.float32, [rows, slots, hidden])
        sharedOut = Tensor(.float32, [rows, hidden])
        ready = Tensor(.bool, [rows, slots])
        lookaheadScores = Tensor(.float32, [rows, experts])
        logits = Tensor(.float32, [1, model.vocabSize])
        let named = layerIdxs.filter { $0 != embeddingIdx }.map { (layerOutputName($0), Tensor(.float32, [1, rows, hidden])) }
        layerOutputs = Dictionary(uniqueKeysWithValues: named)
        layerRows = Tensor(.float32, [rows, layerIdxs.count * hidden])
        let isNarrow = (2...BundleManifest.rewindableTokens).contains(rows)
        draftLogits = isNarrow ? Tensor(.float32, [rows, model.vocabSize]) : nil
    }

    /// The memory of a wider step for one of fewer rows, to which parts are bound apart.
    init(of wide: StepBuffers, rows: Int) {
        func places(_ tensor: Tensor) -> Tensor { tensor.first(rows, axis: 1) }
        func rowsOf(_ tensor: Tensor) -> Tensor { tensor.first(rows, axis: 0) }
        self.rows = rows
        inputIds = places(wide.inputIds)
        // Of several rows, the first rows of the wider step are no piece of memory: only the memory is shared.
        positionIds = Tensor(.int64, wide.positionIds.shape.dropLast() + [rows], at: wide.positionIds.pointer, of: wide.positionIds)
        hidden = places(wide.hidden)
        streams = wide.streams.map {
            Stream(
                residual: places($0.residual), topkWeights: rowsOf($0.topkWeights), sharedWeights: rowsOf($0.sharedWeights))
        }
        mixedResidual = places(wide.mixedResidual)
        moeInput = rowsOf(wide.moeInput)
        topkIds = rowsOf(wide.topkIds)
        routerScores = rowsOf(wide.routerScores)
        expertOut = rowsOf(wide.expertOut)
        sharedOut = rowsOf(wide.sharedOut)
        ready = rowsOf(wide.ready)
        lookaheadScores = rowsOf(wide.lookaheadScores)
        logits = wide.logits
        layerOutputs = wide.layerOutputs.mapValues(places)
        layerRows = rowsOf(wide.layerRows)
        draftLogits = wide.draftLogits.map(rowsOf)
    }

    /// The step's layer outputs side by side: [T,n*H].
    func gather(_ layerIdxs: [Int]) -> Tensor {
        let rowBytes = hidden.byteCount / rows
        for (place, idx) in layerIdxs.enumerated() {
            let source = (idx == embeddingIdx ? hidden : layerOutputs[layerOutputName(idx)] ?? hidden).pointer
            for row in 0..<rows {
                let target = layerRows.pointer + (row * layerIdxs.count + place) * rowBytes
                target.copyMemory(from: source + row * rowBytes, byteCount: rowBytes)
            }
        }
        return layerRows
    }

    /// What the tensors of a step of that many rows take, without what ONNX Runtime needs inside a part.
    static func bytes(_ manifest: BundleManifest, rows: Int, numLayersRead: Int = 0) -> Int {
        let model = manifest.model
        let row = 3 * manifest.residualSize + model.hiddenSize * (3 + model.numExpertsPerTok)
            + model.numExperts + 6 * model.numExpertsPerTok + 2 * numLayersRead * model.hiddenSize
        return rows * row * 4
    }
}
