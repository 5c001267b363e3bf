import Charts
import LesonnxScheduler
import SampleModels
import SwiftUI

/// How generation goes: speed, hits, bytes read and memory, token by token.
struct TelemetryView: View {
    @Environment(AppModel.self) private var app

    var body: some View {
        NavigationStack {
            Group {
                if app.session.conversation == nil {
                    NoBundleView(session: app.session)
                } else if app.session.meter.samples.isEmpty {
                    ContentUnavailableView(
                        "Nothing was generated yet", systemImage: "waveform.path.ecg", description: Text("Write something first."))
                } else {
                    MeterView(meter: app.session.meter)
                }
            }
            .navigationTitle("Telemetry")
            .toolbar {
                Button("Reset", systemImage: "arrow.counterclockwise") { Task { await app.session.resetMeter() } }
            }
        }
    }
}

private struct MeterView: View {
    let meter: Meter

    var body: some View {
        List {
            if let last = meter.last {
                Section {
                    LabeledContent("Tokens/s", value: last.tokensPerS, format: .number.precision(.fractionLength(1)))
                    LabeledContent("Hits", value: last.hitShare, format: .percent.precision(.fractionLength(0)))
                    LabeledContent("Late", value: last.lateShare, format: .percent.precision(.fractionLength(0)))
                    LabeledContent("Read a token", value: formatBytes(meter.readBytesPerToken))
                    LabeledContent("Memory", value: formatBytes(last.memoryBytes))
                    LabeledContent("Waiting in all", value: "\(Int(meter.telemetry.stallMs)) ms")
                    if let drafts = meter.drafts {
                        LabeledContent("Drafts accepted", value: "\(drafts.numAccepted) of \(drafts.numDrafted)")
                    }
                    LabeledContent("Predictions used", value: "\(meter.telemetry.lookaheadUsed) of \(meter.telemetry.lookaheadLoads)")
                }
            }
            graph("Tokens/s") { $0.tokensPerS }
            graph("Hits, %") { $0.hitShare * 100 }
            graph("Read a token, MB") { Double($0.readBytes) / 1e6 }
            graph("Memory, MB") { Double($0.memoryBytes) / 1e6 }
        }
    }

    private func graph(_ title: String, _ value: @escaping (Meter.Sample) -> Double) -> some View {
        Section(title) {
            Chart(meter.samples) { sample in
                LineMark(x: .value("Token", sample.id), y: .value(title, value(sample)))
            }
            .frame(height: 120)
        }
    }
}
