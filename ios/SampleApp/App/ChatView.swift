import LesonnxScheduler
import PhotosUI
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
    @State private var picked: [PhotosPickerItem] = []

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
                    description: Text(conversation.introduction))
            }
        }
        .safeAreaInset(edge: .bottom) { input }
    }

    private var input: some View {
        VStack(alignment: .leading) {
            if !conversation.attachments.isEmpty || conversation.isDecoding {
                attachments
            }
            line
        }
        .padding(.horizontal)
        .padding(.vertical, 8)
        .background(.bar)
        .onChange(of: picked) {
            let items = picked
            if items.isEmpty { return }
            picked = []
            Task {
                for item in items {
                    await conversation.attach { try await item.loadTransferable(type: Data.self) }
                }
            }
        }
    }

    private var attachments: some View {
        ScrollView(.horizontal) {
            HStack {
                ForEach(conversation.attachments) { attachment in
                    ThumbnailView(attachment: attachment)
                        .overlay(alignment: .topTrailing) {
                            Button("Remove the picture", systemImage: "xmark.circle.fill") { conversation.detach(attachment) }
                                .labelStyle(.iconOnly)
                        }
                }
                if conversation.isDecoding {
                    ProgressView()
                }
            }
        }
    }

    private var line: some View {
        HStack(alignment: .bottom) {
            PhotosPicker(selection: $picked, matching: .images) { Label("Add a picture", systemImage: "photo.badge.plus") }
                .disabled(conversation.pictureObstacle != nil || conversation.isAnswering)
                .help(conversation.pictureObstacle ?? "Add a picture")
                .accessibilityHint(conversation.pictureObstacle ?? "")
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
                .disabled(draft.isEmpty || conversation.isDecoding)
            }
        }
        .labelStyle(.iconOnly)
        .font(.title2)
    }
}

private struct LineView: View {
    let line: Conversation.Line
    let isComing: Bool

    var body: some View {
        let isMine = line.role == .user
        VStack(alignment: isMine ? .trailing : .leading, spacing: 4) {
            if !line.attachments.isEmpty {
                HStack {
                    ForEach(line.attachments) { ThumbnailView(attachment: $0) }
                }
            }
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
