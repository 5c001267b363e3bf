/// Who says a message.
public enum ChatRole: String, Equatable, Sendable, CaseIterable {
    case system, user, assistant
}

/// One message of a conversation.
public struct ChatMessage: Equatable, Sendable {
    public var role: ChatRole
    public var content: String
    /// Pictures before its text, of a user's message.
    public var images: [Picture]

    public init(role: ChatRole, content: String, images: [Picture] = []) {
        self.role = role
        self.content = content
        self.images = images
    }
}

/// A model's chat template as plain prefixes and suffixes.
///
/// It stands for conversations of an optional system message, then user and assistant messages in turns, a user's last. For these
/// it is exact, whatever their contents. A role that is not in `messages` cannot be used: without `assistant` a conversation is
/// one question.
public struct ChatFormat: Equatable, Sendable {
    public struct Turn: Equatable, Sendable {
        public let prefix: String
        public let suffix: String
    }

    public let start: String
    public let messages: [ChatRole: Turn]
    public let answer: String

    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        start = try record.required("start").string()
        var messages: [ChatRole: Turn] = [:]
        let turns = try record.required("messages")
        for (key, turn) in try turns.dictionary({ (turn) throws(LesonnxError) in try Turn(turn) }) {
            guard let role = ChatRole(rawValue: key) else {
                throw turns.wrong("roles among \(ChatRole.allCases.map(\.rawValue).joined(separator: ", "))")
            }
            messages[role] = turn
        }
        if messages[.user] == nil {
            throw turns.wrong("the role user among the messages")
        }
        self.messages = messages
        answer = try record.required("answer").string()
        try record.end()
    }

    /// The prompt of a conversation, to be tokenized as one text, without special tokens added.
    ///
    /// Throws `input` for a role that the format does not have.
    public func join(_ conversation: [ChatMessage]) throws(LesonnxError) -> String {
        var text = start
        for message in conversation {
            guard let turn = messages[message.role] else {
                let roles = messages.keys.map(\.rawValue).sorted().joined(separator: ", ")
                throw .input("a message has the role \(message.role.rawValue), the bundle's chat format has \(roles)")
            }
            text += turn.prefix + message.content + turn.suffix
        }
        return text + answer
    }
}

extension ChatFormat.Turn {
    init(_ field: Field) throws(LesonnxError) {
        var record = try Record(field)
        prefix = try record.required("prefix").string()
        suffix = try record.required("suffix").string()
        try record.end()
    }
}
