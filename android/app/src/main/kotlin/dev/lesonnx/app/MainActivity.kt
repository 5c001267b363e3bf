package dev.lesonnx.app

import android.app.Activity
import android.content.Intent
import android.graphics.ImageDecoder
import android.net.Uri
import android.os.Build
import android.os.Bundle
import android.provider.DocumentsContract
import android.provider.MediaStore
import android.view.View
import android.view.WindowInsets
import android.view.WindowInsetsController
import android.view.WindowManager
import android.widget.FrameLayout
import dev.lesonnx.android.readPicture
import dev.lesonnx.app.ui.BenchmarkScreen
import dev.lesonnx.app.ui.BundlesScreen
import dev.lesonnx.app.ui.ChatScreen
import dev.lesonnx.app.ui.NavigationBar
import dev.lesonnx.app.ui.Tab
import dev.lesonnx.app.ui.TelemetryScreen
import dev.lesonnx.app.ui.Theme
import dev.lesonnx.app.ui.column
import dev.lesonnx.app.ui.fill
import dev.lesonnx.store.ZipSource
import java.io.FileNotFoundException
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.SupervisorJob
import kotlinx.coroutines.cancel
import kotlinx.coroutines.delay
import kotlinx.coroutines.flow.combine
import kotlinx.coroutines.launch

/** The one activity: four screens and the bar that leads to them. Everything it shows is in the app's models. */
class MainActivity : Activity() {
    private val scope = CoroutineScope(SupervisorJob() + Dispatchers.Main.immediate)
    private val models get() = (application as LesonnxApp).models
    private lateinit var body: FrameLayout
    private lateinit var navigation: NavigationBar
    private lateinit var screens: Map<Tab, View>
    private var tab = Tab.BUNDLES

    override fun onCreate(savedInstanceState: Bundle?) {
        setTheme(if (Theme.isDark(this)) android.R.style.Theme_Material_NoActionBar else android.R.style.Theme_Material_Light_NoActionBar)
        super.onCreate(savedInstanceState)
        val theme = Theme(this)
        val bundles = BundlesScreen(theme, models.bundles, ::pickFolder, ::pickZip)
        val chat = ChatScreen(theme, models.chat, ::pickPicture) { show(Tab.BUNDLES) }
        val telemetry = TelemetryScreen(theme)
        val benchmark = BenchmarkScreen(theme, models.benchmark, ::shareText) { show(Tab.BUNDLES) }
        screens = mapOf(
            Tab.BUNDLES to bundles.view,
            Tab.CHAT to chat.view,
            Tab.TELEMETRY to telemetry.view,
            Tab.BENCHMARK to benchmark.view,
        )
        body = FrameLayout(this).apply { for (screen in screens.values) addView(screen) }
        navigation = NavigationBar(theme, ::show)
        val root = theme.column(body.fill(), navigation.view).apply { setBackgroundColor(theme.palette.background) }
        setContentView(root)
        keepClearOfBars(root, theme)
        show(savedInstanceState?.getString(TAB)?.let(Tab::valueOf) ?: Tab.BUNDLES)

        scope.launch { combine(models.bundles.state, models.host.state, ::Pair).collect { (state, host) -> bundles.render(state, host) } }
        scope.launch { combine(models.chat.state, models.host.state, ::Pair).collect { (state, host) -> chat.render(state, host) } }
        scope.launch {
            models.telemetry.state.collect { state ->
                telemetry.render(state)
                // Tokens may come faster than anyone can read; what came meanwhile is shown then.
                delay(FIGURES_MS)
            }
        }
        scope.launch {
            combine(models.benchmark.state, models.host.state, ::Pair).collect { (state, host) -> benchmark.render(state, host) }
        }
        scope.launch { models.bundles.state.collect { keepScreenOn(it.arrival != null) } }
        models.bundles.refresh()
    }

    override fun onStart() {
        super.onStart()
        models.foreground()
    }

    override fun onSaveInstanceState(outState: Bundle) {
        super.onSaveInstanceState(outState)
        outState.putString(TAB, tab.name)
    }

    override fun onDestroy() {
        scope.cancel()
        super.onDestroy()
    }

    @Deprecated("The framework's own way without a library; Android 13 has another one beside it")
    override fun onBackPressed() {
        @Suppress("DEPRECATION")
        if (tab == Tab.BUNDLES) super.onBackPressed() else show(Tab.BUNDLES)
    }

    private fun show(chosen: Tab) {
        tab = chosen
        for ((name, screen) in screens) screen.visibility = if (name == chosen) View.VISIBLE else View.GONE
        navigation.show(chosen)
    }

    // -- picking and sharing -------------------------------------------------------------------------------------------

    private fun pickFolder() = startActivityForResult(Intent(Intent.ACTION_OPEN_DOCUMENT_TREE), PICK_FOLDER)

    private fun pickZip() = startActivityForResult(
        Intent(Intent.ACTION_OPEN_DOCUMENT).addCategory(Intent.CATEGORY_OPENABLE).setType("application/zip"),
        PICK_ZIP,
    )

    /** The system's photo picker, which needs no permission; before Android 13 the picker of documents. */
    private fun pickPicture() {
        val photos = if (Build.VERSION.SDK_INT >= Build.VERSION_CODES.TIRAMISU) Intent(MediaStore.ACTION_PICK_IMAGES)
        else Intent(Intent.ACTION_OPEN_DOCUMENT).addCategory(Intent.CATEGORY_OPENABLE)
        startActivityForResult(photos.setType("image/*"), PICK_PICTURE)
    }

    override fun onActivityResult(requestCode: Int, resultCode: Int, data: Intent?) {
        val picked = data?.data
        if (resultCode != RESULT_OK || picked == null) return
        when (requestCode) {
            PICK_FOLDER -> importFolder(picked)
            PICK_ZIP -> importZip(picked)
            PICK_PICTURE -> contentResolver.let { resolver -> models.chat.attach { readPicture(ImageDecoder.createSource(resolver, picked)) } }
        }
    }

    private fun importFolder(tree: Uri) {
        val document = DocumentsContract.buildDocumentUriUsingTree(tree, DocumentsContract.getTreeDocumentId(tree))
        val name = DocumentTreeSource.nameOf(contentResolver, document) ?: "bundle"
        models.bundles.import(name, DocumentTreeSource(contentResolver, tree))
    }

    private fun importZip(zip: Uri) {
        val name = DocumentTreeSource.nameOf(contentResolver, zip) ?: "bundle"
        val resolver = contentResolver
        models.bundles.import(name, ZipSource { resolver.openInputStream(zip) ?: throw FileNotFoundException("$name: cannot be opened") })
    }

    private fun shareText(text: String) {
        val send = Intent(Intent.ACTION_SEND).setType("text/plain").putExtra(Intent.EXTRA_TEXT, text)
        startActivity(Intent.createChooser(send, null))
    }

    // -- the window ----------------------------------------------------------------------------------------------------

    private fun keepScreenOn(isOn: Boolean) {
        val flag = WindowManager.LayoutParams.FLAG_KEEP_SCREEN_ON
        if (isOn) window.addFlags(flag) else window.clearFlags(flag)
    }

    /** Draws behind the system's bars, as Android 15 has it, and keeps the content clear of them and of the keyboard. */
    @Suppress("DEPRECATION") // from Android 15 on these are as they are set here, before it they are not
    private fun keepClearOfBars(root: View, theme: Theme) {
        if (Build.VERSION.SDK_INT < Build.VERSION_CODES.R) return
        window.setDecorFitsSystemWindows(false)
        window.statusBarColor = 0
        window.navigationBarColor = theme.palette.surface
        if (!theme.palette.isDark) {
            val light = WindowInsetsController.APPEARANCE_LIGHT_STATUS_BARS or WindowInsetsController.APPEARANCE_LIGHT_NAVIGATION_BARS
            root.post { window.insetsController?.setSystemBarsAppearance(light, light) }
        }
        root.setOnApplyWindowInsetsListener { view, insets ->
            val bars = insets.getInsets(WindowInsets.Type.systemBars() or WindowInsets.Type.displayCutout() or WindowInsets.Type.ime())
            view.setPadding(bars.left, bars.top, bars.right, bars.bottom)
            WindowInsets.CONSUMED
        }
    }

    private companion object {
        const val TAB = "tab"
        const val FIGURES_MS = 100L
        const val PICK_FOLDER = 1
        const val PICK_ZIP = 2
        const val PICK_PICTURE = 3
    }
}
