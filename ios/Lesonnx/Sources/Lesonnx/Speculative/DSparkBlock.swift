import LesonnxScheduler

/// The buffers of one draft of a `DSparkDrafter`: B slots, one after the other. Owned by the drafter.
final class DSparkBlock {
    let hasConfidence: Bool
    private let block: Session
    private let markov: Session
    private let ids: Tensor
    private let positions: Tensor
    private let rows: Tensor
    private let hidden: Tensor
    private let baseLogits: Tensor
    private let token = Tensor(.int64, [1])
    private let logits: Tensor
    private let confidence = Tensor(.float32, [1])
    /// The Markov part bound to each slot's rows, made on first use.
    private var chain: [Int: Binding] = [:]

    init(_ record: DrafterRecord, _ model: ModelFacts, _ block: Session, _ markov: Session) {
        let size = record.blockSize
        self.block = block
        self.markov = markov
        hasConfidence = record.hasConfidence
        ids = Tensor(Array(repeating: Int64(record.maskTokenId), count: size)).reshaped([1, size])
        positions = Tensor(.int64, [1, size])
        rows = Tensor((0..<size).map(Int64.init))
        hidden = Tensor(.float32, [size, model.hiddenSize])
        baseLogits = Tensor(.float32, [size, model.vocabSize])
        logits = Tensor(.float32, [1, model.vocabSize])
    }

    /// The pass over all slots; `count` of them get logits. `anchor`, at `start`, is the last token so far, `caches` what belongs to
    /// those before it.
    func run(anchor: Int, start: Int, count: Int, _ caches: [String: Tensor]) throws {
        ids[Int64.self][0] = Int64(anchor)
        for place in 0..<positions.shape[1] {
            positions[Int64.self][place] = Int64(start + place)
        }
        var inputs = caches
        inputs["input_ids"] = ids
        inputs["position_ids"] = positions
        inputs["logit_rows"] = rows.first(count, axis: 0)
        let outputs = ["slot_hidden": hidden.first(count, axis: 0), "base_logits": baseLogits.first(count, axis: 0)]
        try Binding(block, inputs: inputs, outputs: outputs).run()
    }

    /// Logits [1,V] of a slot after the token before it (valid until the next), and the confidence in it.
    func slot(_ slot: Int, after before: Int) throws -> (logits: Tensor, confidence: Double) {
        let binding = try chain[slot] ?? bind(slot)
        chain[slot] = binding
        token[Int64.self][0] = Int64(before)
        try binding.run()
        return (logits, Double(confidence[Float.self][0]))
    }

    private func bind(_ slot: Int) throws -> Binding {
        let own = slot..<slot + 1
        let inputs = [
            "token_id": token, "base_logits": baseLogits.slice(own, axis: 0), "slot_hidden": hidden.slice(own, axis: 0),
        ]
        var outputs = ["logits": logits]
        if hasConfidence {
            outputs["confidence"] = confidence
        }
        return try Binding(markov, inputs: inputs, outputs: outputs)
    }
}
