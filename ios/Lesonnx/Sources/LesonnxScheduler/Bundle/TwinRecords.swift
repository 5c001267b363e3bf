// Twins of dense parts for accelerators: the records of the manifest. `docs/bundle.md` says how they are run.

/// A segment's router after its logits, for the CPU provider: what its twins end at -> what the segment gives.
public struct TwinSelection: Equatable, Sendable {
    public let part: String
    public let path: String
    public let inputs: [Value]
    public let outputs: [Value]

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        part = try record.required("part").string()
        path = try record.required("path").bundlePath()
        inputs = try record.required("inputs").array(Value.init)
        outputs = try record.required("outputs").array(Value.init)
        try record.end()
    }
}

/// What all twins of a step take beside activations and caches, for the CPU provider; run once a step.
public struct TwinPositions: Equatable, Sendable {
    public let path: String
    public let inputs: [Value]
    public let outputs: [Value]

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        path = try record.required("path").bundlePath()
        inputs = try record.required("inputs").array(Value.init)
        outputs = try record.required("outputs").array(Value.init)
        try record.end()
    }
}

/// A part once more, with fixed shapes, of operators that accelerators take; for steps of exactly `rows` tokens.
///
/// All sizes of its inputs and outputs are numbers. `providers` in order of preference; no target, no use there.
public struct Twin: Equatable, Sendable {
    public let part: String
    public let rows: Int
    public let path: String
    public let inputs: [Value]
    public let outputs: [Value]
    public let providers: [Target: [Provider]]

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        part = try record.required("part").string()
        rows = try record.required("rows").int(1...countLimit)
        path = try record.required("path").bundlePath()
        inputs = try record.required("inputs").array(Value.init)
        outputs = try record.required("outputs").array(Value.init)
        providers = try record.optional("providers")?.providers() ?? [:]
        try record.end()
    }
}

/// Twins of segments and head, and what they need.
///
/// `capacityTokens` is the capacity of attention caches that twins take. Twins round otherwise than their parts: results of a step
/// depend on which of them it used, so bits are not the same over step widths.
public struct TwinsRecord: Equatable, Sendable {
    public let capacityTokens: Int
    public let floatBits: Int
    public let data: String
    public let positions: TwinPositions
    public let selections: [TwinSelection]
    public let parts: [Twin]

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        capacityTokens = try record.required("capacity_tokens").int(1...1 << 31)
        floatBits = try record.required("float_bits").int(of: [16, 32])
        if let exact = record.optional("exact_over_widths"), exact.value != .bool(false) {
            throw exact.wrong("false")
        }
        data = try record.required("data").bundlePath()
        positions = try TwinPositions(record.required("positions"))
        selections = try record.required("selections").array(TwinSelection.init)
        let parts = try record.required("parts")
        self.parts = try parts.array(Twin.init)
        try record.end()
        if self.parts.isEmpty {
            throw parts.wrong("at least one twin")
        }
    }

    /// A part's twin for steps of that many tokens.
    public func twin(of part: String, rows: Int) -> Twin? { parts.first { $0.part == part && $0.rows == rows } }

    /// The files that a bundle with these twins has, beside others.
    var paths: [String] { [data, positions.path] + selections.map(\.path) + parts.map(\.path) }

    /// What a twin of the head calls its pieces of logits.
    public static let logitsPrefix = "logits_"

    /// The output of a twin that holds the step's rows of the state whose part calls its output so.
    public static func rowsName(_ output: String) -> String { output + "_rows" }
}
