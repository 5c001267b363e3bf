import Foundation
import Testing

@testable import Lesonnx
@testable import LesonnxScheduler

extension RuntimeTests {
    @Suite struct Tokenizers {
        @Test("the sample's tokenizer gives the ids that Python's gives, and the texts back")
        func sample() throws {
            let bundle = try Fixtures.bundle("sample-int4")
            let path = try #require(bundle.manifest.tokenizer?.jsonPath)
            let tokenizer = try BytePairTokenizer(file: bundle.file(path))
            let (reference, _) = try Fixtures.reference("sample-int4")
            try #require(!reference.tokenizer.isEmpty)
            for (text, ids) in reference.tokenizer {
                #expect(tokenizer.encode(text, addSpecialTokens: true) == ids, "\(text.debugDescription)")
                let isNamed = text.contains("<|")
                if !isNamed {
                    #expect(Array(tokenizer.decode(ids).utf8) == Array(text.utf8), "\(text.debugDescription)")
                }
            }
        }
    }
}

/// Without bundles: ids that the `tokenizers` library gave for small tokenizers of each kind (tools/make_tokenizer_vectors.py).
@Suite struct TokenizerVectors {
    static let file = URL(filePath: #filePath).deletingLastPathComponent().appending(path: "Vectors/tokenizers.json")

    @Test("awkward texts give the ids of Python's library")
    func vectors() throws {
        let kinds = try #require(try JSON(parsing: Data(contentsOf: Self.file)).array)
        #expect(kinds.count >= 6)
        for kind in kinds {
            let name = try #require(kind["name"]?.string)
            let text = try #require(try Self.tokenizer(named: name))
            let tokenizer = try BytePairTokenizer(parsing: text, source: name)
            for entry in try #require(kind["cases"]?.array) {
                let text = try #require(entry["text"]?.string)
                let ids = (entry["ids"]?.array ?? []).compactMap(\.int)
                #expect(tokenizer.encode(text, addSpecialTokens: true) == ids, "\(name): \(text.debugDescription)")
            }
        }
    }

    /// A tokenizer.json as it stands in the file.
    private static func tokenizer(named name: String) throws -> Data? {
        let document = try JSONSerialization.jsonObject(with: Data(contentsOf: file)) as? [[String: Any]]
        guard let kind = document?.first(where: { $0["name"] as? String == name })?["tokenizer"] else { return nil }
        return try JSONSerialization.data(withJSONObject: kind)
    }

    @Test("what is not known of a tokenizer is named")
    func refused() {
        func refusal(_ text: String) -> String {
            do {
                _ = try BytePairTokenizer(parsing: Data(text.utf8), source: "t.json")
                return "nothing was refused"
            } catch {
                return "\(error)"
            }
        }
        let model = #""model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}"#
        let decoder = #""decoder": {"type": "ByteLevel"}"#
        #expect(refusal("{\(model), \(decoder)}") == "nothing was refused")
        #expect(refusal("{").hasPrefix("t.json: not JSON"))
        #expect(
            refusal(#"{"model": {"type": "Unigram", "vocab": {}}, \#(decoder)}"#)
                == "t.json: model: expected BPE with a vocab, found Unigram")
        #expect(
            refusal("{\(model), \(decoder), \"normalizer\": {\"type\": \"BertNormalizer\"}}")
                == "t.json: normalizer: BertNormalizer is not known here")
        #expect(
            refusal("{\(model), \(decoder), \"pre_tokenizer\": {\"type\": \"Punctuation\"}}")
                == "t.json: pre_tokenizer: Punctuation is not known here")
        #expect(
            refusal(model.replacingOccurrences(of: #"["a", "b"]"#, with: #"["a", "c"]"#).wrapped(decoder))
                == "t.json: model.merges.0: expected two tokens whose join is a token")
    }
}

extension String {
    fileprivate func wrapped(_ decoder: String) -> String { "{\(self), \(decoder)}" }
}
