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
