import LesonnxScheduler

// How a runner shares a memory budget between states and experts.
extension Runner {
    /// Bound the process: experts get what is left, less as caches grow. Throws `budget` if that is too little.
    ///
    /// Call once, with all sessions open and before the first step. `otherBytes`: what the process will take for something else and
    /// does not take yet.
    func boundMemory(_ memoryBudgetBytes: Int, expertBudgetBytes: Int?, otherBytes: Int = 0) throws {
        try warmUp()
        let chunk = prefillChunkTokens
        let numLayersRead = layerReader?.layerIdxs.count ?? 0
        let stepBytes = StepBuffers.bytes(bundle.manifest, rows: chunk, numLayersRead: numLayersRead)
        var held = 2 * stepBytes + chunk * model.vocabSize / 8 + states.workingBytes(rows: chunk)
        if takesDrafts {
            let rows = BundleManifest.rewindableTokens
            held += StepBuffers.bytes(bundle.manifest, rows: rows, numLayersRead: numLayersRead)
            held += rows * model.vocabSize * ElementType.float32.byteCount
        }
        memoryBound = MemoryBound(
            budgetBytes: memoryBudgetBytes, fixedBytes: Memory.currentBytes() + otherBytes + held + MemoryBound.spareBytes,
            expertBudgetBytes: expertBudgetBytes)
        try shareMemory(capacityTokens: states.capacity(for: 1))
    }

    /// Run every dense part once on nothing, so that all the weights it maps are counted as this process's.
    ///
    /// What it leaves in the states is written over by the first step.
    func warmUp() throws {
        try states.reserve(1)
        states.begin(rows: 1)
        let buffers = buffers(for: 1)
        try run(embed, place: nil, buffers)
        for (place, part) in segments.enumerated() {
            try run(part, place: place, buffers)
            if let mixer = mixers[place] {
                try run(mixer, place: place, buffers)
            }
        }
        for (place, part) in lookaheads.enumerated() {
            try run(part, place: place + 1, buffers)
        }
        _ = try runHead([0], buffers)
        for (rows, width) in twins?.widths ?? [:] {
            let buffers = self.buffers(for: rows)
            try width.begin(buffers.positionIds, states.totalSequenceLength)
            for (place, part) in segments.enumerated() {
                try runSegment(part, place: place, buffers, width)
            }
            if width.hasHead {
                _ = try runHead([0], buffers, width)
            }
        }
    }

    /// Give the experts what a capacity of attention caches leaves them.
    func shareMemory(capacityTokens: Int) throws {
        guard let bound = memoryBound else { return }
        let pictures = bound.pictureBytes > 0 ? ", \(bound.pictureUse) \(bound.pictureBytes)" : ""
        let stateBytes = states.bytes(at: capacityTokens) + (layerReader?.bytes(at: capacityTokens) ?? 0)
        let left = Int(
            Double(bound.budgetBytes - bound.fixedBytes - bound.pictureBytes - stateBytes) / loader.engine.memoryPerByte)
        let least = loader.keepsAll ? bundle.expertBytes : bundle.leastBudgetBytes
        if left < least {
            throw LesonnxError.budget(
                "the memory budget is \(bound.budgetBytes) bytes; runtime, dense parts and a prefill chunk may take "
                    + "\(bound.fixedBytes), attention caches of \(capacityTokens) tokens \(stateBytes)\(pictures), and the experts need "
                    + "at least \(least)")
        }
        try loader.pressure(min(left, bound.expertBudgetBytes ?? bundle.expertBytes))
    }

    /// Pictures take so many bytes from now on, and the experts what is left. Throws `budget` where that is too little; nothing changes
    /// then. Without a memory budget it does nothing.
    func make(room pictureBytes: Int, for use: String) throws {
        guard let before = memoryBound, before.pictureBytes != pictureBytes else { return }
        memoryBound?.pictureBytes = pictureBytes
        memoryBound?.pictureUse = use
        do {
            try shareMemory(capacityTokens: max(states.capacityTokens, states.capacity(for: 1)))
        } catch {
            memoryBound = before
            throw error
        }
    }

    /// What the user, or the system, grants the experts from the next step on; attention caches may leave them less. Throws
    /// `budget` where it is too small; nothing changes then.
    func grant(expertBudgetBytes: Int) throws {
        let bytes = min(expertBudgetBytes, bundle.expertBytes)
        if loader.keepsAll && bytes < bundle.expertBytes {
            throw LesonnxError.budget("schedule resident keeps all experts, which take \(bundle.expertBytes) bytes")
        }
        if memoryBound == nil {
            try loader.pressure(bytes)
            return
        }
        let before = memoryBound
        memoryBound?.expertBudgetBytes = bytes
        do {
            try shareMemory(capacityTokens: max(states.capacityTokens, states.capacity(for: 1)))
        } catch {
            memoryBound = before
            throw error
        }
    }
}

/// What the process may take, what it takes beside states and experts, and what the user grants the experts.
struct MemoryBound {
    /// What ONNX Runtime and Swift take beside what is counted.
    static let spareBytes = 48 << 20

    let budgetBytes: Int
    let fixedBytes: Int
    var expertBudgetBytes: Int?
    /// What pictures take now, and what for.
    var pictureBytes = 0
    var pictureUse = ""
}
