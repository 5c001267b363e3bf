import Foundation
import Lesonnx
import LesonnxScheduler
import Observation

/// The schedules one after another on the same prompt, each with a cache that is new: what each technique gives on this device.
@MainActor @Observable public final class Benchmark {
    /// One row of the table.
    public struct Row: Identifiable, Equatable, Sendable {
        public var id: Int
        public var title: String
        public var result: Result?
        /// Why there is none.
        public var problem: String?
    }

    public struct Result: Equatable, Sendable {
        public var tokensPerS: Double
        public var hitShare: Double
        public var readBytesPerToken: Int
        public var memoryBytes: Int
        /// Of the tokens that were drafted and verified, how many stayed; nil without a drafter.
        public var drafts: DraftCounts?
        /// Whether the text is that of the first row, as it must be; with drafts a quantized bundle may round otherwise.
        public var isSameText: Bool
    }

    private struct Step {
        var title: String
        var schedule: Schedule
        var lookahead: Bool?
        var drafts = false
    }

    private static let ladder = [
        Step(title: "on demand", schedule: .onDemand), Step(title: "cache", schedule: .cache),
        Step(title: "les, no lookahead", schedule: .les, lookahead: false), Step(title: "les", schedule: .les, lookahead: true),
        Step(title: "les, drafts", schedule: .les, lookahead: true, drafts: true), Step(title: "all in memory", schedule: .resident),
    ]

    public private(set) var rows: [Row] = []
    public private(set) var isRunning = false
    public var prompt = "In the beginning God created"
    public var numTokens = 32
    /// Tokens before those that count: a cache that fills is slower.
    public var numWarmupTokens = 16

    private var task: Task<Void, Never>?

    public init() {}

    /// The fastest row against the first.
    public var speedup: Double? {
        guard let first = rows.first?.result?.tokensPerS, first > 0 else { return nil }
        return rows.compactMap { $0.result?.tokensPerS }.max().map { $0 / first }
    }

    /// Runs the ladder; whatever model is loaded must be closed before, for memory's sake.
    public func run(_ bundle: ModelBundle, expertBudgetBytes: Int) {
        if isRunning {
            return
        }
        isRunning = true
        rows = Self.ladder.enumerated().map { Row(id: $0, title: $1.title) }
        task = Task {
            var text: [Int]?
            for (place, step) in Self.ladder.enumerated() where !Task.isCancelled {
                do {
                    let (result, ids) = try await measure(bundle, step, expertBudgetBytes)
                    rows[place].result = result
                    rows[place].result?.isSameText = ids == text ?? ids
                    text = text ?? ids
                } catch is CancellationError {
                    break
                } catch {
                    rows[place].problem = "\(error)"
                }
            }
            isRunning = false
        }
    }

    public func cancel() { task?.cancel() }

    public func settle() async { await task?.value }

    private func measure(_ bundle: ModelBundle, _ step: Step, _ budget: Int) async throws -> (Result, [Int]) {
        var options = LoadOptions()
        options.schedule = step.schedule
        options.lookahead = step.lookahead
        options.draft = step.drafts ? bundle.manifest.nearestDrafter : .none
        options.expertBudgetBytes = budget
        let model = try await Model.load(bundle, options)
        do {
            let measured = try await measure(model)
            await model.close()
            return measured
        } catch {
            await model.close()
            throw error
        }
    }

    private func measure(_ model: Model) async throws -> (Result, [Int]) {
        let count = numWarmupTokens + numTokens
        let generation = try await model.generate(start(model), GenerationOptions(maxNewTokens: count, ignoresEos: true))
        let clock = ContinuousClock()
        var began = clock.now
        var seen = 0
        var memory = 0
        for try await token in generation.tokens where token.id != nil {
            seen += 1
            memory = max(memory, Memory.currentBytes())
            if seen == numWarmupTokens {
                await model.resetTelemetry()
                began = clock.now
            }
        }
        try Task.checkCancellation()
        let spent = (clock.now - began).components
        let seconds = Double(spent.seconds) + Double(spent.attoseconds) / 1e18
        let telemetry = await model.telemetry
        let required = max(1, telemetry.hits + telemetry.late + telemetry.misses)
        let result = Result(
            tokensPerS: Double(numTokens) / seconds, hitShare: Double(telemetry.hits) / Double(required),
            readBytesPerToken: telemetry.readBytes / numTokens, memoryBytes: memory, drafts: await generation.report.drafts,
            isSameText: true)
        return (result, await generation.report.tokenIds)
    }

    /// A bundle without a tokenizer takes ids: any will do.
    private func start(_ model: Model) -> Prompt {
        model.tokenizer == nil ? .ids([1, 2, 3, 4]) : .text(prompt)
    }
}
