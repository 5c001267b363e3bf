import SampleModels
import SwiftUI

@main
struct SampleApp: App {
    @State private var start = Result {
        try AppModel(folder: URL.applicationSupportDirectory.appending(path: "Bundles"))
    }

    var body: some Scene {
        WindowGroup {
            switch start {
            case .success(let app):
                RootView().environment(app)
            case .failure(let error):
                ContentUnavailableView(
                    "No place for bundles", systemImage: "externaldrive.badge.xmark", description: Text(verbatim: "\(error)"))
            }
        }
    }
}

struct RootView: View {
    @Environment(AppModel.self) private var app
    @State private var tab = Tab.bundles

    enum Tab {
        case bundles, chat, telemetry, benchmark
    }

    var body: some View {
        TabView(selection: $tab) {
            BundlesView(onOpen: { tab = .chat })
                .tabItem { Label("Bundles", systemImage: "shippingbox") }
                .tag(Tab.bundles)
            ChatView()
                .tabItem { Label(talks, systemImage: "text.bubble") }
                .tag(Tab.chat)
            TelemetryView()
                .tabItem { Label("Telemetry", systemImage: "waveform.path.ecg") }
                .tag(Tab.telemetry)
            BenchmarkView()
                .tabItem { Label("Benchmark", systemImage: "gauge.with.dots.needle.67percent") }
                .tag(Tab.benchmark)
        }
        .tint(.indigo)
    }

    private var talks: String {
        app.session.conversation?.chats == false ? "Complete" : "Chat"
    }
}

/// What a screen shows that needs a bundle, while there is none.
struct NoBundleView: View {
    let session: Session

    var body: some View {
        switch session.phase {
        case .loading(let name):
            ProgressView { Text("Loading \(name)") }
        case .failed(let why):
            ContentUnavailableView(
                "It could not be loaded", systemImage: "exclamationmark.triangle", description: Text(verbatim: why))
        case .empty, .ready:
            ContentUnavailableView(
                "No bundle is loaded", systemImage: "shippingbox", description: Text("Choose one under Bundles."))
        }
    }
}
