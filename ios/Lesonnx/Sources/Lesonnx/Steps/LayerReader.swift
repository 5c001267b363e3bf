/// Is told what some layers of the model give, step by step: a drafter that reads them. Used from the runner's thread.
protocol LayerReader: AnyObject {
    /// The layers, in the reader's order; -1 is the embedding.
    var layerIdxs: [Int] { get }

    /// Tokens have run from `position` on: outputs [T,n*H] of `layerIdxs`, in the runner's memory, valid until the next step. Of
    /// every step: a prompt's chunks, and drafts that may be rejected.
    func observe(position: Int, _ layerOutputs: Tensor) throws

    /// What it keeps for a sequence of that many tokens.
    func bytes(at numTokens: Int) -> Int
}
