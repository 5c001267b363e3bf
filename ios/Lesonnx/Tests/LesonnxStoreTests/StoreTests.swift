import Foundation
import LesonnxScheduler
import Testing

@testable import LesonnxStore

@Suite struct Sha256Tests {
    private func digest(_ bytes: [UInt8], pieces: Int) -> String {
        var digest = Sha256()
        for start in stride(from: 0, to: bytes.count, by: pieces) {
            bytes[start..<min(start + pieces, bytes.count)].withUnsafeBytes { digest.update($0) }
        }
        return digest.finish()
    }

    @Test(arguments: [
        ("", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        ("abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        (
            "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
        ),
    ]) func published(_ text: String, _ expected: String) {
        #expect(digest(Array(text.utf8), pieces: 1000) == expected)
    }

    @Test func aMillionLettersInPiecesOfAnySize() {
        let letters = [UInt8](repeating: UInt8(ascii: "a"), count: 1_000_000)
        for pieces in [1_000_000, 4096, 63, 65] {
            #expect(digest(letters, pieces: pieces) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0")
        }
    }

    @Test func everyLengthAroundABlock() {
        for length in 0...130 {
            let bytes = (0..<length).map { UInt8($0) }
            #expect(digest(bytes, pieces: 7) == digest(bytes, pieces: 1000))
        }
    }
}

@Suite struct ChecksumsTests {
    private static let digest = String(repeating: "a", count: 64)

    @Test func whatItSays() throws {
        let text = "{\"algorithm\": \"sha256\", \"files\": {\"dense/b\": {\"size_bytes\": 5, \"sha256\": \"\(Self.digest)\"}}}\n"
        let checksums = try Checksums(parsing: Array(text.utf8))
        #expect(checksums.entries.map(\.path) == ["dense/b"] && checksums.totalBytes == 5 && checksums.denseBytes == 5)
    }

    static let bad = [
        ("{\"algorithm\": \"md5\", \"files\": {}}\n", "which is sha256"), ("{\"files\": {}}\n", "which is sha256"), ("[]\n", "expected an object"),
        ("{\"algorithm\": \"sha256\", \"files\": []}\n", "files: expected an object"),
        ("{\"algorithm\": \"sha256\", \"files\": {}}", "the file is cut off"), ("{", "not JSON"),
        ("{\"algorithm\": \"sha256\", \"files\": {\"a\": {\"size_bytes\": 5}}}\n", "a: expected size_bytes and sha256"),
        ("{\"algorithm\": \"sha256\", \"files\": {\"../a\": {\"size_bytes\": 5, \"sha256\": \"\(digest)\"}}}\n", "must be relative"),
        ("{\"algorithm\": \"sha256\", \"files\": {\"a\": {\"size_bytes\": -5, \"sha256\": \"\(digest)\"}}}\n", "expected a size"),
        ("{\"algorithm\": \"sha256\", \"files\": {\"a\": {\"size_bytes\": 5, \"sha256\": \"zz\"}}}\n", "64 hexadecimal"),
    ]

    @Test(arguments: bad) func whatIsRefused(_ text: String, _ message: String) async {
        let found = await errorText { _ = try Checksums(parsing: Array(text.utf8), source: "here") }
        #expect(found.hasPrefix("here: ") && found.contains(message), "\(found)")
    }
}

@Suite(.enabled(if: mobileIsThere, "no build/mobile")) struct BundleStoreTests {
    @Test func importsWhatIsWhole() throws {
        let scratch = try Scratch()
        let store = try scratch.store()
        let source = try scratch.copy()
        var bytes = 0
        #expect(try store.importBundle(from: source, progress: { bytes += $0 }) == "small")
        #expect(try store.names() == ["small"] && store.partialNames().isEmpty)
        #expect(try bytes == Checksums(of: source).totalBytes)
        let bundle = try store.bundle(named: "small")
        #expect(try bundle.verify() == Checksums(of: source).entries.count)
        #expect(throws: LesonnxError.input("a bundle named small is there already; remove it first")) {
            try store.importBundle(from: source)
        }
        try store.remove("small")
        #expect(try store.names().isEmpty)
    }

    @Test func refusesWhatIsCorruptAndLeavesNothing() async throws {
        let scratch = try Scratch()
        let store = try scratch.store()
        let source = try scratch.copy()
        let victim = source.appending(path: "dense/dense.bin")
        var bytes = try Data(contentsOf: victim)
        bytes[10] ^= 1
        try bytes.write(to: victim)
        let found = await errorText { _ = try store.importBundle(from: source) }
        #expect(found.contains("dense.bin: SHA-256 differs"))
        #expect(try store.names().isEmpty && store.partialNames().isEmpty)
        try Data(bytes.dropLast()).write(to: victim)
        #expect(await errorText { try ModelBundle(directory: source).verify() }.contains("checksums.json says"))
    }

    @Test func aFileThatNobodyNamed() async throws {
        let scratch = try Scratch()
        let source = try scratch.copy()
        try Data([1]).write(to: source.appending(path: "experts/extra"))
        #expect(await errorText { try ModelBundle(directory: source).verify() }.contains("experts/extra: is not named"))
    }

    @Test(arguments: ["", ".hidden", "a/b", "..", "a:b"]) func namesThatAreNone(_ name: String) throws {
        let store = try Scratch().store()
        #expect(throws: LesonnxError.self) { try store.freeName(name) }
    }
}

@Suite struct FitTests {
    private func needs(dense: Int) throws -> BundleNeeds {
        let bundle = try ModelBundle(directory: try #require(sampleBundle))
        var needs = BundleNeeds(bundle.manifest, try Checksums(of: bundle.directory), contextTokens: 1000)
        needs.denseBytes = dense
        return needs
    }

    @Test(.enabled(if: mobileIsThere, "no build/mobile")) func whatABundleNeeds() throws {
        let bundle = try ModelBundle(directory: try #require(sampleBundle))
        let needs = BundleNeeds(bundle.manifest, try Checksums(of: bundle.directory), contextTokens: 1 << 30)
        #expect(needs.leastExpertBytes == bundle.leastBudgetBytes && needs.tokenExpertBytes == bundle.tokenDemandBytes)
        #expect(needs.allExpertBytes == bundle.expertBytes && needs.diskBytes > bundle.expertBytes)
        // Two states a layer, of the whole context: no conversation is longer than the model's.
        let facts = bundle.manifest.model
        let one = bundle.manifest.stateBytes(contextTokens: facts.maxPositionEmbeddings)
        #expect(needs.stateBytes == one && one % facts.numHiddenLayers == 0)
        #expect(bundle.manifest.stateBytes(contextTokens: 1) == bundle.manifest.stateBytes(contextTokens: 512))
    }

    /// States of fixed shape as `lesonnx inspect --json` counts them, beside caches of bytes a token.
    @Test(
        .enabled(if: mobileIsThere, "no build/mobile"),
        arguments: [("qwen3_next-float", 78336, 512), ("lfm2_moe-float", 10240, 512), ("smallthinker-float", 0, 1024)])
    func statesOfEveryKind(name: String, fixedBytes: Int, bytesPerToken: Int) throws {
        let bundle = try ModelBundle(directory: try #require(mobileBundle(name)))
        let needs = BundleNeeds(bundle.manifest, try Checksums(of: bundle.directory), contextTokens: 512)
        #expect(bundle.manifest.fixedStateBytes == fixedBytes)
        #expect(needs.stateBytes == fixedBytes + 512 * bytesPerToken)
    }

    /// Eyes are not among the dense parts: they are open only while pictures are read, but must find room then.
    @Test(.enabled(if: mobileIsThere, "no build/mobile")) func eyes() throws {
        let bundle = try ModelBundle(directory: try #require(mobileBundle("minicpmv4_7-float")))
        let checksums = try Checksums(of: bundle.directory)
        let vision = try #require(bundle.manifest.vision)
        var needs = BundleNeeds(bundle.manifest, checksums, contextTokens: 512)
        #expect(needs.visionBytes > vision.workingBytes + checksums.sizeBytes(of: vision.data) + BundleNeeds.pictureBytes)
        #expect(checksums.sizeBytes(of: vision.data) > 4 * vision.numParameters / 10 * 9 && checksums.sizeBytes(of: "none") == 0)
        #expect(needs.denseBytes + checksums.sizeBytes(of: vision.data) + needs.allExpertBytes < needs.diskBytes)
        let fixedBytes = needs.fixedBytes
        needs.visionBytes = 0
        #expect(needs.fixedBytes < fixedBytes)
        let blind = try ModelBundle(directory: try #require(sampleBundle))
        #expect(BundleNeeds(blind.manifest, try Checksums(of: blind.directory), contextTokens: 512).visionBytes == 0)
    }

    @Test(.enabled(if: mobileIsThere, "no build/mobile")) func needsFromSizes() throws {
        let bundle = try ModelBundle(directory: try #require(sampleBundle))
        let read = BundleNeeds(bundle.manifest, try Checksums(of: bundle.directory), contextTokens: 512)
        // As an app has them from a ModelSpec, before the bundle is there.
        let given = BundleNeeds(
            diskBytes: read.diskBytes, denseBytes: read.denseBytes, stateBytes: read.stateBytes,
            leastExpertBytes: bundle.leastBudgetBytes, tokenExpertBytes: bundle.tokenDemandBytes,
            allExpertBytes: bundle.expertBytes)
        #expect(given == read)
    }

    @Test(.enabled(if: mobileIsThere, "no build/mobile")) func fits() throws {
        let needs = try needs(dense: 1_000_000_000)
        let large = DeviceOffer(memoryBytes: 4_000_000_000, freeDiskBytes: 1 << 40)
        #expect(Fit(needs, on: large, isStored: false) == .fits(expertBudgetBytes: needs.allExpertBytes, isTight: false))
        let least = (needs.leastMemoryBytes + 10) / 9 * 10
        let tight = Fit(needs, on: DeviceOffer(memoryBytes: least, freeDiskBytes: 1 << 40), isStored: false)
        guard case .fits(let budget, true) = tight else {
            Issue.record("\(tight)")
            return
        }
        #expect(budget >= needs.leastExpertBytes && budget < needs.tokenExpertBytes)
        let small = DeviceOffer(memoryBytes: 1_000_000_000, freeDiskBytes: 1 << 40)
        let refused = Fit(needs, on: small, isStored: false)
        #expect(refused == .tooLittleMemory(needsBytes: needs.leastMemoryBytes, hasBytes: 900_000_000) && !refused.isFitting)
        #expect(refused.summary.hasPrefix("Needs 1.2") && refused.summary.contains("this device has 900 MB"))
        let full = DeviceOffer(memoryBytes: 4_000_000_000, freeDiskBytes: 10)
        #expect(Fit(needs, on: full, isStored: false) == .tooLittleSpace(needsBytes: needs.diskBytes, hasBytes: 10))
        #expect(Fit(needs, on: full, isStored: true).isFitting)
    }

    @Test func thisDevice() {
        let offer = DeviceOffer.current(for: FileManager.default.temporaryDirectory)
        #expect(offer.memoryBytes > 1 << 20 && offer.freeDiskBytes > 1 << 20)
    }
}

@Suite struct ByteSizeTests {
    @Test(arguments: [("3GB", 3_000_000_000), ("2 GiB", 1 << 31), ("1.5M", 1_500_000), ("4096", 4096), ("10kb", 10_000)])
    func sizes(_ text: String, _ expected: Int) throws {
        #expect(try parseBytes(text) == expected)
    }

    @Test(arguments: ["", "GB", "-1", "1.2.3", "3 sheep", "9999999TB", ".5", "5."]) func noSizes(_ text: String) {
        #expect(throws: LesonnxError.self) { try parseBytes(text) }
    }

    @Test(arguments: [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1_670_000, "1.67 MB"), (15_400_000_000, "15.4 GB"), (999_600, "1.00 MB"), (720_000_000, "720 MB")])
    func forPeople(_ bytes: Int, _ expected: String) {
        #expect(formatBytes(bytes) == expected)
    }
}
