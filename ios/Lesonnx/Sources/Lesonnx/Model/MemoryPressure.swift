import Foundation
import LesonnxScheduler

/// How short of memory the system is.
public enum PressureLevel: Equatable, Sendable {
    case normal, warning, critical
}

extension Model {
    /// Give experts up as the system runs short of memory: half of them at a warning, all but what one token needs when it is
    /// critical, and take the first budget again when it is over. Returns the budget then in force.
    ///
    /// Where all experts must stay (schedule resident), nothing changes.
    @discardableResult
    public func respond(to level: PressureLevel) throws -> Int {
        if options.schedule == .resident {
            return expertBudgetBytes
        }
        let most = mostExpertBytes
        let least = min(max(bundle.tokenDemandBytes, bundle.leastBudgetBytes), most)
        switch level {
        case .normal: try grant(expertBudgetBytes: most)
        case .warning: try grant(expertBudgetBytes: max(least, expertBudgetBytes / 2))
        case .critical: try grant(expertBudgetBytes: least)
        }
        return expertBudgetBytes
    }
}

#if canImport(Darwin)
/// Tells a model of the system's memory pressure for as long as it is kept.
public final class MemoryPressureSource: Sendable {
    // A dispatch source may be cancelled from any thread.
    private nonisolated(unsafe) let source: any DispatchSourceMemoryPressure

    public init(_ model: Model) {
        nonisolated(unsafe) let source = DispatchSource.makeMemoryPressureSource(
            eventMask: [.normal, .warning, .critical], queue: .global())
        self.source = source
        // The source lets go of its handler when it is cancelled.
        source.setEventHandler { [weak model] in
            guard let model else { return }
            let event = source.data
            let level: PressureLevel = event.contains(.critical) ? .critical : event.contains(.warning) ? .warning : .normal
            // A budget that is too small changes nothing, and there is no one to tell.
            Task { try? await model.respond(to: level) }
        }
        source.activate()
    }

    deinit { source.cancel() }
}
#endif
