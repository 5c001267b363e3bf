import Foundation

@testable import LesonnxScheduler

/// The repository, seen from this file; its tests' data is shared by all runtimes.
let repository = URL(filePath: #filePath).appending(path: "../../../../..").standardized
let testData = repository.appending(path: "tests/data")

/// Bundles and references that `tools/make_mobile_fixtures.py` made; nil where nobody made them.
let mobileFixtures: URL? = {
    let named = ProcessInfo.processInfo.environment["LESONNX_MOBILE"].map { URL(filePath: $0) }
    let folder = named ?? repository.appending(path: "build/mobile")
    return FileManager.default.fileExists(atPath: folder.appending(path: "bundles").path) ? folder : nil
}()
let mobileIsThere = mobileFixtures != nil || ProcessInfo.processInfo.environment["CI"] != nil

func readJSON(_ url: URL) throws -> JSON {
    try JSON(parsing: Data(contentsOf: url))
}

struct Missing: Error, CustomStringConvertible {
    let description: String
}

/// A value that a test's data must have.
func need<Value>(_ value: Value?, _ what: String) throws -> Value {
    guard let value else { throw Missing(description: "no \(what)") }
    return value
}

extension JSON {
    func ints(_ key: String) throws -> [Int] {
        try need(self[key]?.array?.compactMap(\.int), key)
    }

    func int(_ key: String) throws -> Int {
        try need(self[key]?.int, key)
    }

    var number: Double? {
        switch self {
        case .int(let value): return Double(value)
        case .double(let value): return value
        default: return nil
        }
    }
}

/// Reproducible numbers for property tests.
struct Dice: RandomNumberGenerator {
    private var random: Pcg32

    init(_ seed: Int) {
        random = Pcg32(seed: UInt64(seed), stream: 7)
    }

    mutating func next() -> UInt64 {
        UInt64(random.nextUInt32()) << 32 | UInt64(random.nextUInt32())
    }

    mutating func int(_ range: ClosedRange<Int>) -> Int { Int.random(in: range, using: &self) }

    mutating func chance(_ share: Double) -> Bool { Double.random(in: 0..<1, using: &self) < share }

    mutating func pick<Element>(_ elements: [Element]) -> Element { elements[int(0...elements.count - 1)] }
}
