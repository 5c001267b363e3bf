import Foundation
import Lesonnx
import Observation

/// How generation goes, token by token; what the telemetry panel draws.
@MainActor @Observable public final class Meter {
    public struct Sample: Identifiable, Equatable, Sendable {
        public var id: Int
        /// Over the last tokens.
        public var tokensPerS: Double
        /// Of what was required since the last reset: in memory, or on its way.
        public var hitShare: Double
        public var lateShare: Double
        /// Read for this token.
        public var readBytes: Int
        public var memoryBytes: Int
    }

    /// As many as a graph has room for.
    public static let samplesLimit = 240
    /// Tokens that a speed is taken over.
    private static let window = 8

    public private(set) var samples: [Sample] = []
    public private(set) var telemetry = Telemetry()
    public private(set) var numTokens = 0
    /// Of the latest answer; nil where nothing could be drafted.
    public private(set) var drafts: DraftCounts?

    private var times: [Double] = []

    public init() {}

    public var last: Sample? { samples.last }

    public var readBytesPerToken: Int { numTokens > 0 ? telemetry.readBytes / numTokens : 0 }

    public func reset() {
        samples = []
        telemetry = Telemetry()
        numTokens = 0
        drafts = nil
        times = []
    }

    /// Between two generations time passes that is nobody's.
    public func pause() { times = [] }

    /// A token came at that time, with these totals since the bundle was loaded.
    public func add(_ now: Telemetry, drafts: DraftCounts? = nil, atSeconds seconds: Double, memoryBytes: Int) {
        self.drafts = drafts
        times.append(seconds)
        times = times.suffix(Self.window + 1)
        let span = seconds - times[0]
        let required = Double(max(1, now.hits + now.late + now.misses))
        numTokens += 1
        samples.append(
            Sample(
                id: numTokens, tokensPerS: span > 0 ? Double(times.count - 1) / span : 0,
                hitShare: Double(now.hits) / required, lateShare: Double(now.late) / required,
                readBytes: now.readBytes - telemetry.readBytes, memoryBytes: memoryBytes))
        if samples.count > Self.samplesLimit {
            samples.removeFirst(samples.count - Self.samplesLimit)
        }
        telemetry = now
    }
}
