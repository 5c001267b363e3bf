import LesonnxScheduler
import Testing

@testable import lesonnx_swift

private enum Colour: String, CaseIterable {
    case red, blue
}

@Suite struct ArgumentsTests {
    private func arguments(_ words: String) throws -> Arguments {
        try Arguments(words.split(separator: " ").map { String($0) }, flags: ["--json", "--lookahead", "--no-lookahead"])
    }

    /// The text of the error that `body` throws.
    private func error(_ body: () throws -> Void) -> String {
        do {
            try body()
            Issue.record("expected an error")
            return ""
        } catch {
            return "\(error)"
        }
    }

    @Test func everyKind() throws {
        var words = try arguments("bundle --size 2GiB --json --count=-3 --share 0.5 --colour blue --no-lookahead --stop a --stop b")
        #expect(try words.next("a bundle") == "bundle" && words.bytes("--size") == 1 << 31)
        #expect(words.flag("--json") && !words.flag("--json"))
        let count: Int? = try words.number("--count")
        let share: Double? = try words.number("--share")
        let missing: UInt64? = try words.number("--seed")
        let colour: Colour? = try words.choice("--colour")
        #expect(count == -3 && share == 0.5 && missing == nil && colour == .blue)
        #expect(words.onOff("lookahead") == false && words.onOff("lookahead") == nil)
        #expect(words.text("--stop") == "a" && words.text("--stop") == "b" && words.text("--stop") == nil)
        try words.end()
    }

    @Test func whatIsWrongIsNamed() {
        #expect(error { _ = try arguments("--size") } == "--size needs a value")
        #expect(error { try arguments("--sheep 3").end() } == "unknown option --sheep")
        #expect(error { try arguments("a b").end() } == "'a' is one word too many")
        #expect(error { var words = try arguments(""); _ = try words.next("a bundle's folder") } == "expected a bundle's folder")
        #expect(error { var words = try arguments("--n x"); let _: Int? = try words.number("--n") } == "--n is 'x', expected a number")
        #expect(
            error { var words = try arguments("--colour pink"); let _: Colour? = try words.choice("--colour") }
                == "--colour is 'pink', expected one of red, blue")
        #expect(error { var words = try arguments("--size big"); _ = try words.bytes("--size") }.hasPrefix("'big' is not a size"))
    }
}
