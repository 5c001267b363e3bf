import Foundation
import LesonnxScheduler
import LesonnxStore

/// `inspect BUNDLE`: what it is and whether it fits this machine; `--verify` compares every file with its checksum.
enum InspectCommand {
    static let usage = "inspect BUNDLE [--context TOKENS] [--verify]"

    static func run(_ words: some Sequence<String>) throws {
        var arguments = try Arguments(words, flags: ["--verify"])
        let bundle = try ModelBundle(directory: URL(filePath: arguments.next("a bundle's folder")))
        let context = try arguments.number("--context") ?? 4096
        let verifies = arguments.flag("--verify")
        try arguments.end()
        let facts = bundle.manifest.model
        let needs = BundleNeeds(bundle.manifest, try Checksums(of: bundle.directory), contextTokens: context)
        print("model    \(facts.modelType), \(facts.numHiddenLayers) layers, \(facts.numExpertsPerTok) of \(facts.numExperts) experts a token")
        print("experts  \(formatBytes(needs.allExpertBytes)) in \(bundle.manifest.expertBits.map(String.init).joined(separator: ", ")) bits; a token uses \(formatBytes(needs.tokenExpertBytes))")
        print("memory   at least \(formatBytes(needs.leastMemoryBytes)): dense parts \(formatBytes(needs.denseBytes)), states \(formatBytes(needs.stateBytes)) for \(context) tokens")
        print("storage  \(formatBytes(needs.diskBytes))")
        print("talks    \(bundle.manifest.tokenizer?.chatFormat == nil ? "completes texts" : "chats")")
        if bundle.manifest.vision != nil {
            print("sees     pictures; \(formatBytes(needs.visionBytes)) of that memory while they are read")
        }
        print("here     \(Fit(needs, on: .current(for: bundle.directory), isStored: true).summary)")
        if verifies {
            print("verified \(try bundle.verify()) files")
        }
    }
}

/// `fetch ADDRESS FOLDER`: download a bundle into a folder of bundles, going on where an earlier one was broken off.
enum FetchCommand {
    static let usage = "fetch ADDRESS FOLDER [--name NAME]"

    static func run(_ words: some Sequence<String>) async throws {
        var arguments = try Arguments(words, flags: [])
        let address = try arguments.next("an address")
        let folder = try arguments.next("a folder for bundles")
        let name = arguments.text("--name")
        try arguments.end()
        guard let url = URL(string: address) else { throw LesonnxError.input("'\(address)' is not an address") }
        let store = try BundleStore(folder: URL(filePath: folder))
        let download = try BundleDownload(from: url, into: store, name: name)
        let bundle = try await download.run()
        print(bundle.directory.path(percentEncoded: false))
    }
}
