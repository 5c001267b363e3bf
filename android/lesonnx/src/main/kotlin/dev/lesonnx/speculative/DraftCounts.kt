package dev.lesonnx.speculative

/**
 * The drafts of a generation, by position: how many were verified, and how many of them were right. Immutable: a picture of one moment.
 *
 * @property drafted at j: the drafts that had a slot j
 * @property judged at j: those of which all slots before j were right, so that `accepted[j] / judged[j]` is the acceptance at j
 * @property accepted at j: those whose slot j was right
 * @property passes steps that verified drafts
 * @property draftMs what a drafter took that is not free
 */
data class DraftCounts(
    val drafted: List<Int> = List(MAX_DRAFT_TOKENS) { 0 },
    val judged: List<Int> = List(MAX_DRAFT_TOKENS) { 0 },
    val accepted: List<Int> = List(MAX_DRAFT_TOKENS) { 0 },
    val passes: Int = 0,
    val draftMs: Double = 0.0,
) {
    /** With one more pass, which verified [drafted] tokens, the first [accepted] of them right. */
    internal fun counting(drafted: Int, accepted: Int): DraftCounts = copy(
        drafted = this.drafted.mapIndexed { slot, count -> if (slot < drafted) count + 1 else count },
        judged = judged.mapIndexed { slot, count -> if (slot < drafted && slot <= accepted) count + 1 else count },
        accepted = this.accepted.mapIndexed { slot, count -> if (slot < minOf(drafted, accepted)) count + 1 else count },
        passes = passes + 1,
    )

    /** Of all drafted tokens that were verified this share stayed, 0 to 1; 0 before any. */
    val share: Double get() = drafted.sum().let { if (it == 0) 0.0 else accepted.sum().toDouble() / it }
}
