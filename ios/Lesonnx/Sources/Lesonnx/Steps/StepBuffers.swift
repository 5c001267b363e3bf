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
    var bindings: [Bound: Binding] = [:]
    /// The head on one row, by side of the states.
    var heads: [Int: Binding] = [:]

    /// A part, bound for one side of the states.
    struct Bound: Hashable {
        let part: String
        let side: Int
    }

    init(_ manifest: BundleManifest, rows: Int) {
        let (model, residual) = (manifest.model, manifest.residualSize)
        let (hidden, slots, experts) = (model.hiddenSize, model.numExpertsPerTok, model.numExperts)
        self.rows = rows
        inputIds = Tensor(.int64, [1, rows])
        positionIds = Tensor(.int64, [1, rows])
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
    }

    /// What the tensors of a step of that many rows take, without what ONNX Runtime needs inside a part.
    static func bytes(_ manifest: BundleManifest, rows: Int) -> Int {
        let model = manifest.model
        let row = 3 * manifest.residualSize + model.hiddenSize * (3 + model.numExpertsPerTok)
            + model.numExperts + 6 * model.numExpertsPerTok
        return rows * row * 4
    }
}
