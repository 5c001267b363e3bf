package dev.lesonnx.app

import android.app.ActivityManager
import android.content.Context
import android.graphics.Bitmap
import android.graphics.Canvas
import android.os.Looper
import android.view.View
import android.view.ViewGroup
import android.widget.EditText
import android.widget.TextView
import dev.lesonnx.BpeTokenizer
import dev.lesonnx.Bundle
import dev.lesonnx.DirectReader
import dev.lesonnx.Platform
import dev.lesonnx.Tokenizer
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.launch
import org.junit.After
import org.junit.Assert.assertTrue
import org.junit.runner.RunWith
import org.robolectric.Robolectric
import org.robolectric.RuntimeEnvironment
import org.robolectric.Shadows.shadowOf
import org.robolectric.android.controller.ActivityController
import org.robolectric.annotation.Config
import org.robolectric.annotation.GraphicsMode
import java.io.File
import java.nio.ByteBuffer
import java.nio.file.Path
import java.time.Duration
import java.util.concurrent.TimeUnit
import java.util.concurrent.locks.LockSupport
import java.util.concurrent.locks.ReentrantLock
import kotlin.concurrent.withLock

/** The app on this machine: the runtime is the JVM's, all else is as on a phone. */
class AppOnJvm : LesonnxApp() {
    /** Flash, which a test can hold. */
    val gate = ReadGate()

    override fun platform(): Platform = GatedPlatform(Fixtures.platform, gate)

    /** A phone of 12 GB, half of it free. */
    override fun onCreate() {
        val memory = ActivityManager.MemoryInfo().apply {
            totalMem = 12L shl 30
            availMem = 6L shl 30
            threshold = 300L shl 20
        }
        shadowOf(getSystemService(Context.ACTIVITY_SERVICE) as ActivityManager).setMemoryInfo(memory)
        super.onCreate()
    }
}

/** Lets reads of experts pass, or only so many of them. Thread-safe. */
class ReadGate {
    private var left = Int.MAX_VALUE
    private val lock = ReentrantLock()
    private val opened = lock.newCondition()

    /** After [reads] more the next one waits for [open]. */
    fun limit(reads: Int) = lock.withLock { left = reads }

    fun open() = lock.withLock {
        left = Int.MAX_VALUE
        opened.signalAll()
    }

    fun pass() = lock.withLock {
        while (left == 0) opened.await()
        if (left != Int.MAX_VALUE) left -= 1
    }
}

private class GatedPlatform(private val platform: Platform, private val gate: ReadGate) : Platform by platform {
    /** As on Android, where the heap is small. */
    override fun heapGrowthBytes(): Long = 64L shl 20

    /** Android's own tokenizer. */
    override fun openTokenizer(bundle: Bundle): Tokenizer? =
        bundle.manifest.tokenizer?.jsonPath?.let { BpeTokenizer.read(bundle.file(it)) }

    override fun openReader(path: Path): DirectReader {
        val reader = platform.openReader(path)
        return object : DirectReader by reader {
            override fun read(target: ByteBuffer, offsetBytes: Long): Int {
                gate.pass()
                return reader.read(target, offsetBytes)
            }
        }
    }
}

/** Drives the real activity by what a person sees and touches, and draws it. */
@RunWith(LesonnxRunner::class)
@Config(sdk = [34], application = AppOnJvm::class, qualifiers = "w411dp-h891dp-xhdpi")
@GraphicsMode(GraphicsMode.Mode.NATIVE)
abstract class ScreenTest {
    private var controller: ActivityController<MainActivity>? = null
    protected val app get() = RuntimeEnvironment.getApplication() as AppOnJvm
    protected val models get() = app.models
    protected val bundles get() = File(app.filesDir, "bundles")
    protected val activity: MainActivity get() = controller!!.get()

    /** Opens the app. */
    protected fun start(dark: Boolean = false) {
        if (dark) RuntimeEnvironment.setQualifiers("+night")
        controller = Robolectric.buildActivity(MainActivity::class.java).setup()
        idle()
    }

    @After
    fun closeAll() {
        app.gate.open()
        // What uses the model ends on the main thread, which must not wait meanwhile.
        val closing = CoroutineScope(Dispatchers.Default).launch { app.models.host.close() }
        waitUntil("the model is freed") { closing.isCompleted }
        controller?.close()
    }

    /** Lets the main thread do what is due, and a moment pass for it. */
    protected fun idle() = shadowOf(Looper.getMainLooper()).idleFor(Duration.ofMillis(20))

    /** Lets the main thread work until [isDone]; fails after a minute. */
    protected fun waitUntil(what: String, isDone: () -> Boolean) {
        val end = System.nanoTime() + TimeUnit.SECONDS.toNanos(60)
        while (true) {
            idle()
            if (isDone()) return
            assertTrue("waited a minute for: $what; on the screen: ${controller?.let { texts() }}", System.nanoTime() < end)
            LockSupport.parkNanos(1_000_000)
        }
    }

    protected fun waitFor(text: String) = waitUntil("'$text'") { find(text) != null }

    /** The view that shows or is called [text]; null where none is seen. */
    protected fun find(text: String): View? = seen().firstOrNull {
        (it is TextView && it.text.toString() == text) || it.contentDescription?.toString() == text
    }

    /** Presses what shows or is called [text], once it can be pressed: what takes a moment is grey meanwhile. */
    protected fun click(text: String) {
        if (find(text) == null) throw AssertionError("no '$text' on the screen: ${texts()}")
        fun target() = find(text)?.let { view -> generateSequence(view) { it.parent as? View }.firstOrNull(View::isClickable) }
        waitUntil("'$text' to be pressed") { target()?.isEnabled == true }
        target()?.performClick()
        idle()
    }

    protected fun type(text: String) {
        (seen().first { it is EditText } as EditText).apply { setText(text) }.setSelection(text.length)
        idle()
    }

    /** All texts that are seen. */
    protected fun texts(): List<String> = seen().filterIsInstance<TextView>().map { it.text.toString() }.filter { it.isNotEmpty() }

    private fun seen(): List<View> = all(activity.window.decorView).filter { it.isShown }.toList()

    private fun all(view: View): Sequence<View> = sequence {
        yield(view)
        if (view is ViewGroup) for (place in 0 until view.childCount) yieldAll(all(view.getChildAt(place)))
    }

    /** Draws the screen as it is to `android-NAME.png`. */
    protected fun draw(name: String) {
        idle()
        val view = activity.window.decorView
        val bitmap = Bitmap.createBitmap(view.width, view.height, Bitmap.Config.ARGB_8888)
        view.draw(Canvas(bitmap))
        val colours = HashSet<Int>()
        for (y in 0 until bitmap.height step 7) for (x in 0 until bitmap.width step 7) colours += bitmap.getPixel(x, y)
        assertTrue("$name is drawn in ${colours.size} colours, expected text and surfaces", colours.size > 20)
        val file = File(System.getProperty("screens"), "android-$name.png")
        file.parentFile?.mkdirs()
        file.outputStream().use { bitmap.compress(Bitmap.CompressFormat.PNG, 100, it) }
    }
}
