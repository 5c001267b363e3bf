package dev.lesonnx.store

import dev.lesonnx.BundleManifest

/**
 * What a device has, in bytes.
 *
 * @property memoryBytes all its memory.
 * @property availableBytes memory that this process could still get.
 * @property processBytes memory that it has.
 * @property reserveBytes memory that the runner keeps free for the virtual machine's heap: `Platform.heapGrowthBytes`.
 * @property storageBytes free storage.
 */
data class Device(
    val memoryBytes: Long,
    val availableBytes: Long,
    val processBytes: Long,
    val reserveBytes: Long,
    val storageBytes: Long,
)

/** How well a bundle fits a device. */
enum class Fit {
    /** All experts stay in memory. */
    WHOLE,

    /** At least one token's experts stay: the cache works. */
    CACHED,

    /** It runs, but nothing stays from one token to the next. */
    TIGHT,

    TOO_LITTLE_MEMORY,
    TOO_LITTLE_STORAGE,
}

/**
 * What a bundle needs, in bytes, counted as the runner counts.
 *
 * @property storage all files.
 * @property dense dense parts, which stay in memory.
 * @property buffers arrays of a prefill chunk, and what ONNX Runtime takes beside what is counted.
 * @property firstStates attention caches as they begin, for 512 tokens, and states of fixed shape.
 * @property stateOfToken attention caches of one more token.
 * @property leastBudget the least expert budget: the largest layer's experts of one token.
 * @property tokenDemand what one token needs of all layers.
 * @property experts all experts.
 */
data class Needs(
    val storage: Long,
    val dense: Long,
    val buffers: Long,
    val firstStates: Long,
    val stateOfToken: Long,
    val leastBudget: Long,
    val tokenDemand: Long,
    val experts: Long,
) {
    /** Everything but experts. */
    val fixed: Long get() = dense + buffers + firstStates

    /** The least memory it runs in, beside what the process has already. */
    val least: Long get() = fixed + leastBudget
}

/**
 * Whether a bundle fits: needs X, device has Y.
 *
 * @property memoryBudgetBytes what the whole process should be given on this device; a share that leaves others room.
 * @property expertBytes what of it the experts would get.
 */
data class FitCheck(val needs: Needs, val device: Device, val fit: Fit, val memoryBudgetBytes: Long, val expertBytes: Long) {
    /** The least memory that the whole process needs. */
    val leastMemoryBytes: Long get() = needs.least + device.processBytes + device.reserveBytes

    /** One line for a person. */
    val summary: String
        get() {
            val experts = "${formatBytes(expertBytes)} of ${formatBytes(needs.experts)} of experts"
            return when (fit) {
                Fit.WHOLE -> "Fits: all experts stay in memory"
                Fit.CACHED -> "Fits: $experts stay in memory"
                Fit.TIGHT -> "Runs, but slowly: memory for $experts, one token uses ${formatBytes(needs.tokenDemand)}"
                Fit.TOO_LITTLE_MEMORY ->
                    "Needs ${formatBytes(leastMemoryBytes)} of memory, this device gives ${formatBytes(memoryBudgetBytes)}"
                Fit.TOO_LITTLE_STORAGE ->
                    "Needs ${formatBytes(needs.storage)} of storage, this device has ${formatBytes(device.storageBytes)} free"
            }
        }

    companion object {
        /** Share of what the system could give that a process should take: `auto_budget_bytes` of `lesonnx/memory.py`. */
        const val MEMORY_SHARE = 0.7

        /**
         * Holds a bundle against a device. [isStored] where its files are on the device already.
         *
         * @param files sizes of the bundle's files by path.
         */
        fun of(manifest: BundleManifest, files: Map<String, Long>, device: Device, isStored: Boolean): FitCheck {
            val needs = needsOf(manifest, files)
            val budget = (MEMORY_SHARE * (device.availableBytes + device.processBytes)).toLong()
            val left = budget - device.processBytes - device.reserveBytes - needs.fixed
            val fit = when {
                !isStored && needs.storage > device.storageBytes -> Fit.TOO_LITTLE_STORAGE
                left < needs.leastBudget -> Fit.TOO_LITTLE_MEMORY
                left < minOf(needs.tokenDemand, needs.experts) -> Fit.TIGHT
                left < needs.experts -> Fit.CACHED
                else -> Fit.WHOLE
            }
            return FitCheck(needs, device, fit, budget, left.coerceIn(0, needs.experts))
        }

        /** The same of a list of files as `checksums.json` has it. */
        fun of(remote: RemoteBundle, device: Device): FitCheck =
            of(remote.manifest, remote.checksums.mapValues { (_, checksum) -> checksum.sizeBytes }, device, isStored = false)
    }
}
