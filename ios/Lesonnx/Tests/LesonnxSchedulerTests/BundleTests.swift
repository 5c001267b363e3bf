import Foundation
import Testing

@testable import LesonnxScheduler

@Suite struct ManifestTests {
    @Test func whatItSays() throws {
        let manifest = try SmallBundle.parse()
        #expect(manifest.model.numExpertsPerTok == 2 && manifest.model.eosTokenIds == [0] && manifest.model.bosTokenId == nil)
        #expect(manifest.part(.segment, layerIdx: 1)?.name == "segment_001" && manifest.part(.lookahead, layerIdx: 0) == nil)
        #expect(manifest.part(.embed)?.inputs.first?.shape == [.size(1), .symbol("T"), .size(32)])
        #expect(manifest.parts[0].providers[.ios]?.first?.options == ["a": "b"])
        #expect(manifest.expertKinds[0].costBytes == pageBytes && manifest.expertKinds[0].alpha == 1.702)
        #expect(manifest.layerShapes[1].sharedCostBytes == pageBytes && manifest.layerShapes[0].sharedCostBytes == 0)
        #expect(manifest.tokenizer?.chatFormat?.answer == "A:" && manifest.skippedTensors == ["mtp.w": "no drafter"])
    }

    @Test func whatHasADefaultMayBeAbsent() throws {
        let text = SmallBundle.manifest
            .replacing("\"format_version\": 1, ", with: "").replacing(", \"kv_bits\": 32", with: "")
            .replacing("\"prefill_chunk_tokens\": 128,", with: "").replacing("\"alpha\": 1.702, \"limit\": 7,", with: "")
            .replacing("\"eos_token_ids\": [0], \"bos_token_id\": null, \"pad_token_id\": 0", with: "\"eos_token_ids\": []")
        let manifest = try SmallBundle.parse(text)
        #expect(manifest.prefillChunkTokens == 512 && manifest.expertKinds[0].limit == 7 && manifest.model.padTokenId == nil)
    }

    static let calibration = """
        "calibration": {"text_sha256": "\(String(repeating: "0f", count: 32))", "num_tokens": 512, "target_size": 0.733,
         "baseline_bytes": 4096, "layers": [{"layer_idx": 0, "expected_loss": 1.5e-05}, {"layer_idx": 1, "expected_loss": 0}]}
        """

    /// The small manifest with such a record.
    private static func calibrated(_ record: String) throws -> BundleManifest {
        try SmallBundle.parse(SmallBundle.manifest.replacing("\"block_size\": 16}", with: "\"block_size\": 16, \(record)}", maxReplacements: 1))
    }

    @Test func theRecordOfACalibration() throws {
        let plain = try SmallBundle.parse(SmallBundle.manifest)
        #expect(plain.quantization.calibration == nil && plain.expertBits == [4])
        let record = try #require(try Self.calibrated(Self.calibration).quantization.calibration)
        #expect(record.targetSize == 0.733 && record.numTokens == 512 && record.layers.map(\.expectedLoss) == [1.5e-05, 0])
        let random = Self.calibration.replacing("\"\(String(repeating: "0f", count: 32))\"", with: "null")
            .replacing("\"target_size\": 0.733", with: "\"target_size\": null")
        let other = try #require(try Self.calibrated(random).quantization.calibration)
        #expect(other.textSha256 == nil && other.targetSize == nil)
    }

    @Test(arguments: [
        ("0f0f", "xy", "calibration.text_sha256: expected a SHA-256 in lower case"),
        ("\"num_tokens\": 512", "\"num_tokens\": 0", "calibration.num_tokens: expected a whole number"),
        ("0.733", "-1", "calibration.target_size: expected more than 0"),
        ("1.5e-05", "-1", "calibration.layers.0.expected_loss: expected 0 or more"),
        ("\"layer_idx\": 1", "\"layer_idx\": 2", "calibration.layers: not the layers of expert_layers"),
        ("\"baseline_bytes\"", "\"bytes\"", "calibration.baseline_bytes: missing"),
        ("\"num_tokens\"", "\"colour\": 1, \"num_tokens\"", "calibration.colour: unknown key"),
    ])
    func badRecords(_ old: String, _ new: String, _ message: String) {
        let record = Self.calibration.replacing(old, with: new, maxReplacements: 1)
        do {
            _ = try Self.calibrated(record)
            Issue.record("\(new) was taken")
        } catch {
            #expect("\(error)".contains(message), "\(error)")
        }
    }

    /// What is replaced, by what, and what the error says; every one of them on one line that begins with the file.
    static let bad: [(String, String, String)] = [
        ("\"producer\"", "\"colour\": 1, \"producer\"", "colour: unknown key"),
        ("{\"layer_idx\": 0, \"pack\"", "{\"colour\": 1, \"layer_idx\": 0, \"pack\"", "expert_layers.0.colour: unknown key"),
        ("\"producer\"", "\"producer\": \"a\", \"producer\"", "holds a key twice"),
        ("\"format_version\": 1", "\"format_version\": 2", "format_version is 2, this lesonnx reads 1; export again"),
        ("\"format_version\": 1", "\"format_version\": \"1\"", "format_version: expected one of 1, found '1'"),
        ("\"hidden_size\": 32, \"num_hidden", "\"hidden_size\": -1, \"num_hidden", "model.hidden_size: expected a whole number"),
        ("\"vocab_size\": 100", "\"vocab_size\": \"many\"", "model.vocab_size: expected a whole number"),
        ("\"vocab_size\": 100", "\"vocab_size\": 1e99", "model.vocab_size: expected a whole number"),
        ("\"vocab_size\": 100, ", "", "model.vocab_size: missing"),
        ("\"expert_bits\": 4", "\"expert_bits\": 5", "quantization.expert_bits: expected one of 2, 4, 8, 32, found 5"),
        ("\"onnxruntime_at_least\": \"1.24\"", "\"onnxruntime_at_least\": \"new\"", "onnxruntime_at_least: expected a version"),
        ("dense/embed.onnx", "../embed.onnx", "parts.0.path: expected a relative path"),
        ("experts/layer_000/experts.pack", "/tmp/x.pack", "expert_layers.0.pack: expected a relative path"),
        ("experts/layer_000/experts.pack", "C:x.pack", "expert_layers.0.pack: expected a relative path"),
        ("tokenizer/tokenizer.json", "..\\\\x.json", "tokenizer.json_path: expected a relative path"),
        ("\"part\": \"segment_000\"", "\"part\": \"segment_9\"", "names part 'segment_9', which is not there"),
        ("\"name\": \"segment_000\", \"role\"", "\"name\": \"embed\", \"role\"", "two parts have one name"),
        ("\"role\": \"head\"", "\"role\": \"lookahead\"", "exactly one head"),
        ("\"role\": \"head\"", "\"role\": \"tail\"", "parts.4.role: expected one of embed, segment, mixer, head, lookahead, replay, drafter_context, drafter_block, drafter_markov, vision_prepare, vision_tower, found 'tail'"),
        ("\"role\": \"segment\", \"path\": \"dense/segment_000.onnx\", \"layer_idx\": 0", "\"role\": \"segment\", \"path\": \"dense/segment_000.onnx\", \"layer_idx\": 7", "every MoE layer needs its segment"),
        ("\"role\": \"lookahead\", \"path\": \"dense/lookahead_001.onnx\", \"layer_idx\": 1", "\"role\": \"lookahead\", \"path\": \"dense/lookahead_001.onnx\", \"layer_idx\": 5", "layer 1 has no lookahead part"),
        ("\"shared_kind\": 0", "\"shared_kind\": 9", "layer 1 names expert kind 9 of 1"),
        ("\"num_experts_per_tok\": 2, \"kind\": 0", "\"num_experts_per_tok\": 1, \"kind\": 0", "expert_layers.0: num_experts_per_tok is 1"),
        ("\"num_experts_per_tok\": 2, \"moe", "\"num_experts_per_tok\": 9, \"moe", "model: 9 experts a token of 4"),
        ("\"length_bytes\": 1152", "\"length_bytes\": 64", "beyond the expert's 64"),
        ("\"weight_offset_bytes\": 256", "\"weight_offset_bytes\": 281474976710656", "up_proj ends at byte"),
        ("\"rows\": 16, \"columns\": 32", "\"rows\": 15, \"columns\": 32", "gate_proj is [15,32], expected [16,32]"),
        ("\"scales_offset_bytes\": 768", "\"scales_offset_bytes\": null", "block_size and scales belong"),
        ("\"alpha\": 1.702", "\"alpha\": null", "alpha: expected a number, found null"),
        ("\"alpha\": 1.702", "\"alpha\": NaN", "not JSON"),
        ("[1, 2, \"S\", 16]", "[1, 2, \"S\", 0]", "is not [1, heads, 'S', size]"),
        ("[1, \"T\", 32]", "[1, null, 32]", "shape.1: expected a number or a letter"),
        ("\"user\": {\"prefix\": \"U:\"", "\"robot\": {\"prefix\": \"U:\"", "chat_format.messages: expected roles among"),
        ("\"user\": {\"prefix\": \"U:\"", "\"system\": {\"prefix\": \"U:\"", "expected the role user"),
        ("\"answer\": \"A:\"", "\"answer\": \"A:\", \"more\": 1", "tokenizer.chat_format.more: unknown key"),
        ("{\"ios\"", "{\"watch\"", "providers: expected keys among"),
        ("\"num_experts\": 4, \"num_experts_per_tok\": 2, \"kind\"", "\"num_experts\": 281474976710656, \"num_experts_per_tok\": 2, \"kind\"", "num_experts is 281474976710656"),
    ]

    @Test(arguments: bad.indices) func badManifests(_ number: Int) {
        let (old, new, message) = Self.bad[number]
        let range = SmallBundle.manifest.firstRange(of: old)
        #expect(range != nil, "\(old) is not in the manifest")
        let text = range.map { SmallBundle.manifest.replacingCharacters(in: $0, with: new) } ?? ""
        do {
            _ = try SmallBundle.parse(text)
            Issue.record("\(new) was taken")
        } catch LesonnxError.bundle(let found) {
            #expect(found.hasPrefix("here/manifest.json: ") && found.contains(message) && !found.contains("\n"), "\(found)")
        } catch {
            Issue.record("another error: \(error)")
        }
    }

    @Test(arguments: ["", "{", "[]", "null", "3", "\"a", "{\"a\" 1}", "{\"a\":1,}", "[1 2]", "\"\\ud800\"", "01", "1.", "{} x"])
    func documentsThatAreNone(_ text: String) {
        #expect(throws: LesonnxError.self) { try SmallBundle.parse(text) }
    }

    @Test func deepNestingIsRefused() {
        #expect(throws: LesonnxError.self) { try SmallBundle.parse(String(repeating: "[", count: 100_000)) }
    }

    @Test func jsonKeepsKeysThatSwiftTakesForEqual() throws {
        let value = try JSON(parsing: Array("{\"\u{e9}\": 1, \"e\u{301}\": 2, \"a\\u00e9\\ud83d\\ude00\\n\": -1.5e1}".utf8))
        #expect(value.object?.map(\.value) == [.int(1), .int(2), .double(-15)])
        #expect(value.object?[2].key == "a\u{e9}\u{1F600}\n")
    }

    @Test func versions() {
        #expect(isVersion("1.24.2", atLeast: "1.24") && isVersion("1.32.0-dev", atLeast: "1.32") && isVersion("2", atLeast: "1.99.9"))
        #expect(!isVersion("1.9.0", atLeast: "1.24") && !isVersion("1.24", atLeast: "1.24.1") && !isVersion("", atLeast: "1"))
    }

    @Test(.enabled(if: mobileIsThere, "no build/mobile")) func whatTheExporterWrites() throws {
        let bundles = try need(mobileFixtures, "build/mobile").appending(path: "bundles")
        for name in try FileManager.default.contentsOfDirectory(atPath: bundles.path) {
            let bundle = try ModelBundle(directory: bundles.appending(path: name))
            #expect(bundle.experts.count == bundle.manifest.layerShapes.reduce(0) { $0 + $1.numWithShared })
            #expect(bundle.expertBytes >= bundle.tokenDemandBytes && bundle.tokenDemandBytes >= bundle.leastBudgetBytes)
        }
    }
}

@Suite struct ModelBundleTests {
    @Test func expertsAndBytes() throws {
        try withFolder { folder in
            try SmallBundle.write(to: folder.appending(path: "b"))
            let bundle = try ModelBundle(directory: folder.appending(path: "b"))
            #expect(bundle.experts.map(\.offsetBytes) == [0, 1, 2, 3, 0, 1, 2, 3, 4].map { $0 * pageBytes })
            #expect(bundle.experts.map(\.description)[8] == "layer 1 shared expert")
            #expect(bundle.modelPath(of: bundle.experts[3]) == "experts/layer_000/expert_003.onnx")
            #expect(bundle.leastBudgetBytes == 3 * pageBytes && bundle.tokenDemandBytes == 5 * pageBytes)
            #expect(bundle.expertBytes == 9 * pageBytes)
            #expect(try sizeBytes(of: bundle.packFile(layerIdx: 1)) == 5 * pageBytes)
        }
    }

    @Test(arguments: [
        ("dense/head.onnx", "missing from the bundle"), ("experts/stage_0.onnx", "missing from the bundle"),
        ("experts/layer_001/experts.pack", "missing from the bundle"), ("experts/layer_000/expert_002.onnx", "missing"),
        ("experts/layer_001/shared.onnx", "missing"), ("manifest.json", "it holds no manifest.json"),
    ]) func missingFiles(_ path: String, _ message: String) throws {
        try withFolder { folder in
            let bundle = folder.appending(path: "b")
            try SmallBundle.write(to: bundle)
            try FileManager.default.removeItem(at: bundle.appending(path: path))
            expectBundleError(message) { _ = try ModelBundle(directory: bundle) }
        }
    }

    @Test func aPackOfAnotherLength() throws {
        try withFolder { folder in
            let bundle = folder.appending(path: "b")
            try SmallBundle.write(to: bundle)
            try Data(count: 100).write(to: bundle.appending(path: "experts/layer_001/experts.pack"))
            expectBundleError("has 100 bytes, expected 20480; export again") { _ = try ModelBundle(directory: bundle) }
        }
    }

    @Test(arguments: ["dense/head.onnx", "experts/layer_000/experts.pack", "experts/layer_000/expert_001.onnx", "manifest.json"])
    func linksThatLeadOut(_ path: String) throws {
        try withFolder { folder in
            let bundle = folder.appending(path: "b")
            try SmallBundle.write(to: bundle)
            let outside = folder.appending(path: "outside")
            try FileManager.default.moveItem(at: bundle.appending(path: path), to: outside)
            try FileManager.default.createSymbolicLink(at: bundle.appending(path: path), withDestinationURL: outside)
            expectBundleError("leads out of the bundle") { _ = try ModelBundle(directory: bundle) }
        }
    }

    @Test func noDirectory() throws {
        expectBundleError("no such bundle directory") { _ = try ModelBundle(directory: URL(filePath: "/nowhere/at/all")) }
        try withFolder { folder in
            expectBundleError("not a bundle") { _ = try ModelBundle(directory: folder) }
        }
    }

    @Test func pathsAsTheFileSystemSeesThem() {
        #expect(isBundlePath("a/b.onnx") && isBundlePath("a..b") && isBundlePath("./a"))
        for path in ["", "/a", "..", "a/..", "a/../\u{338}b", "../a", "a\\b", "c:d", "a\0"] {
            #expect(!isBundlePath(path), "\(path)")
        }
    }

    private func expectBundleError(_ message: String, _ body: () throws -> Void) {
        do {
            try body()
            Issue.record("expected an error: \(message)")
        } catch LesonnxError.bundle(let found) {
            #expect(found.contains(message) && !found.contains("\n"), "\(found)")
        } catch {
            Issue.record("another error: \(error)")
        }
    }
}

extension String {
    func replacingCharacters(in range: Range<String.Index>, with new: String) -> String {
        String(self[..<range.lowerBound]) + new + String(self[range.upperBound...])
    }
}
