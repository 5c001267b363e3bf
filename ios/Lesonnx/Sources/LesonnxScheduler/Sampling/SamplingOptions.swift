/// How the next token is chosen; checked when made.
public struct SamplingOptions: Equatable, Sendable {
    /// 0 is greedy.
    public let temperature: Double
    /// 0 is off.
    public let topK: Int
    /// 1 is off.
    public let topP: Double
    /// 0 is off.
    public let minP: Double
    /// 1 is off.
    public let repetitionPenalty: Double
    /// Equal seeds give equal tokens for equal logits, on every host.
    public let seed: UInt64

    /// The first token of the order, always; nothing is drawn.
    public static let greedy = SamplingOptions()

    private init() {
        temperature = 0
        topK = 0
        topP = 1
        minP = 0
        repetitionPenalty = 1
        seed = 0
    }

    /// Throws `input`, naming the option, for a value outside its range.
    public init(
        temperature: Double = 0, topK: Int = 0, topP: Double = 1, minP: Double = 0, repetitionPenalty: Double = 1,
        seed: UInt64 = 0
    ) throws(LesonnxError) {
        try Self.check("temperature", temperature, temperature >= 0 && temperature.isFinite, "a finite number of at least 0")
        try Self.check("top_k", topK, topK >= 0, "at least 0 (0 is off)")
        try Self.check("top_p", topP, topP > 0 && topP <= 1, "above 0 and at most 1 (1 is off)")
        try Self.check("min_p", minP, minP >= 0 && minP <= 1, "from 0 (off) to 1")
        let penaltyHolds = repetitionPenalty > 0 && repetitionPenalty.isFinite
        try Self.check("repetition_penalty", repetitionPenalty, penaltyHolds, "a finite number above 0 (1 is off)")
        self.temperature = temperature
        self.topK = topK
        self.topP = topP
        self.minP = minP
        self.repetitionPenalty = repetitionPenalty
        self.seed = seed
    }

    private static func check(_ name: String, _ value: some CustomStringConvertible, _ holds: Bool, _ expected: String)
        throws(LesonnxError)
    {
        if !holds {
            throw .input("\(name) is \(value), expected \(expected)")
        }
    }
}
