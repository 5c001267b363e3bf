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

    let inputIds: Tensor
    let positionIds: Tensor
    let hidden: Tensor
    let streams: [Stream]
    let moeInput: Tensor
    let topkIds: Tensor
    let routerScores: Tensor
    let expertOut: Tensor
    let sharedOut: Tensor
    let ready: Tensor
    let lookaheadScores: Tensor
    let logitRows = Tensor(.int64, [1])
    let logits: Tensor
    var bindings: [String: Binding] = [:]
    var head: Binding?

    init(_ model: ModelFacts, rows: Int) {
        let (hidden, slots, experts) = (model.hiddenSize, model.numExpertsPerTok, model.numExperts)
        inputIds = Tensor(.int64, [1, rows])
        positionIds = Tensor(.int64, [1, rows])
        self.hidden = Tensor(.float32, [1, rows, hidden])
        streams = (0..<2).map { _ in
            Stream(
                residual: Tensor(.float32, [1, rows, hidden]), topkWeights: Tensor(.float32, [rows, slots]),
                sharedWeights: Tensor(.float32, [rows, 1]))
        }
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
    static func bytes(_ model: ModelFacts, rows: Int) -> Int {
        let row = model.hiddenSize * (5 + model.numExpertsPerTok) + model.numExperts + 6 * model.numExpertsPerTok
        return rows * row * 4
    }
}
