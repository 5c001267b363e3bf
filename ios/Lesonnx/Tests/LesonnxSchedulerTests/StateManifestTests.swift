import Foundation
import Testing

@testable import LesonnxScheduler

/// States of fixed shape, mixers and residuals in the manifest: what is read, counted and refused.
@Suite struct StateManifestTests {
    /// The small bundle with a convolution and a recurrence in its first layer, an early router in its second, and 8-bit caches.
    static let manifest: String = {
        let rows = ["key": 8, "value": 16, "decay": 2]
        func values(_ names: [(String, String)]) -> String {
            names.map { "{\"name\": \"\($0.0)\", \"dtype\": \"float32\", \"shape\": \($0.1)}" }.joined(separator: ", ")
        }
        func part(_ name: String, _ role: String, _ layer: String, _ inputs: [(String, String)], _ outputs: [(String, String)]) -> String {
            """
            {"name": "\(name)", "role": "\(role)", "path": "dense/\(name).onnx", "layer_idx": \(layer),
             "inputs": [\(values(inputs))], "outputs": [\(values(outputs))]}
            """
        }
        let given = rows.map { ("recurrent_\($0.key)_0", "[1, \"T\", \($0.value)]") } + [("convolution_rows_0", "[1, \"T\", 24]")]
        let taken = rows.map { ($0.key, "[1, \"T\", \($0.value)]") }
        let segment = part("segment_000", "segment", "0", [], given + [("residual_out", "[1, \"T\", 64]")])
        let mixer = part("mixer_001", "mixer", "1", [], [("residual_out", "[1, \"T\", 64]")])
        let recurrent = part(
            "replay_recurrent", "replay", "null", taken + [("past", "[1, 2, 4, 8]")], [("present", "[1, 2, 4, 8]")])
        let convolution = part(
            "replay_convolution", "replay", "null", [("past", "[1, 24, 3]"), ("rows", "[1, \"T\", 24]")],
            [("present", "[1, 24, 3]")])
        let names = rows.keys.map { "\"\($0)\": \"recurrent_\($0)_0\"" }.joined(separator: ", ")
        let states = """
            {"name": "recurrent_0", "kind": "recurrent", "layer_idx": 0, "part": "segment_000", "input": "past_r", "output": "present_r",
             "dtype": "float32", "shape": [1, 2, 4, 8], "replay": {"part": "replay_recurrent", "rows": {\(names)}}},
            {"name": "convolution_0", "kind": "convolution", "layer_idx": 0, "part": "segment_000", "input": "past_c",
             "output": "present_c", "dtype": "float32", "shape": [1, 24, 3],
             "replay": {"part": "replay_convolution", "rows": {"rows": "convolution_rows_0"}}}
            """
        return SmallBundle.manifest
            .replacing(SmallBundle.part("segment_000", "segment", "0"), with: segment)
            .replacing(
                SmallBundle.part("head", "head", "null"),
                with: [mixer, SmallBundle.part("head", "head", "null"), recurrent, convolution].joined(separator: ",\n"))
            .replacing("\"output\": \"present_key_0\", \"dtype\": \"float32\", \"shape\": [1, 2, \"S\", 16]}",
                with: "\"output\": \"present_key_0\", \"dtype\": \"int8\", \"shape\": [1, 2, \"S\", 16]}, \(states)")
            .replacing("\"kv_bits\": 32", with: "\"kv_bits\": 8")
    }()

    @Test func whatItSays() throws {
        let manifest = try SmallBundle.parse(Self.manifest)
        #expect(manifest.quantization.kvBits == 8 && manifest.residualSize == 64)
        #expect(try SmallBundle.parse().residualSize == manifest.model.hiddenSize)
        #expect(manifest.part(.mixer, layerIdx: 1)?.name == "mixer_001" && manifest.part(.replay)?.layerIdx == nil)
        #expect(manifest.states.map(\.kind.isAttention) == [true, false, false])
        #expect(manifest.states[0].dtype == .int8 && manifest.states[0].replay == nil)
        #expect(manifest.states[2].replay?.rows == ["rows": "convolution_rows_0"])
        #expect(manifest.rowSizes["segment_000"]?.values.sorted() == [2, 8, 16, 24])
    }

    /// Two float32 buffers a state and 16 rows; caches of bytes.
    @Test func whatTheyTake() throws {
        let manifest = try SmallBundle.parse(Self.manifest)
        let fixed = 4 * (2 * (1 * 2 * 4 * 8 + 1 * 24 * 3) + 16 * (8 + 16 + 2 + 24))
        #expect(manifest.fixedStateBytes == fixed)
        #expect(manifest.stateBytes(capacityTokens: 100) == fixed + 2 * 16 * 100)
        #expect(manifest.stateBytes(contextTokens: 513) == fixed + 2 * 16 * 1024)
        #expect(try SmallBundle.parse().fixedStateBytes == 0)
    }

    /// What is replaced, by what, and what the error says.
    static let bad: [(String, String, String)] = [
        ("\"dtype\": \"int8\"", "\"dtype\": \"int4\"", "states.0.dtype: expected one of float32"),
        ("\"kv_bits\": 8", "\"kv_bits\": 4", "quantization.kv_bits: expected one of 8, 16, 32, found 4"),
        ("[1, 2, \"S\", 16]", "[1, 2, 16]", "states.0: shape [1, 2, 16] of state 'key_0' is not [1, heads, 'S', size]"),
        ("[1, 2, \"S\", 16]", "[1, \"S\", \"S\", 16]", "states.0: shape [1, 'S', 'S', 16] of state 'key_0' is not"),
        ("[1, 2, \"S\", 16]", "[1, 2, \"S\", 1048576]", "of state 'key_0' is not"),
        ("\"shape\": [1, 24, 3],", "\"shape\": [1, \"S\", 3],", "states.2: shape [1, 'S', 3] of state 'convolution_0' is not fixed"),
        ("\"shape\": [1, 24, 3],", "\"shape\": [],", "shape [] of state 'convolution_0' is not fixed"),
        ("\"shape\": [1, 24, 3],", "\"shape\": [0, 24, 3],", "of state 'convolution_0' is not fixed"),
        ("\"shape\": [1, 24, 3],", "\"shape\": [1, 23, 3],", "part 'replay_convolution' does not take past and give present [1, 23, 3]"),
        ("\"kind\": \"recurrent\"", "\"kind\": \"attention_key\"", "shape [1, 2, 4, 8] of state 'recurrent_0' is not [1, heads"),
        (", \"replay\": {\"part\": \"replay_recurrent\"", ", \"repeat\": {\"part\": \"replay_recurrent\"", "states.1.repeat: unknown key"),
        ("[1, 2, \"S\", 16]}", "[1, 2, \"S\", 16], \"replay\": {\"part\": \"replay_recurrent\", \"rows\": {\"a\": \"b\"}}}",
            "state 'key_0' of kind attention_key: replay belongs to states of fixed shape"),
        ("\"replay\": {\"part\": \"replay_convolution\", \"rows\": {\"rows\": \"convolution_rows_0\"}}", "\"replay\": null",
            "state 'convolution_0' of kind convolution: replay belongs to states of fixed shape"),
        ("{\"rows\": \"convolution_rows_0\"}", "{}", "states.2.replay.rows: expected at least one row"),
        ("{\"rows\": \"convolution_rows_0\"}", "{\"rows\": 3}", "states.2.replay.rows.rows: expected a string"),
        ("{\"part\": \"replay_convolution\"", "{\"part\": \"segment_001\"", "names 'segment_001', which is no part of role replay"),
        ("{\"part\": \"replay_convolution\"", "{\"part\": \"nobody\"", "names 'nobody', which is no part of role replay"),
        ("{\"rows\": \"convolution_rows_0\"}", "{\"others\": \"convolution_rows_0\"}", "part 'replay_convolution' takes the rows rows"),
        ("{\"rows\": \"convolution_rows_0\"}", "{\"rows\": \"recurrent_key_0\"}", "rows 'recurrent_key_0' are not what 'replay_convolution' takes"),
        ("{\"rows\": \"convolution_rows_0\"}", "{\"rows\": \"nothing\"}", "rows 'nothing' are not what 'replay_convolution' takes"),
        ("\"role\": \"mixer\", \"path\": \"dense/mixer_001.onnx\", \"layer_idx\": 1", "\"role\": \"mixer\", \"path\": \"dense/mixer_001.onnx\", \"layer_idx\": 4", "a mixer part belongs to no MoE layer"),
        ("{\"name\": \"residual_out\", \"dtype\": \"float32\", \"shape\": [1, \"T\", 64]}", "{\"name\": \"residual_out\", \"dtype\": \"float32\", \"shape\": [1, \"T\", -64]}", "parts: residual_out has -64 values a token"),
    ]

    @Test(arguments: bad.indices) func badStates(_ number: Int) throws {
        let (old, new, message) = Self.bad[number]
        try expectRefusal(Self.manifest, old, new, message)
    }

    @Test func rowsWithoutASize() throws {
        // Both sides agree, so only the shape itself is wrong.
        let text = Self.manifest.replacing("[1, \"T\", 24]", with: "[\"T\", 24]")
        try expectRefusal(text, "\"producer\"", "\"producer\"", "shape ['T', 24] of the rows 'convolution_rows_0' is not [1, 'T', size]")
    }

    /// What would take more than any memory must not overflow a count.
    @Test func statesBeyondAllNumbers() throws {
        let huge = "[1048575, 1048575, 1048575, 1048575]"
        let text = Self.manifest.replacing("[1, 2, 4, 8]", with: huge)
        try expectRefusal(text, "\"producer\"", "\"producer\"", "states: at the model's whole context they would have more than")
        let wide = SmallBundle.manifest.replacing("[1, 2, \"S\", 16]", with: "[1048575, 1048575, \"S\", 1048575]")
        try expectRefusal(wide, "\"producer\"", "\"producer\"", "states: at the model's whole context they would have more than")
    }

    private func expectRefusal(_ text: String, _ old: String, _ new: String, _ message: String) throws {
        let range = try need(text.firstRange(of: old), old)
        do {
            _ = try SmallBundle.parse(text.replacingCharacters(in: range, with: new))
            Issue.record("\(new) was taken")
        } catch LesonnxError.bundle(let found) {
            #expect(found.hasPrefix("here/manifest.json: ") && found.contains(message) && !found.contains("\n"), "\(found)")
        }
    }
}
