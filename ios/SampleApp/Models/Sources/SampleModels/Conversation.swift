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
        /// The pictures that go with a question.
        public var attachments: [Attachment] = []
        /// How an answer ended, where that is worth a word.
        public var remark: String?
    }

    public private(set) var lines: [Line] = []
    public private(set) var isAnswering = false
    /// Pictures that go with the next question.
    public private(set) var attachments: [Attachment] = []
    /// Whether a picture is being decoded.
    public private(set) var isDecoding = false
    /// Why no picture can be attached; nil where one can.
    public let pictureObstacle: String?
    /// The last thing that went wrong, in a line.
    public private(set) var problem: String?
    /// Whether it answers; else it completes what it is given.
    public let chats: Bool
    public var maxNewTokens = 256
    public var sampling = SamplingOptions.greedy

    private let model: Model
    private let meter: Meter
    private var task: Task<Void, Never>?
    private var numAttachments = 0

    public init(_ model: Model, meter: Meter) {
        self.model = model
        self.meter = meter
        let manifest = model.bundle.manifest
        chats = manifest.tokenizer?.chatFormat != nil
        if manifest.vision == nil {
            pictureObstacle = "This bundle has no eyes: it takes no pictures."
        } else if chats && manifest.vision?.texts.separator == nil {
            pictureObstacle = "This bundle does not say how pictures stand in a chat."
        } else {
            pictureObstacle = nil
        }
    }

    /// What to say while there is nothing else to see.
    public var introduction: String {
        let completes = chats ? nil : "This bundle has no chat format: it goes on with what you write."
        return [completes, pictureObstacle].compactMap { $0 }.joined(separator: " ")
    }

    /// Decodes a picture for the next question; `load` gives the bytes of its file, nil where there are none. What is none becomes a
    /// problem in one line, and nothing else changes.
    public func attach(_ load: @MainActor () async throws -> Data?) async {
        if let pictureObstacle {
            problem = pictureObstacle
            return
        }
        isDecoding = true
        defer { isDecoding = false }
        do {
            guard let data = try await load() else {
                problem = "the picture cannot be read"
                return
            }
            let vision = model.bundle.manifest.vision
            let decoded = Task.detached(priority: .userInitiated) {
                let picture = try Picture(encoded: data, longestSide: Attachment.longestSide)
                // One that cannot be cut is refused here, and not with the question.
                _ = try vision?.views(height: picture.height, width: picture.width)
                return (picture, picture.thumbnail(longestSide: Attachment.thumbnailSide))
            }
            let (picture, thumbnail) = try await decoded.value
            problem = nil
            attachments.append(Attachment(id: numAttachments, picture: picture, thumbnail: thumbnail))
            numAttachments += 1
        } catch {
            problem = "\(error)"
        }
    }

    /// Takes a picture away again.
    public func detach(_ attachment: Attachment) {
        attachments.removeAll { $0.id == attachment.id }
    }

    /// Asks; the answer comes as the last line, piece by piece. Does nothing while one is coming.
    public func send(_ text: String) {
        if isAnswering || text.isEmpty {
            return
        }
        problem = nil
        let images = attachments
        attachments = []
        add(.user, text, images)
        let asked = lines.filter { !$0.text.isEmpty }.map {
            ChatMessage(role: $0.role, content: $0.text, images: $0.attachments.map(\.picture))
        }
        add(.assistant, "")
        isAnswering = true
        task = Task {
            await answer(text, asked)
            if problem != nil {
                // The question may be put again with them.
                attachments = images + attachments
            }
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
        attachments = []
        problem = nil
    }

    private func answer(_ text: String, _ asked: [ChatMessage]) async {
        do {
            let room = GenerationOptions(maxNewTokens: maxNewTokens, sampling: sampling)
            let images = asked.last?.images ?? []
            let generation = try await chats
                ? model.chat(conversation(asked), room) : model.generate(.text(text), room, images: images)
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

    private func add(_ role: ChatRole, _ text: String, _ attachments: [Attachment] = []) {
        lines.append(Line(id: (lines.last?.id ?? 0) + 1, role: role, text: text, attachments: attachments))
    }
}
