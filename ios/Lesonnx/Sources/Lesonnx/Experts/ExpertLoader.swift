import Foundation
import LesonnxScheduler

/// Gives fixed-point router scores [T,E] of the next MoE layer from what is known; `ready` [T,k], flat, says which rows of
/// `expert_out` are written.
typealias Prediction = @Sendable (_ ready: [Bool]) throws -> [Int32]

/// Carries the scheduler's actions out with threads that read, one that predicts, and the caller's, which computes.
///
/// `runLayer` and the other methods belong to the thread that computes. The scheduler is called under one lock, by that thread
/// and by a reading thread that has finished a load, so that the next read starts at once even while a dense part computes.
///
/// Unchecked: what changes is under the lock, but for what is said to be the computing thread's alone.
final class ExpertLoader: @unchecked Sendable {
    let engine: any ExpertEngine
    let usesLookahead: Bool
    let keepsAll: Bool
    let layers: [LayerShape]
    /// Each layer's first expert.
    let first: [Int]
    private let experts: [Expert]
    private let monitor = Monitor()

    // Under the lock.
    private(set) var scheduler: Scheduler
    private var loads: [Load] = []
    private var batches: [[Int]] = []
    private var failure: LesonnxError?
    private var question: Question?
    private var problem: (any Error)?
    private var numUnanswered = 0
    private var numThreads = 0
    private var isClosed = false
    private var counted = Telemetry()
    private var before = Counters()
    private(set) var expertBudgetBytes: Int

    private struct Load {
        let expert: Int
        let slab: Int
        let offsetBytes: Int
    }

    private struct Question {
        let layer: Int
        let predict: Prediction
        let ready: [Bool]
    }

    init(
        _ bundle: ModelBundle, _ engine: any ExpertEngine, _ config: SchedulerConfig, budgetBytes: Int, numLoaders: Int
    ) throws {
        self.engine = engine
        scheduler = try Scheduler(layers: bundle.manifest.layerShapes, budgetBytes: budgetBytes, config: config)
        layers = scheduler.layers
        first = scheduler.first
        experts = bundle.experts
        usesLookahead = config.lookahead
        keepsAll = config.resident
        expertBudgetBytes = budgetBytes
        try engine.resize(scheduler.slabs().map(\.lengthBytes))
        for number in 0..<numLoaders {
            start("loader \(number)") { loader in loader.readNext() }
        }
        if usesLookahead {
            start("lookahead") { loader in loader.answerNext() }
        }
    }

    /// A thread that carries out `next` until there is nothing more. It keeps the loader alive; `close` ends it.
    private func start(_ name: String, _ next: @escaping @Sendable (ExpertLoader) -> Bool) {
        monitor.withLock { numThreads += 1 }
        let thread = Thread { [self] in
            nameThread(name)
            while next(self) {}
            monitor.withLock {
                numThreads -= 1
                monitor.broadcast(.progress)
            }
        }
        thread.qualityOfService = .userInitiated
        thread.start()
    }

    /// End the threads once their reads have, then forget all experts; again does nothing. Nothing else may be called after it.
    func close() {
        monitor.withLock {
            isClosed = true
            loads.removeAll()
            monitor.broadcast(.load)
            monitor.broadcast(.question)
            while numThreads > 0 {
                monitor.wait(for: .progress)
            }
            failure = failure ?? .failure("the model is closed")
        }
        engine.close()
    }

    // MARK: the computing thread

    /// A step of that many rows begins, the last `numDrafts` of which may be rejected.
    func beginStep(rows: Int, numDrafts: Int = 0) throws {
        try monitor.withLock {
            if let failure {
                throw failure
            }
            carryOut(try scheduler.beginStep(rows: rows, drafts: numDrafts))
        }
    }

    /// For each of the next step's rows the bytes that it is expected to add to what must be loaded.
    func expectedNewBytes(rows: Int) -> [Int] {
        monitor.withLock { scheduler.expectedNewBytes(rows: rows) }
    }

    /// Of the step's rows these stay; what only rejected drafts touched is no use.
    func accept(rows: [Int]) throws {
        try monitor.withLock { carryOut(try scheduler.accept(rows: rows)) }
    }

    /// Load and compute what MoE layer number `place` requires. Throws `load` where an expert cannot be read.
    ///
    /// `beforeExperts` runs while the first loads are under way: what makes the experts' input of a layer whose router has spoken
    /// before.
    /// A layer that is broken off leaves experts half loaded: nothing runs after it.
    func runLayer(
        _ place: Int, _ work: LayerWork, _ prediction: Prediction?, beforeExperts: () throws -> Void
    ) throws {
        do {
            try carryLayerOut(place, work, prediction, beforeExperts)
        } catch {
            monitor.withLock { failure = failure ?? .failure("a step was broken off; load the bundle again") }
            throw error
        }
    }

    /// The next layer is predicted twice: before any expert has run, so that reading starts early, and again when those in memory
    /// have, which sees better. A thread of its own does that, while this one computes.
    private func carryLayerOut(
        _ place: Int, _ work: LayerWork, _ prediction: Prediction?, _ beforeExperts: () throws -> Void
    ) throws {
        let began = secondsNow()
        try awaitPredictions()
        let answered = secondsNow()
        try monitor.withLock {
            carryOut(try scheduler.route(layer: place, expertIds: work.topkIds))
            counted.lookaheadMs += (answered - began) * 1e3
            counted.scheduleMs += (secondsNow() - answered) * 1e3
        }
        let routed = secondsNow()
        try beforeExperts()
        note(denseSeconds: secondsNow() - routed)
        var left = work.numUsed + (layers[place].sharedCostBytes > 0 ? 1 : 0)
        var ready = [Bool](repeating: false, count: work.expertOut.shape[0] * work.expertOut.shape[1])
        if let prediction {
            foresee(place + 1, prediction, ready)
        }
        var isSharpened = prediction == nil
        while left > 0 {
            let batch = try nextBatch()
            let began = secondsNow()
            let group = batch.map { experts[$0] }
            try engine.compute(group, work)
            let computed = secondsNow()
            try monitor.withLock {
                carryOut(try scheduler.computed(batch))
                counted.expertMs += (computed - began) * 1e3
                counted.scheduleMs += (secondsNow() - computed) * 1e3
            }
            left -= batch.count
            if !isSharpened, let prediction {
                isSharpened = true
                for row in group.flatMap({ work.rows(of: $0) }) {
                    ready[Int(row)] = true
                }
                foresee(place + 1, prediction, ready)
            }
        }
        try monitor.withLock { carryOut(try scheduler.endLayer()) }
    }

    /// Have the layer predicted by the thread for it, while this one goes on computing. A question that has not been begun when
    /// the next comes need not be answered: the later one knows more.
    private func foresee(_ place: Int, _ prediction: @escaping Prediction, _ ready: [Bool]) {
        monitor.withLock {
            if question == nil {
                numUnanswered += 1
            }
            question = Question(layer: place, predict: prediction, ready: ready)
            monitor.signal(.question)
        }
    }

    /// Wait for what was asked: a prediction may not come after its layer's router has spoken.
    private func awaitPredictions() throws {
        try monitor.withLock {
            while numUnanswered > 0 {
                monitor.wait(for: .progress)
            }
            if let problem {
                throw problem
            }
        }
    }

    /// What is to be computed next; waits for reads where nothing is.
    private func nextBatch() throws -> [Int] {
        try monitor.withLock {
            if batches.isEmpty {
                let began = secondsNow()
                while batches.isEmpty && failure == nil {
                    monitor.wait(for: .progress)
                }
                counted.stallMs += (secondsNow() - began) * 1e3
            }
            if let failure {
                throw failure
            }
            return batches.removeFirst()
        }
    }

    /// Another expert budget, between two steps. Throws `budget` where it is too small; nothing changes then.
    func pressure(_ expertBudgetBytes: Int) throws {
        try monitor.withLock {
            carryOut(try scheduler.pressure(budgetBytes: expertBudgetBytes))
            while scheduler.committedBytes() > expertBudgetBytes && failure == nil {
                monitor.wait(for: .progress)
            }
            self.expertBudgetBytes = expertBudgetBytes
            try engine.resize(scheduler.slabs().map(\.lengthBytes))
        }
    }

    func note(denseSeconds: Double) {
        monitor.withLock { counted.denseMs += denseSeconds * 1e3 }
    }

    /// Counts and times since the last reset. Any thread may ask.
    var telemetry: Telemetry {
        monitor.withLock {
            var telemetry = counted
            let counters = scheduler.counters
            telemetry.hits = counters.hits - before.hits
            telemetry.late = counters.late - before.late
            telemetry.misses = counters.misses - before.misses
            telemetry.lookaheadLoads = counters.lookaheadLoads - before.lookaheadLoads
            telemetry.lookaheadUsed = counters.lookaheadUsed - before.lookaheadUsed
            telemetry.lookaheadWasted = counters.lookaheadWasted - before.lookaheadWasted
            return telemetry
        }
    }

    /// Begin to count anew.
    func resetTelemetry() {
        monitor.withLock {
            counted = Telemetry()
            before = scheduler.counters
        }
    }

    // MARK: both

    /// Hand actions on; called with the lock held.
    private func carryOut(_ actions: [Action]) {
        for action in actions {
            switch action {
            case .load(let expert, _, let slab, let offsetBytes):
                loads.append(Load(expert: expert, slab: slab, offsetBytes: offsetBytes))
                monitor.signal(.load)
            case .evict(let expert):
                engine.evict(experts[expert])
            case .compute(let batch):
                batches.append(batch)
                monitor.broadcast(.progress)
            case .promote, .cancel:
                break
            }
        }
    }

    // MARK: the reading threads

    /// Read one expert; false at the end.
    private func readNext() -> Bool {
        let next: Load? = monitor.withLock {
            while loads.isEmpty && !isClosed {
                monitor.wait(for: .load)
            }
            return isClosed ? nil : loads.removeFirst()
        }
        guard let load = next else { return false }
        let expert = experts[load.expert]
        let began = secondsNow()
        let outcome = Result { try engine.load(expert, slab: load.slab, offsetBytes: load.offsetBytes) }
        let seconds = secondsNow() - began
        monitor.withLock {
            do {
                switch outcome {
                case .success(let numBytes):
                    counted.loads += 1
                    counted.readBytes += numBytes
                    counted.readMs += seconds * 1e3
                    carryOut(try scheduler.loaded(load.expert, readUs: Int(seconds * 1e6)))
                case .failure:
                    carryOut(try scheduler.loadFailed(load.expert))
                }
            } catch {
                failure = .load("\(expert) cannot be loaded: \(reason(outcome) ?? "\(error)")")
            }
            monitor.broadcast(.progress)
        }
        return true
    }

    private func reason(_ outcome: Result<Int, any Error>) -> String? {
        if case .failure(let error) = outcome {
            return "\(error)"
        }
        return nil
    }

    // MARK: the predicting thread

    /// Answer one question; false at the end.
    ///
    /// What it reads may be half written: rows of experts that are not `ready` are left out, and a shared expert's only makes the
    /// prediction a little better or worse. Nothing but loading depends on it.
    private func answerNext() -> Bool {
        let next: Question? = monitor.withLock {
            while question == nil && !isClosed {
                monitor.wait(for: .question)
            }
            if isClosed {
                numUnanswered = 0
                return nil
            }
            return question.take()
        }
        guard let asked = next else { return false }
        let answer = Result { try asked.predict(asked.ready) }
        monitor.withLock {
            do {
                carryOut(try scheduler.predict(layer: asked.layer, scores: answer.get()))
            } catch {
                problem = problem ?? error
            }
            numUnanswered -= 1
            monitor.broadcast(.progress)
        }
        return true
    }
}

extension Optional {
    /// What is there, leaving nothing.
    fileprivate mutating func take() -> Wrapped? {
        defer { self = nil }
        return self
    }
}
