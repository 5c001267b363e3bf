import Foundation
import Testing

@testable import LesonnxScheduler

/// The drafter's record in the manifest: what is read, counted and refused.
@Suite struct DrafterManifestTests {
    private static func part(_ role: String, _ inputs: String, _ outputs: String) -> String {
        """
        {"name": "\(role)", "role": "\(role)", "path": "dense/\(role).onnx", "layer_idx": null, "inputs": [\(inputs)],
         "outputs": [\(outputs)]}
        """
    }

    private static func value(_ name: String, _ dtype: String, _ shape: String) -> String {
        "{\"name\": \"\(name)\", \"dtype\": \"\(dtype)\", \"shape\": \(shape)}"
    }

    private static let context = part(
        "drafter_context",
        [value("layer_outputs", "float32", "[1, \"T\", 64]"), value("position_ids", "int64", "[1, \"T\"]")].joined(separator: ", "),
        [value("key", "float32", "[1, \"T\", 8]"), value("value", "float32", "[1, \"T\", 4]")].joined(separator: ", "))
    private static let block = part(
        "drafter_block",
        [
            value("input_ids", "int64", "[1, 5]"), value("position_ids", "int64", "[1, 5]"), value("logit_rows", "int64", "[\"R\"]"),
            value("key", "float32", "[1, \"P\", 8]"), value("value", "float32", "[1, \"P\", 4]"),
        ].joined(separator: ", "),
        [value("base_logits", "float32", "[\"R\", 100]"), value("slot_hidden", "float32", "[\"R\", 32]")].joined(separator: ", "))
    private static let markov = part(
        "drafter_markov",
        [
            value("base_logits", "float32", "[1, 100]"), value("slot_hidden", "float32", "[1, 32]"), value("token_id", "int64", "[1]"),
        ].joined(separator: ", "),
        [value("logits", "float32", "[1, 100]"), value("confidence", "float32", "[1]")].joined(separator: ", "))

    static let manifest: String = {
        let given = "\"outputs\": [\(value("layer_output_0", "float32", "[1, \"T\", 32]"))]"
        let segment = SmallBundle.part("segment_001", "segment", "1")
        let embed = SmallBundle.part("embed", "embed", "null")
        let hidden = "\"outputs\": [\(value("hidden", "float32", "[1, \"T\", 32]"))]"
        let drafter = """
            "drafter": {"kind": "dspark", "block_size": 5, "mask_token_id": 99, "target_layer_ids": [-1, 0], "markov_rank": 4,
             "num_parameters": 321, "parts": [\(context), \(block), \(markov)]}, "skipped_tensors":
            """
        return SmallBundle.manifest
            .replacing(segment, with: segment.replacing("\"outputs\": []", with: given))
            .replacing(embed, with: embed.replacing("\"outputs\": []", with: hidden))
            .replacing("\"skipped_tensors\":", with: drafter)
    }()

    @Test func whatItSays() throws {
        let manifest = try SmallBundle.parse(Self.manifest)
        let drafter = try need(manifest.drafter, "drafter")
        #expect(drafter.kind == .dspark && drafter.blockSize == 5 && drafter.maskTokenId == 99 && drafter.markovRank == 4)
        #expect(drafter.targetLayerIds == [-1, 0] && drafter.targetLayerIds.map(layerOutputName) == ["hidden", "layer_output_0"])
        #expect(drafter.cacheSizes == ["key": 8, "value": 4] && drafter.hasConfidence && drafter.numParameters == 321)
        #expect(DrafterRecord.roles.map { drafter.part($0)?.name } == ["drafter_context", "drafter_block", "drafter_markov"])
        #expect(manifest.drafterCacheBytes(capacityTokens: 512) == 4 * 12 * 512)
        let plain = try SmallBundle.parse()
        #expect(manifest.nearestDrafter == .dspark && plain.nearestDrafter == .ngram)
        #expect(plain.drafter == nil && plain.drafterCacheBytes(capacityTokens: 512) == 0)
    }

    /// What is replaced, by what, and what the error says.
    static let bad: [(String, String, String)] = [
        ("\"kind\": \"dspark\"", "\"kind\": \"medusa\"", "drafter.kind: expected one of dspark, found 'medusa'"),
        ("\"block_size\": 5", "\"block_size\": 0", "drafter.block_size: expected a whole number from 1 to 256, found 0"),
        ("\"markov_rank\": 4", "\"markov_rank\": 4, \"more\": 1", "drafter.more: unknown key"),
        ("[-1, 0]", "[]", "drafter.target_layer_ids: expected at least one layer"),
        ("[-1, 0]", "[-2, 0]", "drafter.target_layer_ids.0: expected a whole number from -1"),
        ("[-1, 0]", "[0, 0]", "target_layer_ids names a layer twice"),
        ("[-1, 0]", "[-1, 1]", "target_layer_ids names layer 1, whose output no part gives"),
        ("\"mask_token_id\": 99", "\"mask_token_id\": 100", "mask_token_id is 100, expected less than 100"),
        ("\"role\": \"drafter_markov\"", "\"role\": \"drafter_block\"", "the drafter has exactly one part of each role: drafter_context"),
        ("\"role\": \"lookahead\"", "\"role\": \"drafter_block\"", "the drafter's parts belong into drafter.parts"),
        ("[1, \"T\", 64]", "[1, \"T\", 32]", "'layer_outputs' of part 'drafter_context' is float32 [1, 'T', 32], expected float32 [1, 'T', 64]"),
        ("\"name\": \"token_id\"", "\"name\": \"token\"", "part 'drafter_markov' takes no 'token_id'"),
        ("{\"name\": \"logits\"", "{\"name\": \"more\", \"dtype\": \"float32\", \"shape\": [1]}, {\"name\": \"logits\"",
            "part 'drafter_markov' gives 'more', which no host knows"),
        ("[1, \"T\", 8]", "[1, \"T\", \"W\"]", "shape [1, 'T', 'W'] of cache 'key' is not [1, 'T', size]"),
        ("[1, \"P\", 4]", "[1, \"P\", 5]", "'value' of part 'drafter_block' is float32 [1, 'P', 5], expected float32 [1, 'P', 4]"),
    ]

    @Test(arguments: bad.indices) func badDrafters(_ number: Int) throws {
        let (old, new, message) = Self.bad[number]
        let range = try need(Self.manifest.firstRange(of: old), old)
        do {
            _ = try SmallBundle.parse(Self.manifest.replacingCharacters(in: range, with: new))
            Issue.record("\(new) was taken")
        } catch LesonnxError.bundle(let found) {
            #expect(found.hasPrefix("here/manifest.json: ") && found.contains(message) && !found.contains("\n"), "\(found)")
        }
    }
}
