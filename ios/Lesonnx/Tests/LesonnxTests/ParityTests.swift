import Foundation
import Testing

@testable import Lesonnx
@testable import LesonnxScheduler

extension RuntimeTests {
    /// What Python's runner gave, bit for bit where the ONNX Runtime is the same.
    @Suite struct Parity {
        enum Budget: String, CaseIterable, Sendable {
            case least, quarter, all

            func bytes(_ bundle: ModelBundle) -> Int {
                switch self {
                case .least: return bundle.leastBudgetBytes
                case .quarter: return max(bundle.leastBudgetBytes, bundle.expertBytes / 4)
                case .all: return bundle.expertBytes
                }
            }
        }

        static let thorough = ["sample-int4", "qwen3_moe-float", "qwen2_moe-float", "qwen2_moe-int4"]

        @Test("logits and tokens under every schedule; of some bundles with every engine and budget", arguments: Fixtures.runnable)
        func everySchedule(name: String) throws {
            let bundle = try Fixtures.bundle(name)
            let (reference, hasBits) = try Fixtures.reference(name)
            let version = try OrtLibrary.shared().version
            print("\(name): ONNX Runtime \(version), \(hasBits ? "logits bit for bit" : "tokens")")
            let isThorough = Self.thorough.contains(name)
            for test in reference.cases + reference.rewinds {
                let logits = try reference.logits(test)
                let schedules = isThorough || test.engine == .kernel ? Schedule.allCases : [.les]
                for schedule in schedules {
                    let isBroad = isThorough && test.stepIds.isEmpty
                    let budgets = schedule == .resident ? [.all] : isBroad ? Budget.allCases : [.quarter]
                    for budget in budgets {
                        let place = "\(name) \(test.name) \(schedule.rawValue) \(budget.rawValue)"
                        try compare(bundle, reference, test, hasBits ? logits : nil, schedule, budget.bytes(bundle), place)
                    }
                }
            }
        }

        /// The reference's tokens are fed back, so that the rows can be compared one by one.
        private func compare(
            _ bundle: ModelBundle, _ reference: Reference, _ test: Reference.Case, _ expected: Data?,
            _ schedule: Schedule, _ budgetBytes: Int, _ place: String
        ) throws {
            let runner = try Runners.make(bundle, reference, test.engine, schedule, budgetBytes)
            defer { runner.close() }
            try Runners.compare(runner, test, expected, place)
            let telemetry = runner.loader.telemetry
            let required = telemetry.hits + telemetry.late + telemetry.misses
            #expect(required > 0, "\(place)")
            if schedule == .onDemand {
                #expect(telemetry.hits == 0 && telemetry.loads == telemetry.misses, "\(place)")
            }
        }

        @Test("after a rewind the same logits come again")
        func rewind() throws {
            let bundle = try Fixtures.bundle("sample-int4")
            let (reference, _) = try Fixtures.reference("sample-int4")
            let test = try #require(reference.cases.first)
            let runner = try Runners.make(bundle, reference, .kernel, .les, bundle.expertBytes / 4)
            defer { runner.close() }
            _ = try runner.prefill(test.promptIds)
            let first = try runner.step([test.tokenIds[0]], logitRows: [0])
            let before = Array(first[UInt32.self])
            for token in test.tokenIds[1...4] {
                _ = try runner.step([token], logitRows: [0])
            }
            try runner.rewind(to: test.promptIds.count)
            let again = try runner.step([test.tokenIds[0]], logitRows: [0])
            #expect(Array(again[UInt32.self]) == before)
        }

        @Test("a prompt in chunks, its states growing, and all its logits",
            arguments: ["sample-int4", "sample-int4-kv8", "smallthinker-float", "qwen3_next-portable-float"].filter(Fixtures.isRunnable))
        func longPrompt(name: String) throws {
            let bundle = try Fixtures.bundle(name)
            let (reference, _) = try Fixtures.reference(name)
            let most = bundle.manifest.model.maxPositionEmbeddings
            let count = min(most - 1, 600)
            let prompt = (0..<count).map { 3 + ($0 * 7919) % (bundle.manifest.model.vocabSize - 3) }
            let vocabSize = bundle.manifest.model.vocabSize
            var seen: [[UInt32]] = []
            for (schedule, budget) in [(Schedule.les, bundle.expertBytes), (.onDemand, bundle.leastBudgetBytes)] {
                let runner = try Runners.make(bundle, reference, .kernel, schedule, budget, chunk: 64)
                defer { runner.close() }
                let all = try runner.prefill(prompt, allLogits: true)
                #expect(all.shape == [count, vocabSize])
                let allBits = Array(all[UInt32.self])
                try runner.rewind(to: 0)
                let last = try runner.prefill(prompt)
                #expect(last.shape == [1, vocabSize])
                seen.append(allBits + Array(last[UInt32.self]))
            }
            let areEqual = seen[0] == seen[1]
            #expect(areEqual)
        }
    }
}

enum Runners {
    /// Whether a runner gives a reference's tokens, and, where the logits are given, these bits. The reference's tokens are fed back,
    /// so that the rows can be compared one by one.
    static func compare(_ runner: Runner, _ test: Reference.Case, _ expected: Data?, _ place: String) throws {
        var sampler = Sampler(test.sampling)
        try sampler.accept(all: test.promptIds)
        var logits = try runner.prefill(test.promptIds)
        if !test.stepIds.isEmpty {
            // A step of which only the first tokens stay; the last of those gives the first logits.
            logits = try runner.step(test.stepIds, logitRows: [test.keptTokens - 1])
            try runner.rewind(to: test.promptIds.count + test.keptTokens)
        }
        let rowBytes = test.vocabSize * 4
        for (row, token) in test.tokenIds.enumerated() {
            if row > 0 {
                logits = try runner.step([test.tokenIds[row - 1]], logitRows: [0])
            }
            if let expected {
                let found = Data(bytes: logits.pointer, count: logits.byteCount)
                let isEqual = found == expected[row * rowBytes..<(row + 1) * rowBytes]
                #expect(isEqual, "\(place): logits of row \(row)")
                if !isEqual { return }
            }
            let sampled = try sampler.sample(UnsafeBufferPointer(logits[Float.self]))
            #expect(sampled == token, "\(place): token \(row)")
            if sampled != token { return }
            try sampler.accept(token)
        }
    }

    static func make(
        _ bundle: ModelBundle, _ reference: Reference, _ engine: EngineChoice, _ schedule: Schedule, _ budgetBytes: Int,
        chunk: Int? = nil, accelerate: Acceleration = .off, wrap: (any ExpertEngine) -> any ExpertEngine = { $0 }
    ) throws -> Runner {
        var options = LoadOptions()
        options.schedule = schedule
        let config = options.schedulerConfig
        let environment = try OrtEnvironment.shared(numThreads: reference.numThreads)
        let made = try makeEngine(engine, bundle, environment).engine
        let loader = try ExpertLoader(
            bundle, wrap(made), config, budgetBytes: budgetBytes, numLoaders: config.maxLoads)
        do {
            return try Runner(
                bundle, loader, environment, prefillChunkTokens: chunk ?? reference.prefillChunkTokens,
                twins: Twins(bundle, environment, accelerate))
        } catch {
            loader.close()
            throw error
        }
    }
}
