import Foundation
import Testing

@testable import LesonnxScheduler

/// Tokens that are bytes, so that characters fall apart everywhere; those above 255 are special.
private struct ByteTokens: TokenDecoding {
    func decode(_ ids: [Int], skipSpecialTokens: Bool) -> String {
        String(decoding: ids.filter { $0 < 256 }.map { UInt8($0) }, as: UTF8.self)
    }

    func isSilent(_ token: Int) -> Bool { token > 255 }
}

private func tokenizer(_ decoder: String, _ vocabulary: String) throws -> TokenDecoder {
    let text = """
        {"added_tokens": [{"id": 9, "content": "<end>", "special": true}, {"id": 8, "content": "<note>", "special": false}],
         "decoder": \(decoder), "model": {"type": "BPE", "vocab": \(vocabulary)}}
        """
    return try TokenDecoder(parsing: Array(text.utf8))
}

private let sentencePiece = """
    {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
     {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    """

@Suite struct TokenDecoderTests {
    @Test func byteLevel() throws {
        let decoder = try tokenizer("{\"type\": \"ByteLevel\"}", "{\"Hi\": 0, \"Ġyou\": 1, \"Ã\": 2, \"©\": 3, \"ð\": 4, \"漢\": 5}")
        #expect(decoder.decode([0, 1]) == "Hi you")
        #expect(decoder.decode([2, 3]) == "é" && decoder.decode([2]) == "\u{FFFD}" && decoder.decode([4, 0]) == "\u{FFFD}Hi")
        #expect(decoder.decode([5]) == "漢", "a token outside the byte alphabet is itself")
        #expect(decoder.decode([0, 9, 8]) == "Hi<note>" && decoder.decode([0, 9], skipSpecialTokens: false) == "Hi<end>")
        #expect(decoder.isSilent(9) && !decoder.isSilent(8) && decoder.isSilent(7) && decoder.isSilent(-1) && !decoder.isSilent(0))
        #expect(decoder.vocabSize == 10 && decoder.decode([77, -3]) == "")
    }

    @Test func byteFallback() throws {
        let decoder = try tokenizer(sentencePiece, "{\"▁Hi\": 0, \"▁you\": 1, \"<0xC3>\": 2, \"<0xA9>\": 3, \"e\": 4, \"\u{301}\": 5}")
        #expect(decoder.decode([0, 1]) == "Hi you")
        #expect(decoder.decode([0, 2, 3]) == "Hié" && decoder.decode([2, 0]) == "\u{FFFD} Hi")
        #expect(decoder.decode([0, 2, 2]) == "Hi\u{FFFD}\u{FFFD}")
        #expect(Array(decoder.decode([4, 5]).unicodeScalars) == ["e", "\u{301}"])
    }

    @Test func metaspace() throws {
        let decoder = try tokenizer("{\"type\": \"Metaspace\", \"replacement\": \"▁\", \"prepend_scheme\": \"always\"}", "{\"▁Hi\": 0, \"▁you\": 1}")
        #expect(decoder.decode([0, 1]) == "Hi you")
    }

    @Test(arguments: ["null", "{\"type\": \"CTC\"}", "{\"type\": \"Sequence\", \"decoders\": [{\"type\": \"WordPiece\"}]}"])
    func unknownDecodersAreNamed(_ decoder: String) {
        #expect(throws: LesonnxError.self) { try tokenizer(decoder, "{}") }
    }

    @Test(arguments: ["", "{}", "{\"model\": {\"vocab\": {\"a\": -1}}}", "{\"model\": {\"vocab\": {\"a\": 99999999999}}}"])
    func whatIsNoTokenizer(_ text: String) {
        #expect(throws: LesonnxError.self) { try TokenDecoder(parsing: Array(text.utf8)) }
    }

    @Test func theSamplesTokenizerNamesEveryToken() throws {
        let data = try Data(contentsOf: repository.appending(path: "lesonnx/sample/tokenizer.json"))
        let decoder = try TokenDecoder(parsing: data)
        #expect(decoder.vocabSize == 2048 && (0..<2048).allSatisfy { decoder.name(of: $0) != nil })
    }

    @Test(.enabled(if: mobileIsThere, "no build/mobile")) func whatPythonDecodes() throws {
        let folder = try need(mobileFixtures, "build/mobile").appending(path: "reference")
        var checked = 0
        for name in try FileManager.default.contentsOfDirectory(atPath: folder.path) where name.hasSuffix(".json") {
            let reference = try readJSON(folder.appending(path: name))
            let bundle = folder.appending(path: "../bundles/\(reference["bundle"]?.string ?? "")").standardized
            let file = bundle.appending(path: "tokenizer/tokenizer.json")
            guard FileManager.default.fileExists(atPath: file.path) else { continue }
            let decoder = try TokenDecoder(parsing: Data(contentsOf: file))
            for record in try need(reference["tokenizer"]?.array, "tokenizer") {
                let text = try need(record["text"]?.string, "text")
                #expect(try decoder.decode(record.ints("ids"), skipSpecialTokens: false) == text, "\(name)")
                checked += 1
            }
            for record in try need(reference["cases"]?.array, "cases") {
                guard let text = record["text"]?.string else { continue }
                var stream = StreamDecoder(decoder)
                let pieces = try record.ints("token_ids").map { stream.push($0) } + [stream.flush()]
                #expect(pieces.joined() == text, "\(name)")
            }
        }
        #expect(checked > 0)
    }
}

@Suite struct StreamDecoderTests {
    private func stream(_ tokens: [Int], _ decoder: any TokenDecoding) -> [String] {
        var stream = StreamDecoder(decoder)
        return tokens.map { stream.push($0) } + [stream.flush()]
    }

    @Test(arguments: ["", "plain", "é漢😀 mixed e\u{301}\u{301}", "👩‍👩‍👧‍👦🇩🇪"]) func piecesAreTheText(_ text: String) {
        let pieces = stream(text.utf8.map { Int($0) }, ByteTokens())
        #expect(Array(pieces.joined().utf8) == Array(text.utf8))
        #expect(!pieces.contains { $0.contains("\u{FFFD}") }, "half a character was shown")
    }

    @Test(arguments: 0..<40) func anyBytesGiveWhatDecodingAtOnceGives(_ seed: Int) {
        var dice = Dice(seed)
        let letters = Array("aé漢😀".utf8) + [0x80, 0xFF, 0xE2, 0xF0, 0x9F]
        let tokens = (0..<dice.int(1...60)).map { _ in dice.chance(0.05) ? 300 : Int(dice.pick(letters)) }
        #expect(stream(tokens, ByteTokens()).joined() == ByteTokens().decode(tokens, skipSpecialTokens: true))
    }

    @Test func aLeadingSpaceBelongsToTheTextOnceThereIsSome() throws {
        let decoder = try tokenizer(sentencePiece, "{\"▁Hi\": 0, \"▁you\": 1, \"<0xC3>\": 2, \"<0xA9>\": 3}")
        #expect(stream([0, 1, 9, 1, 2, 3, 1], decoder) == ["Hi", " you", "", " you", "", "é", " you", ""])
    }

    @Test func longRunsOfBrokenBytesDoNotPileUp() {
        var stream = StreamDecoder(ByteTokens())
        var text = ""
        for _ in 0..<500 {
            text += stream.push(0xF0)
        }
        #expect(text.unicodeScalars.count > 400)
        #expect((text + stream.flush()).unicodeScalars.count == 500)
    }
}

@Suite struct StopCheckerTests {
    private func run(_ stops: [String], _ pieces: [String]) throws -> (String, String?) {
        var checker = try StopChecker(stops)
        let shown = pieces.map { checker.push($0) }.joined() + checker.flush()
        return (shown, checker.stoppedBy)
    }

    @Test func endsBeforeTheFirstStop() throws {
        #expect(try run(["END"], ["one E", "N", "D two"]) == ("one ", "END"))
        #expect(try run(["END"], ["one EN", "E END"]) == ("one ENE ", "END"))
        #expect(try run(["END"], ["one EN"]) == ("one EN", nil))
        #expect(try run(["bc", "abcd", "xbc"], ["axbcd"]) == ("a", "xbc"))
        #expect(try run([], ["a", "b"]) == ("ab", nil))
        #expect(try run(["e"], ["e\u{301}"]) == ("", "e"))
    }

    @Test(arguments: 0..<60) func pieceBordersDoNotMatter(_ seed: Int) throws {
        var dice = Dice(seed)
        let text = (0..<40).map { _ in dice.pick(["a", "b", "c"]) }.joined()
        let stops = (0..<dice.int(1...3)).map { _ in (0..<dice.int(1...5)).map { _ in dice.pick(["a", "b", "c"]) }.joined() }
        var pieces: [String] = []
        var rest = Substring(text)
        while !rest.isEmpty {
            let count = dice.int(1...4)
            pieces.append(String(rest.prefix(count)))
            rest = rest.dropFirst(count)
        }
        let byPieces = try run(stops, pieces)
        let byCharacters = try run(stops, text.map { String($0) })
        #expect(byPieces.0 == byCharacters.0)
        if let stop = byCharacters.1 {
            #expect(text.hasPrefix(byCharacters.0 + stop))
        } else {
            #expect(!stops.contains { text.contains($0) } && byCharacters.0 == text)
        }
    }

    @Test func nothingIsNoStop() {
        #expect(throws: LesonnxError.self) { try StopChecker(["a", ""]) }
    }
}

@Suite struct ChatFormatTests {
    @Test func joinsAConversation() throws {
        let format = try need(SmallBundle.parse().tokenizer?.chatFormat, "chat_format")
        let conversation = [
            ChatMessage(role: .user, content: "a"), ChatMessage(role: .assistant, content: "b"),
            ChatMessage(role: .user, content: "{x}\n"),
        ]
        #expect(try format.join(conversation) == "<s>U:a\nA:b</s>U:{x}\n\nA:")
        #expect(throws: LesonnxError.input("a message has the role system, the bundle's chat format has assistant, user")) {
            try format.join([ChatMessage(role: .system, content: "")])
        }
    }
}
