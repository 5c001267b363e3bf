import LesonnxScheduler
import SampleModels
import SwiftUI

/// A conversation with the bundle, or texts that it goes on with where it has no chat format.
struct ChatView: View {
    @Environment(AppModel.self) private var app

    var body: some View {
        NavigationStack {
            if let conversation = app.session.conversation {
                ConversationView(conversation: conversation, notes: app.session.notes)
                    .navigationTitle(app.session.bundle?.directory.lastPathComponent ?? "")
                    .navigationBarTitleDisplayMode(.inline)
                    .toolbar {
                        Button("New", systemImage: "square.and.pencil") { Task { await conversation.reset() } }
                    }
            } else {
                NoBundleView(session: app.session)
            }
        }
    }
}

private struct ConversationView: View {
    let conversation: Conversation
    let notes: [String]
    @State private var draft = ""

    var body: some View {
        ScrollViewReader { scroll in
            ScrollView {
                LazyVStack(alignment: .leading, spacing: 12) {
                    ForEach(notes, id: \.self) { note in
                        Text(note).font(.footnote).foregroundStyle(.secondary)
                    }
                    ForEach(conversation.lines) { line in
                        LineView(line: line, isComing: conversation.isAnswering && line.id == conversation.lines.last?.id)
                            .id(line.id)
                    }
                    if let problem = conversation.problem {
                        ProblemLabel(text: problem)
                    }
                }
                .padding()
            }
            .onChange(of: conversation.lines.last?.text) {
                if let last = conversation.lines.last {
                    scroll.scrollTo(last.id, anchor: .bottom)
                }
            }
        }
        .overlay {
            if conversation.lines.isEmpty {
                ContentUnavailableView(
                    conversation.chats ? "Ask something" : "Begin a text", systemImage: "text.bubble",
                    description: Text(conversation.chats ? "" : "This bundle has no chat format: it goes on with what you write."))
            }
        }
        .safeAreaInset(edge: .bottom) { input }
    }

    private var input: some View {
        HStack(alignment: .bottom) {
            TextField(conversation.chats ? "Message" : "Text", text: $draft, axis: .vertical)
                .lineLimit(1...6)
                .textFieldStyle(.roundedBorder)
            if conversation.isAnswering {
                Button("Stop", systemImage: "stop.circle.fill") { conversation.stop() }
            } else {
                Button("Send", systemImage: "arrow.up.circle.fill") {
                    conversation.send(draft)
                    draft = ""
                }
                .disabled(draft.isEmpty)
            }
        }
        .labelStyle(.iconOnly)
        .font(.title2)
        .padding(.horizontal)
        .padding(.vertical, 8)
        .background(.bar)
    }
}

private struct LineView: View {
    let line: Conversation.Line
    let isComing: Bool

    var body: some View {
        let isMine = line.role == .user
        VStack(alignment: isMine ? .trailing : .leading, spacing: 4) {
            if line.text.isEmpty && isComing {
                ProgressView()
            } else {
                Text(verbatim: line.text)
                    .textSelection(.enabled)
                    .padding(10)
                    .background(isMine ? Color.accentColor.opacity(0.15) : Color.secondary.opacity(0.12))
                    .clipShape(RoundedRectangle(cornerRadius: 14))
            }
            if let remark = line.remark {
                Text(remark).font(.caption).foregroundStyle(.secondary)
            }
        }
        .frame(maxWidth: .infinity, alignment: isMine ? .trailing : .leading)
    }
}
