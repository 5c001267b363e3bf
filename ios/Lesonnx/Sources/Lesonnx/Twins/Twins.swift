import Foundation
import LesonnxScheduler

/// The twins of a bundle that can be used here, by width of steps; none of them where the bundle or the machine has none. Owned by a
/// runner, which uses it from one thread at a time.
final class Twins {
    /// A line each, why some are not used.
    private(set) var notes: [String] = []
    private(set) var widths: [Int: TwinWidth] = [:]

    /// `cache`: a folder of the host's for what providers compile. Throws `input` where twins are wanted on the CPU provider and the
    /// bundle has none, `bundle` where ONNX Runtime does not take what goes with them.
    init(
        _ bundle: ModelBundle, _ environment: OrtEnvironment, _ mode: Acceleration, target: Target = .here, cache: URL? = nil
    ) throws {
        guard let record = bundle.manifest.twins, mode != .off else {
            if mode == .cpu {
                let path = bundle.directory.path(percentEncoded: false)
                throw LesonnxError.input("\(path): has no twins; export with --accelerate dense")
            }
            return
        }
        let providers = try mode == .cpu ? [.cpu] : installed(record, environment, target, cache)
        if providers.isEmpty {
            return
        }
        let positions = record.positions.inputs.first { $0.name == "position_ids" }
        if let positions, (positions.shape.count == 3) != (bundle.manifest.positionRows == 3) {
            notes.append("twins take one position a token and the model has three: dense parts run without them")
            return
        }
        func path(_ relative: String) throws -> String { try bundle.file(relative).path(percentEncoded: false) }
        let data = try ExternalData(file: bundle.file(record.data))
        var others: [String: Session] = [:]
        for relative in Set(record.selections.map(\.path) + [record.positions.path]) {
            others[relative] = try environment.session(path(relative), on: .cpu, data)
        }
        for rows in Set(record.parts.map(\.rows)).sorted() {
            for provider in providers {
                do {
                    var opened: [String: Session] = [:]
                    for twin in record.parts where twin.rows == rows {
                        opened[twin.part] = try environment.session(path(twin.path), on: provider, data)
                    }
                    widths[rows] = TwinWidth(bundle.manifest, record, rows: rows, twins: opened, others: others)
                    break
                } catch LesonnxError.bundle(let why) {
                    notes.append("steps of \(rows) tokens do not use \(provider.name): \(why)")
                }
            }
        }
    }

    /// Those of the target's lists that are there, the best first.
    private func installed(
        _ record: TwinsRecord, _ environment: OrtEnvironment, _ target: Target, _ cache: URL?
    ) throws -> [Provider] {
        var listed: [Provider] = []
        for provider in record.parts.flatMap({ $0.providers[target] ?? [] }) where !listed.contains(where: { $0.name == provider.name }) {
            listed.append(provider)
        }
        let (found, missing) = Provider.installed(
            listed, available: try environment.availableProviders(), cache: cache?.path(percentEncoded: false))
        notes += missing.map { "\($0): dense parts run without it" }
        return found
    }

    /// What attention caches must hold from the start; 0 without twins.
    var capacityTokens: Int { widths.values.first?.capacityTokens ?? 0 }

    /// The twins that a step of that many rows may use: its width is theirs, and caches have their capacity.
    func forStep(rows: Int, _ states: LayerStates) -> TwinWidth? {
        widths[rows].flatMap { $0.capacityTokens == states.capacityTokens ? $0 : nil }
    }
}
