import LesonnxScheduler
import LesonnxStore
import SampleModels
import SwiftUI
import UniformTypeIdentifiers

/// Bundles: those on the device, and ways to get one.
struct BundlesView: View {
    @Environment(AppModel.self) private var app
    @State private var isPicking = false
    @State private var address = ""
    let onOpen: @MainActor () -> Void

    var body: some View {
        NavigationStack {
            List {
                if let work = app.shelf.work {
                    Section { WorkRow(work: work) { app.shelf.cancel() } }
                }
                if let problem = app.shelf.problem {
                    Section { ProblemLabel(text: problem) }
                }
                Section("On this device") {
                    if app.shelf.rows.isEmpty {
                        Text("None yet.").foregroundStyle(.secondary)
                    }
                    ForEach(app.shelf.rows) { row in
                        BundleRow(row: row, isLoaded: app.session.phase == .ready(row.name)) { open(row) }
                    }
                    .onDelete { places in remove(places.map { app.shelf.rows[$0].name }) }
                }
                getSection
                if !app.shelf.partialNames.isEmpty {
                    partialSection
                }
            }
            .navigationTitle("Bundles")
            .fileImporter(isPresented: $isPicking, allowedContentTypes: [.folder]) { result in
                switch result {
                case .success(let folder): app.shelf.importBundle(from: folder)
                case .failure(let error): app.shelf.problem = error.localizedDescription
                }
            }
            .task { await app.shelf.refresh() }
        }
    }

    private var getSection: some View {
        Section("Get one") {
            if let sample = Self.embeddedSample {
                Button {
                    app.shelf.importBundle(from: sample)
                } label: {
                    Label("\(ModelSpec.title), \(formatBytes(ModelSpec.downloadBytes)), in this app", systemImage: "gift")
                }
            }
            Button {
                isPicking = true
            } label: {
                Label("Import a folder", systemImage: "folder")
            }
            TextField("https://…/bundle", text: $address)
                .textContentType(.URL)
                .keyboardType(.URL)
                .textInputAutocapitalization(.never)
                .autocorrectionDisabled()
            Button {
                app.shelf.fetch(address)
            } label: {
                Label("Download", systemImage: "arrow.down.circle")
            }
            .disabled(address.isEmpty)
        }
        .disabled(app.shelf.work != nil)
    }

    private var partialSection: some View {
        Section {
            ForEach(app.shelf.partialNames, id: \.self) { name in
                Label(name, systemImage: "pause.circle").foregroundStyle(.secondary)
            }
            .onDelete { places in remove(places.map { app.shelf.partialNames[$0] }) }
        } header: {
            Text("Not complete")
        } footer: {
            Text("Download from the same address again to go on.")
        }
        .disabled(app.shelf.work != nil)
    }

    /// The sample bundle, where it was put into the app (see docs/ios.md).
    private static var embeddedSample: URL? {
        Bundle.main.url(forResource: "sample-int4", withExtension: nil, subdirectory: "Samples")
    }

    private func open(_ row: Shelf.Row) {
        onOpen()
        Task { await app.open(row) }
    }

    private func remove(_ names: [String]) {
        Task {
            for name in names {
                await app.remove(name)
            }
        }
    }
}

private struct BundleRow: View {
    let row: Shelf.Row
    let isLoaded: Bool
    let open: @MainActor () -> Void

    var body: some View {
        Button(action: open) {
            HStack {
                VStack(alignment: .leading, spacing: 4) {
                    Text(row.name).font(.headline).foregroundStyle(.primary)
                    Text(row.summary).font(.subheadline).foregroundStyle(.secondary)
                    if let fit = row.fit {
                        Label(fit.summary, systemImage: fit.isFitting ? "checkmark.circle" : "xmark.octagon")
                            .font(.footnote)
                            .foregroundStyle(fit.isFitting ? .green : .red)
                    }
                }
                Spacer()
                if isLoaded {
                    Image(systemName: "checkmark").foregroundStyle(.tint)
                }
            }
        }
        .disabled(row.fit?.isFitting != true)
    }
}

private struct WorkRow: View {
    let work: Shelf.Work
    let cancel: @MainActor () -> Void

    var body: some View {
        HStack {
            switch work {
            case .importing(let name, let done):
                ProgressView { Text("Importing \(name): \(formatBytes(done)) checked") }
            case .fetching(let name, let done, let total) where total > 0:
                ProgressView(value: Double(done), total: Double(total)) {
                    Text("Fetching \(name): \(formatBytes(done)) of \(formatBytes(total))")
                }
            case .fetching(let name, _, _):
                ProgressView { Text("Asking for \(name)") }
            }
            Button("Stop", role: .cancel, action: cancel).buttonStyle(.bordered)
        }
    }
}

struct ProblemLabel: View {
    let text: String

    var body: some View {
        Label { Text(verbatim: text) } icon: { Image(systemName: "exclamationmark.triangle") }
            .font(.footnote)
            .foregroundStyle(.red)
    }
}
