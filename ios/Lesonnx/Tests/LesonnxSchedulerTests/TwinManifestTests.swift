import Foundation
import Testing

@testable import LesonnxScheduler

/// The record of twins in a manifest that the exporter wrote: what it says, and what is refused.
@Suite(.enabled(if: mobileIsThere, "no test bundles: make them with tools/make_mobile_fixtures.py, or set LESONNX_MOBILE"))
struct TwinManifestTests {
    private static let name = "qwen3_moe-twins-ios-float"

    private func text() throws -> String {
        let folder = try need(mobileFixtures, "test bundles")
        return try String(contentsOf: folder.appending(path: "bundles/\(Self.name)/manifest.json"), encoding: .utf8)
    }

    @Test func whatItSays() throws {
        let manifest = try SmallBundle.parse(text())
        let twins = try need(manifest.twins, "twins")
        #expect(twins.capacityTokens == 48 && twins.floatBits == 16 && twins.data == "dense/twins.bin")
        #expect(Set(twins.parts.map(\.rows)) == [1, 8] && twins.twin(of: "head", rows: 1) != nil && twins.twin(of: "head", rows: 8) == nil)
        let provider = try need(twins.parts[0].providers[.ios]?.first, "provider")
        #expect(provider.name == "CoreMLExecutionProvider" && provider.options["ModelFormat"] == "MLProgram")
        #expect(provider.options["ModelCacheDirectory"] == Provider.cacheDirectory)
        #expect(try SmallBundle.parse().twins == nil)
    }

    @Test func whatOfAListIsThere() throws {
        let coreML = Provider(name: "CoreML", options: ["a": "b", "directory": "{cache}"])
        let (none, notes) = Provider.installed([coreML], available: ["CPUExecutionProvider"])
        #expect(coreML.isAccelerator && !Provider.cpu.isAccelerator && !Provider(name: "XnnpackExecutionProvider").isAccelerator)
        #expect(none == [] && notes == ["the installed ONNX Runtime has no CoreML"])
        #expect(Provider.installed([coreML], available: ["CoreML"]).found == [Provider(name: "CoreML", options: ["a": "b"])])
        let kept = Provider.installed([coreML, .cpu], available: ["CPUExecutionProvider", "CoreML"], cache: "/here").found
        #expect(kept == [Provider(name: "CoreML", options: ["a": "b", "directory": "/here"]), .cpu])
    }

    /// A pattern whose first match is replaced, by what, and what the error says.
    static let bad: [(String, String, String)] = [
        (#""exact_over_widths": false"#, #""exact_over_widths": true"#, "twins.exact_over_widths: expected false, found true"),
        (#""float_bits": 16"#, #""float_bits": 8"#, "twins.float_bits: expected one of 16, 32, found 8"),
        (#""capacity_tokens": 48"#, #""capacity_tokens": 49"#, "expected float32 [1, "),
        (#""capacity_tokens": 48"#, #""capacity_tokens": 48, "more": 1"#, "twins.more: unknown key"),
        (#""rows": 8"#, #""rows": 7"#, "' of 'dense/twin_segment_000_8.onnx' is float32 [1, 8, 64], expected float32 [1, 7, 64]"),
        (#""router_logits_0""#, #""router_logits_9""#, "takes 'router_logits_9', unlike what 'dense/twin_segment_000_1.onnx' gives"),
        (#"_rows""#, #"_columns""#, "_rows'"),
    ]

    @Test(arguments: bad.indices) func badTwins(_ number: Int) throws {
        let (old, new, message) = Self.bad[number]
        let text = try text()
        let twins = try need(text.range(of: "\"twins\""), "twins")
        let range = try need(text.range(of: old, range: twins.lowerBound..<text.endIndex), old)
        do {
            _ = try SmallBundle.parse(text.replacingCharacters(in: range, with: new))
            Issue.record("\(new) was taken")
        } catch LesonnxError.bundle(let found) {
            #expect(found.hasPrefix("here/manifest.json: twins") && found.contains(message) && !found.contains("\n"), "\(found)")
        }
    }
}
