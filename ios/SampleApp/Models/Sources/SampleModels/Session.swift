import Foundation
import Lesonnx
import LesonnxScheduler
import LesonnxStore
import Observation

/// The bundle that is loaded, of which there is at most one: it takes most of the memory.
@MainActor @Observable public final class Session {
    public enum Phase: Equatable, Sendable {
        case empty, loading(String), ready(String), failed(String)
    }

    public private(set) var phase = Phase.empty
    public private(set) var conversation: Conversation?
    /// What the library says is worth a line.
    public private(set) var notes: [String] = []
    public private(set) var bundle: ModelBundle?
    /// The expert budget that the bundle was loaded with.
    public private(set) var expertBudgetBytes = 0
    /// The memory budget that it was loaded with; nil where only experts are bounded.
    public private(set) var memoryBudgetBytes: Int?
    public let meter = Meter()
    /// Whether bundles that are opened from here on draft, by what they bring for it. Drafts change no text but for rounding.
    public var drafts = true

    private var model: Model?
    #if canImport(Darwin)
    private var pressure: MemoryPressureSource?
    #endif

    public init() {}

    /// Loads a bundle in place of the one before; does nothing while one is being loaded. `expertBudgetBytes` nil: all experts. With a
    /// memory budget they get what it leaves, and give way while pictures are read; where it is too small, only experts are bounded.
    public func open(_ bundle: ModelBundle, expertBudgetBytes: Int?, memoryBudgetBytes: Int? = nil) async {
        if case .loading = phase {
            return
        }
        let name = bundle.directory.lastPathComponent
        phase = .loading(name)
        await free()
        do {
            var options = LoadOptions()
            options.expertBudgetBytes = expertBudgetBytes
            options.draft = drafts ? bundle.manifest.nearestDrafter : .none
            if memoryBudgetBytes != nil {
                options.memoryBudgetBytes = memoryBudgetBytes
                options.expertBudgetBytes = nil
            }
            let model: Model
            do {
                model = try await Model.load(bundle, options)
            } catch LesonnxError.budget where memoryBudgetBytes != nil {
                options.memoryBudgetBytes = nil
                options.expertBudgetBytes = expertBudgetBytes
                model = try await Model.load(bundle, options)
            }
            self.model = model
            self.memoryBudgetBytes = options.memoryBudgetBytes
            self.bundle = bundle
            self.expertBudgetBytes = await model.expertBudgetBytes
            notes = await model.notes
            conversation = Conversation(model, meter: meter)
            #if canImport(Darwin)
            pressure = MemoryPressureSource(model)
            #endif
            phase = .ready(name)
        } catch {
            phase = .failed("\(error)")
        }
    }

    /// Frees the bundle's memory.
    public func close() async {
        await free()
        phase = .empty
    }

    private func free() async {
        conversation?.stop()
        await conversation?.settle()
        conversation = nil
        #if canImport(Darwin)
        pressure = nil
        #endif
        await model?.close()
        model = nil
        bundle = nil
        memoryBudgetBytes = nil
        notes = []
        meter.reset()
    }

    /// Begins to count anew.
    public func resetMeter() async {
        await model?.resetTelemetry()
        meter.reset()
    }

    /// What the system says of memory where it comes as a call, and not by the source that is kept here.
    public func respond(to level: PressureLevel) async {
        _ = try? await model?.respond(to: level)
    }
}
