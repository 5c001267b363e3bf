package dev.lesonnx.speculative

import dev.lesonnx.Bundle
import dev.lesonnx.InputError
import dev.lesonnx.Platform
import java.nio.file.Path

/** The name of drafting nothing. */
const val NO_DRAFTER = "none"

/** The drafters by the names that [dev.lesonnx.LoadOptions.draft] takes, beside [NO_DRAFTER]. */
val DRAFTERS: List<String> = listOf("ngram", "draft-model", "dspark", "mtp")

/** [InputError] for a name that is none, and where a draft model is missing or given in vain. */
internal fun checkDrafter(name: String, draftModel: Path?) {
    if (name != NO_DRAFTER && name !in DRAFTERS) {
        throw InputError("drafter '$name' is not one of ${(listOf(NO_DRAFTER) + DRAFTERS).joinToString()}")
    }
    if (name == "draft-model" && draftModel == null) {
        throw InputError("drafter draft-model needs the bundle that drafts: give --draft-model BUNDLE")
    }
    if (name != "draft-model" && draftModel != null) {
        throw InputError("a draft model was given, but the drafter is $name: expected draft-model")
    }
}

/** The drafter of that name for a bundle; null for `none`. [InputError] where the bundle or the draft model lacks it. */
internal fun makeDrafter(
    name: String,
    bundle: Bundle,
    draftModel: Path?,
    platform: Platform,
    engine: String,
    numThreads: Int,
): Drafter? {
    checkDrafter(name, draftModel)
    return when (name) {
        "ngram" -> NgramDrafter()
        "draft-model" -> DraftModelDrafter(bundle, Bundle(checkNotNull(draftModel)), platform, engine, numThreads)
        "dspark" -> DSparkDrafter(bundle, platform, numThreads)
        NO_DRAFTER -> null
        else -> throw InputError("${bundle.directory}: this bundle has no $name drafter")
    }
}
