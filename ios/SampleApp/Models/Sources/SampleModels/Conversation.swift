import Foundation
import Lesonnx
import LesonnxScheduler
import Observation

/// A chat with a bundle, or, where it has no chat format, texts that it goes on with.
@MainActor @Observable public final class Conversation {
    public struct Line: Identifiable, Equatable, Sendable {
        public var id: Int
        public var role: ChatRole
        public var text: String
        /// How an answer ended, where that is worth a word.
        public var remark: String?
    }

    public private(set) var lines: [Line] = []
    public private(set) var isAnswering = false
    /// The last thing that went wrong, in a line.
    public private(set) var problem: String?
    /// Whether it answers; else it completes what it is given.
    public let chats: Bool
    public var maxNewTokens = 256
    public var sampling = SamplingOptions.greedy

    private let model: Model
    private let meter: Meter
    private var task: Task<Void, Never>?

    public init(_ model: Model, meter: Meter) {
        self.model = model
        self.meter = meter
        chats = model.bundle.manifest.tokenizer?.chatFormat != nil
    }

    /// Asks; the answer comes as the last line, piece by piece. Does nothing while one is coming.
    public func send(_ text: String) {
        if isAnswering || text.isEmpty {
            return
        }
        problem = nil
        add(.user, text)
        let asked = lines.filter { !$0.text.isEmpty }.map { ChatMessage(role: $0.role, content: $0.text) }
        add(.assistant, "")
        isAnswering = true
        task = Task {
            await answer(text, asked)
            isAnswering = false
        }
    }

    /// Ends the answer after the token under way.
    public func stop() { task?.cancel() }

    /// Waits until no answer is coming.
    public func settle() async { await task?.value }

    /// Begins anew.
    public func reset() async {
        stop()
        await settle()
        lines = []
        problem = nil
    }

    private func answer(_ text: String, _ asked: [ChatMessage]) async {
        do {
            let room = GenerationOptions(maxNewTokens: maxNewTokens, sampling: sampling)
            let generation = try await chats ? model.chat(conversation(asked), room) : model.generate(.text(text), room)
            meter.pause()
            let clock = ContinuousClock()
            let start = clock.now
            for try await token in generation.tokens {
                lines[lines.count - 1].text += token.text
                let now = (clock.now - start).components
                meter.add(
                    await model.telemetry, drafts: await generation.report.drafts,
                    atSeconds: Double(now.seconds) + Double(now.attoseconds) / 1e18, memoryBytes: Memory.currentBytes())
            }
            if Task.isCancelled {
                lines[lines.count - 1].remark = "stopped"
            } else if await generation.report.finishReason == .length {
                lines[lines.count - 1].remark = "cut off at \(maxNewTokens) tokens"
            }
        } catch is CancellationError {
            lines[lines.count - 1].remark = "stopped"
        } catch {
            problem = "\(error)"
            if lines.last?.text.isEmpty == true {
                lines.removeLast()
            }
        }
    }

    /// Turns as the chat format knows them: where it has no assistant's, each question stands alone; of two questions in a row,
    /// which a failure leaves behind, the last counts.
    private func conversation(_ asked: [ChatMessage]) -> [ChatMessage] {
        if model.bundle.manifest.tokenizer?.chatFormat?.messages[.assistant] == nil {
            return Array(asked.suffix(1))
        }
        var turns: [ChatMessage] = []
        for message in asked {
            if turns.last?.role == message.role {
                turns.removeLast()
            }
            turns.append(message)
        }
        return turns
    }

    private func add(_ role: ChatRole, _ text: String) {
        lines.append(Line(id: (lines.last?.id ?? 0) + 1, role: role, text: text))
    }
}
