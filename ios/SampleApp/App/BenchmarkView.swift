import Charts
import LesonnxScheduler
import SampleModels
import SwiftUI

/// The schedules one after another, on this device.
struct BenchmarkView: View {
    @Environment(AppModel.self) private var app

    var body: some View {
        @Bindable var app = app
        @Bindable var benchmark = app.benchmark
        NavigationStack {
            Group {
                if app.session.bundle == nil && !benchmark.isRunning && benchmark.rows.isEmpty {
                    NoBundleView(session: app.session)
                } else {
                    List {
                        Section {
                            Stepper("Tokens: \(benchmark.numTokens)", value: $benchmark.numTokens, in: 8...256, step: 8)
                            Picker("Experts in memory", selection: $app.benchmarkShare) {
                                Text("a tenth").tag(0.1)
                                Text("a quarter").tag(0.25)
                                Text("half").tag(0.5)
                                Text("all").tag(1.0)
                            }
                        }
                        .disabled(benchmark.isRunning)
                        if !benchmark.rows.isEmpty {
                            ResultsView(benchmark: benchmark)
                        }
                    }
                }
            }
            .navigationTitle("Benchmark")
            .toolbar {
                if benchmark.isRunning {
                    Button("Stop", systemImage: "stop.fill") { benchmark.cancel() }
                } else {
                    Button("Run", systemImage: "play.fill") { Task { await app.runBenchmark() } }
                        .disabled(app.session.bundle == nil)
                }
            }
        }
    }
}

private struct ResultsView: View {
    let benchmark: Benchmark

    var body: some View {
        Section {
            Chart(benchmark.rows) { row in
                BarMark(x: .value("Tokens/s", row.result?.tokensPerS ?? 0), y: .value("Schedule", row.title))
            }
            .frame(height: 180)
        } footer: {
            if let speedup = benchmark.speedup {
                Text("The fastest is \(speedup, format: .number.precision(.fractionLength(1))) times the first.")
            }
        }
        Section {
            ForEach(benchmark.rows) { row in
                VStack(alignment: .leading, spacing: 4) {
                    HStack {
                        Text(row.title).font(.headline)
                        Spacer()
                        if let result = row.result {
                            Text(result.tokensPerS, format: .number.precision(.fractionLength(2))).monospacedDigit()
                        } else if benchmark.isRunning && row.problem == nil {
                            ProgressView()
                        }
                    }
                    if let result = row.result {
                        Text(summary(result)).font(.footnote).foregroundStyle(.secondary)
                    }
                    if let problem = row.problem {
                        ProblemLabel(text: problem)
                    }
                }
            }
        }
    }

    private func summary(_ result: Benchmark.Result) -> String {
        let hits = Int((result.hitShare * 100).rounded())
        let other = result.drafts == nil ? "ANOTHER TEXT" : "another rounding"
        let text = result.isSameText ? "same text" : other
        let drafts = result.drafts.map { ", \($0.numAccepted) of \($0.numDrafted) drafts accepted" } ?? ""
        return "\(hits) % hits\(drafts), \(formatBytes(result.readBytesPerToken)) a token, \(formatBytes(result.memoryBytes)) of memory, \(text)"
    }
}
