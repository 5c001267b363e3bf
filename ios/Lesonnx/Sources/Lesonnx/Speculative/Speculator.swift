import LesonnxScheduler

/// Draft, price, verify: the tokens that come next, several at once where drafts are right, from one pass of the target over a token
/// and its drafts.
///
/// Owns the drafter and what was measured, which outlives a sequence; the runner is the caller's. One thread at a time.
final class Speculator {
    let runner: Runner
    let drafter: any Drafter
    private(set) var pricing: any LengthChoice
    private(set) var counts = DraftCounts()
    /// Prompt and output, the tokens that have run and the one before the next pass.
    private var sequence: [Int] = []
    private var draftSampler: DraftSampler?
    /// A draft that was not verified: its first token, held against the next one.
    private var unverified = Draft.none

    /// The drafter becomes the runner's layer reader where it reads layers.
    init(_ runner: Runner, _ drafter: any Drafter, pricing: any LengthChoice = Pricing()) {
        self.runner = runner
        self.drafter = drafter
        self.pricing = pricing
        runner.takesDrafts = true
        runner.layerReader = drafter as? any LayerReader
    }

    /// Free the drafter.
    func close() {
        runner.layerReader = nil
        drafter.close()
    }

    /// A generation from a prompt begins; the runner keeps `numKept` tokens of its sequence.
    func begin(_ prompt: [Int], numKept: Int, _ sampler: Sampler) {
        counts = DraftCounts()
        sequence = prompt
        draftSampler = DraftSampler(sampler)
        unverified = .none
        drafter.rewind(to: numKept)
    }

    /// The tokens after `token`, the latest one, which the target has not run: at least one, at most `most`.
    ///
    /// Ends behind one of `ends`. Afterwards the target has run `token` and the drafts among those that are given.
    func next(after token: Int, most: Int, ends: Set<Int>, _ sampler: inout Sampler) throws -> Verified {
        judgeUnverified(token)
        sequence.append(token)
        let (draft, draftUs) = try propose(ask(min(most - 1, drafter.maxTokens)), sampler)
        let (length, newBytes) = draft.tokenIds.isEmpty || !pricing.mayDraft ? (0, []) : choose(draft)
        return try run(token, draft, length, ends, &sampler, draftUs: draftUs, newBytes)
    }

    /// How many tokens to have drafted. What a pass would read is looked at where it pays to draft without reads.
    private func ask(_ room: Int) -> Int {
        let asked = pricing.ask(most: room, isFree: drafter.isFree, newBytes: [])
        if drafter.isFree || asked < 1 || !streams {
            return asked
        }
        return pricing.ask(most: room, isFree: false, newBytes: runner.loader.expectedNewBytes(rows: room + 1))
    }

    /// How many of a draft's tokens to verify, and what each row of that pass is expected to read.
    private func choose(_ draft: Draft) -> (length: Int, newBytes: [Int]) {
        func length(_ newBytes: [Int]) -> Int {
            pricing.choose(
                drafted: draft.tokenIds.count, confidence: draft.confidence, isFree: drafter.isFree,
                isDrawn: draft.probabilities != nil, newBytes: newBytes)
        }
        let without = length([])
        if without < 1 || !streams {
            return (without, [])
        }
        let newBytes = runner.loader.expectedNewBytes(rows: draft.tokenIds.count + 1)
        return (length(newBytes), newBytes)
    }

    private var streams: Bool { !runner.loader.keepsAll }

    /// A draft of at most `asked` tokens, and the microseconds that it took; nil where the drafter was not asked, or is free.
    private func propose(_ asked: Int, _ sampler: Sampler) throws -> (draft: Draft, us: Int?) {
        guard asked > 0, var drawing = draftSampler else { return (.none, nil) }
        defer { draftSampler = drawing }
        drawing.begin(as: sampler)
        if drafter.isFree {
            return (try drafter.propose(after: sequence, maxTokens: asked, &drawing), nil)
        }
        let began = secondsNow()
        let draft = try drafter.propose(after: sequence, maxTokens: asked, &drawing)
        let seconds = secondsNow() - began
        counts.draftMs += seconds * 1e3
        return (draft, microseconds(seconds))
    }

    /// One pass over the token and `length` drafts, and what it gives.
    private func run(
        _ token: Int, _ draft: Draft, _ length: Int, _ ends: Set<Int>, _ sampler: inout Sampler, draftUs: Int?, _ newBytes: [Int]
    ) throws -> Verified {
        if length > 0 {
            try runner.prepareDrafts(rows: length + 1)
        }
        let before = runner.loader.telemetry
        let began = secondsNow()
        let verified: Verified
        if length > 0 {
            verified = try self.verify(token, draft, length, ends, &sampler)
            // Behind an end token nothing was judged.
            let judged = min(length, verified.tokenIds.count)
            counts.count(drafted: judged, accepted: verified.accepted)
            pricing.judge(drafted: judged, accepted: verified.accepted, confidence: draft.confidence)
            sequence += verified.tokenIds.prefix(verified.accepted)
        } else {
            let logits = try runner.step([token], logitRows: [0])
            verified = Verified(tokenIds: [try sampler.sample(UnsafeBufferPointer(logits[Float.self]))], accepted: 0)
            unverified = draft
        }
        let passUs = microseconds(secondsNow() - began)
        let after = runner.loader.telemetry
        pricing.passed(
            rows: length + 1, passUs: passUs, stallUs: Int((after.stallMs - before.stallMs) * 1e3),
            readBytes: after.readBytes - before.readBytes, newBytes: newBytes, newTokens: verified.tokenIds.count,
            draftUs: draftUs)
        return verified
    }

    /// The pass itself; of its rows those stay that are part of the sequence, also where it fails in the end.
    private func verify(
        _ token: Int, _ draft: Draft, _ length: Int, _ ends: Set<Int>, _ sampler: inout Sampler
    ) throws -> Verified {
        let ids = [token] + draft.tokenIds.prefix(length)
        let logits = try runner.step(ids, logitRows: Array(ids.indices), numDrafts: length)
        do {
            let rows = UnsafeBufferPointer(logits[Float.self])
            let verified = try LesonnxScheduler.verify(draft, logits: rows, numRows: ids.count, &sampler, ends: ends)
            try runner.keep(rows: 1 + verified.accepted)
            return verified
        } catch {
            try runner.keep(rows: 1)
            throw error
        }
    }

    /// The token that came without drafts tells whether the draft's first one would have been right.
    private func judgeUnverified(_ token: Int) {
        if let first = unverified.tokenIds.first {
            pricing.judge(drafted: 1, accepted: first == token ? 1 : 0, confidence: unverified.confidence)
        }
        unverified = .none
    }

    private func microseconds(_ seconds: Double) -> Int { Int(seconds * 1e6) }
}
