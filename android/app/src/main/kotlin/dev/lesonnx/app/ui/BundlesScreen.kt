package dev.lesonnx.app.ui

import android.app.AlertDialog
import android.text.InputType
import android.view.View
import android.view.inputmethod.EditorInfo
import android.widget.LinearLayout
import dev.lesonnx.app.model.ArrivalState
import dev.lesonnx.app.model.BundleItem
import dev.lesonnx.app.model.BundlesModel
import dev.lesonnx.app.model.BundlesState
import dev.lesonnx.app.model.HostState
import dev.lesonnx.app.model.LookState
import dev.lesonnx.app.model.MemoryChoice
import dev.lesonnx.store.Fit
import dev.lesonnx.store.FitCheck
import dev.lesonnx.store.PausedDownload
import dev.lesonnx.store.formatBytes

/** Bundles on the device, and the ways that new ones come. [pickFolder] and [pickZip] open the system's picker. */
class BundlesScreen(
    private val theme: Theme,
    private val model: BundlesModel,
    private val pickFolder: () -> Unit,
    private val pickZip: () -> Unit,
) {
    private val problem = theme.column()
    private val arrival = theme.column()
    private val bundles = theme.column(gap = 12)
    private val memory = theme.column(gap = 8)
    private val address = theme.field("https://example.org/qwen.bundle").apply {
        inputType = InputType.TYPE_CLASS_TEXT or InputType.TYPE_TEXT_VARIATION_URI
        imeOptions = EditorInfo.IME_ACTION_GO
        setSingleLine()
        contentDescription = "Address of a bundle"
        setOnEditorActionListener { _, _, _ ->
            model.look(text.toString())
            true
        }
    }
    private val look = theme.column()
    private val scroll = theme.scrolling(
        theme.column(problem, arrival, bundles, memory, adding(), gap = 16).padded(theme, 16, 4).apply {
            setPadding(paddingLeft, paddingTop, paddingRight, theme.dp(24))
        },
    )
    private var arriving: ArrivalCard? = null
    private var shown: Pair<BundlesState, HostState>? = null

    val view: View = theme.column(
        theme.header("Bundles", theme.quiet("Models on this device")),
        scroll.fill(),
    )

    private fun adding(): LinearLayout = theme.card(
        theme.text("Add a bundle", Type.HEADING),
        theme.quiet("A bundle is the folder that “lesonnx export” writes, or a zip of it."),
        theme.row(
            theme.button("Folder", Icon.FOLDER, onClick = pickFolder).share(),
            theme.button("Zip", Icon.ARCHIVE, onClick = pickZip).share(),
            gap = 10,
        ),
        theme.quiet("Or fetch it from a web server"),
        theme.row(address.share(), theme.button("Look") { model.look(address.text.toString()) }, gap = 10),
        look,
        gap = 12,
    )

    fun render(state: BundlesState, host: HostState) {
        val before = shown
        shown = state to host
        if (before?.first?.problem != state.problem || before?.second != host) showProblem(state, host)
        showArrival(state.arrival)
        if (before == null || before.first.look != state.look || before.first.arrival != state.arrival) {
            look.show(listOfNotNull(state.look?.let { lookCard(it, state.arrival == null) }))
            if (state.look?.fit != null) scroll.post { scroll.scrollTo(0, scroll.getChildAt(0).height) }
        }
        if (before == null || before.first.bundles != state.bundles || before.first.paused != state.paused || before.second != host) {
            bundles.show(cards(state, host))
        }
        if (before?.first?.memory != state.memory || before.first.bundles != state.bundles) showMemory(state)
    }

    private fun showProblem(state: BundlesState, host: HostState) {
        val text = state.problem ?: (host as? HostState.Failed)?.let { "${it.name}: ${it.message}" }
        problem.show(listOfNotNull(text?.let { theme.notice(it, Tone.ERROR) }))
    }

    private fun cards(state: BundlesState, host: HostState): List<View> {
        val items = state.bundles ?: return listOf(theme.quiet("Looking for bundles …").padded(theme, 4, 24))
        val all = items.map { card(it, host) } + state.paused.map(::pausedCard)
        return all.ifEmpty {
            listOf(theme.emptyState(Icon.BUNDLES, "No bundle yet", "Pick one that you copied to this phone, or fetch one from a server."))
        }
    }

    private fun card(item: BundleItem, host: HostState): View {
        val stored = item.stored
        val isLoaded = host is HostState.Ready && host.name == stored.name
        val isLoading = host is HostState.Loading && host.name == stored.name
        val facts = stored.bundle?.manifest?.model
        val about = facts?.let { "${it.modelType} · ${count(it.numParameters)} parameters, ${count(it.numActiveParameters)} active" }
        val chip = when {
            isLoaded -> theme.chip("Loaded", Tone.ACCENT)
            else -> fitChip(item.fit)
        }
        val open = theme.button(
            if (isLoading) "Loading …" else if (isLoaded) "Load again" else "Load",
            isMain = !isLoaded,
        ) { model.open(item) }
        open.enabled(model.canOpen(item) && host !is HostState.Loading && host !is HostState.Measuring)
        return theme.card(
            theme.row(theme.text(stored.name, Type.HEADING).share(), chip, gap = 8),
            theme.quiet(about ?: "Cannot be opened"),
            verdict(item),
            theme.row(
                theme.quiet("${formatBytes(stored.sizeBytes)} on this device").share(),
                theme.iconButton(Icon.DELETE, "Delete ${stored.name}") { confirmDelete(item) },
                open,
                gap = 6,
            ),
        )
    }

    private fun verdict(item: BundleItem): View = when (val fit = item.fit) {
        null -> theme.notice(item.stored.problem.orEmpty(), Tone.ERROR)
        else -> theme.text(fit.summary, Type.SMALL, theme.color(toneOf(fit.fit)))
    }

    private fun pausedCard(paused: PausedDownload): View = theme.card(
        theme.row(theme.text(paused.name, Type.HEADING).share(), theme.chip("Paused", Tone.WARNING), gap = 8),
        theme.quiet("${formatBytes(paused.haveBytes)} have come from ${paused.url}"),
        theme.row(
            theme.button("Give up", tone = Tone.ERROR) { model.discard(paused) }.share(),
            theme.button("Go on", Icon.DOWNLOAD, isMain = true) { model.resume(paused) }.share(),
            gap = 10,
        ),
    )

    /** The card stays while its figures change: a new one would lose the finger on its button. */
    private fun showArrival(state: ArrivalState?) {
        if (arriving?.name != state?.name) {
            arriving = state?.let { ArrivalCard(it.name, it.isDownload) }
            arrival.show(listOfNotNull(arriving?.view))
        }
        if (state != null) arriving?.show(state)
    }

    /** A bundle on its way in. */
    private inner class ArrivalCard(val name: String, isDownload: Boolean) {
        private val bar = ShareBar(theme)
        private val figures = theme.quiet("")
        val view: View = theme.card(
            theme.row(
                theme.text(name, Type.HEADING).share(),
                theme.chip(if (isDownload) "Downloading" else "Copying", Tone.ACCENT),
                gap = 8,
            ),
            bar,
            theme.row(figures.share(), theme.button(if (isDownload) "Pause" else "Cancel") { model.cancelArrival() }),
        )

        fun show(state: ArrivalState) {
            val total = state.totalBytes
            bar.visibility = if (total == null) View.GONE else View.VISIBLE
            if (total != null && total > 0) bar.show(state.doneBytes.toFloat() / total)
            val done = formatBytes(state.doneBytes)
            figures.text = if (total == null) "$done copied" else "$done of ${formatBytes(total)}"
        }
    }

    private fun lookCard(state: LookState, canDownload: Boolean): View {
        val remote = state.remote
        val fit = state.fit
        if (remote == null || fit == null) return theme.quiet("Asking the server …")
        val facts = remote.manifest.model
        val needs = fit.needs
        val device = fit.device
        val storageTone = if (fit.fit == Fit.TOO_LITTLE_STORAGE) Tone.ERROR else Tone.GOOD
        val memoryTone = if (fit.fit == Fit.TOO_LITTLE_MEMORY) Tone.ERROR else Tone.GOOD
        val download = theme.button("Download ${formatBytes(remote.totalBytes)}", Icon.DOWNLOAD, isMain = true) { model.download() }
        download.enabled(canDownload && fit.fit != Fit.TOO_LITTLE_STORAGE)
        return theme.column(
            theme.row(theme.text("Does it fit?", Type.LABEL).share(), fitChip(fit), gap = 8),
            theme.fact("Model", "${facts.modelType}, ${count(facts.numParameters)} parameters"),
            theme.fact("Storage", "needs ${formatBytes(needs.storage)}, has ${formatBytes(device.storageBytes)}", storageTone),
            theme.fact("Memory, at least", "needs ${formatBytes(fit.leastMemoryBytes)}, gives ${formatBytes(fit.memoryBudgetBytes)}", memoryTone),
            theme.fact("One token's experts", formatBytes(needs.tokenDemand)),
            theme.fact("All experts", formatBytes(needs.experts)),
            theme.fact("Conversation", "${formatBytes(needs.stateOfToken * 1000)} per 1000 tokens"),
            theme.text(fit.summary, Type.SMALL, theme.color(toneOf(fit.fit))),
            theme.row(theme.button("Not now") { model.forgetLook() }, download.share(), gap = 10),
            gap = 10,
        ).apply {
            background = theme.rounded(theme.palette.background, 12)
            padded(theme, 14, 14)
        }
    }

    private fun showMemory(state: BundlesState) {
        val choices = MemoryChoice.entries
        memory.show(
            if (state.bundles.isNullOrEmpty()) emptyList()
            else listOf(
                theme.quiet("Memory for experts, from the next load on"),
                theme.choice(choices.map { it.title }, choices.indexOf(state.memory)) { model.chooseMemory(choices[it]) },
            ),
        )
    }

    private fun fitChip(fit: FitCheck?): View = when (fit?.fit) {
        null -> theme.chip("Broken", Tone.ERROR)
        Fit.WHOLE, Fit.CACHED -> theme.chip("Fits", Tone.GOOD)
        Fit.TIGHT -> theme.chip("Tight", Tone.WARNING)
        Fit.TOO_LITTLE_MEMORY, Fit.TOO_LITTLE_STORAGE -> theme.chip("Does not fit", Tone.ERROR)
    }

    private fun toneOf(fit: Fit): Tone = when (fit) {
        Fit.WHOLE, Fit.CACHED -> Tone.GOOD
        Fit.TIGHT -> Tone.WARNING
        Fit.TOO_LITTLE_MEMORY, Fit.TOO_LITTLE_STORAGE -> Tone.ERROR
    }

    private fun confirmDelete(item: BundleItem) {
        AlertDialog.Builder(theme.context)
            .setTitle("Delete ${item.stored.name}?")
            .setMessage("Its ${formatBytes(item.stored.sizeBytes)} are removed from this device.")
            .setPositiveButton("Delete") { _, _ -> model.delete(item) }
            .setNegativeButton("Keep", null)
            .show()
    }
}
