// Prints all that a ModelSpec says, a line each, for tests/test_glue.py. Texts are given as UTF-16 in hexadecimal.

func hex(_ text: String) -> String {
    text.utf16.map { unit in
        let digits = String(unit, radix: 16)
        return String(repeating: "0", count: 4 - digits.count) + digits
    }.joined()
}

func option(_ value: Int?) -> String { value.map(String.init) ?? "none" }

print("title \(hex(ModelSpec.title))")
print(
    "bytes \(ModelSpec.downloadBytes) \(ModelSpec.denseBytes) \(ModelSpec.expertBytes) \(ModelSpec.leastBudgetBytes)",
    "\(ModelSpec.tokenDemandBytes) \(ModelSpec.stateBytesPerToken) \(ModelSpec.fixedStateBytes)")
print(
    "model \(ModelSpec.modelType) \(ModelSpec.hiddenSize) \(ModelSpec.numHiddenLayers) \(ModelSpec.vocabSize)",
    "\(ModelSpec.numExperts) \(ModelSpec.numExpertsPerTok) \(ModelSpec.moeIntermediateSize)",
    "\(ModelSpec.maxPositionEmbeddings) \(ModelSpec.numParameters) \(ModelSpec.numActiveParameters)")
print("ids \(ModelSpec.eosTokenIDs) \(option(ModelSpec.bosTokenID)) \(option(ModelSpec.padTokenID))")
print(
    "bits \(ModelSpec.expertBits) \(ModelSpec.denseBits) \(ModelSpec.kvBits) \(ModelSpec.prefillChunkTokens)",
    ModelSpec.onnxruntimeAtLeast)
for budget in ModelSpec.budgets { print("budget \(hex(budget.name)) \(budget.bytes)") }
for part in ModelSpec.parts {
    print("part \(part.name) \(part.role) \(part.path) \(option(part.layerIdx))")
    for value in part.inputs { print("input \(value.name) \(value.dtype) \(value.shape)") }
    for value in part.outputs { print("output \(value.name) \(value.dtype) \(value.shape)") }
    for provider in part.providers {
        let options = provider.options.sorted { $0.key < $1.key }.map { "\(hex($0.key))=\(hex($0.value))" }
        print("provider \(provider.name) [\(options.joined(separator: ", "))]")
    }
}
for state in ModelSpec.states {
    print(
        "state \(state.name) \(state.kind) \(state.layerIdx) \(state.part) \(state.input) \(state.output)",
        "\(state.dtype) \(state.shape)")
}
for kind in ModelSpec.expertKinds {
    print(
        "kind \(kind.name) \(kind.hiddenSize) \(kind.intermediateSize) \(kind.activation) \(kind.bits)",
        "\(kind.lengthBytes) \(kind.costBytes)")
}
for layer in ModelSpec.expertLayers {
    print(
        "layer \(layer.layerIdx) \(layer.pack) \(layer.numExperts) \(layer.numExpertsPerTok) \(layer.kind)",
        "\(option(layer.sharedKind)) \(layer.packBytes) \(layer.demandBytes)")
}
if let chat = ModelSpec.chatFormat {
    print("chat \(hex(chat.start)) \(hex(chat.answer))")
    for (role, turn) in chat.messages.sorted(by: { $0.key < $1.key }) {
        print("turn \(role) \(hex(turn.prefix)) \(hex(turn.suffix))")
    }
} else {
    print("chat none")
}
if let vision = ModelSpec.vision {
    print("vision \(vision.maxSlices) \(vision.maxImageTokens) \(vision.visionBytes) \(vision.workingBytes)")
} else {
    print("vision none")
}
try ModelSpec.check(manifestSHA256: ModelSpec.manifestSHA256.uppercased())
do {
    try ModelSpec.check(manifestSHA256: "0")
    print("check accepts anything")
} catch {
    print("check \(hex("\(error)"))")
}
