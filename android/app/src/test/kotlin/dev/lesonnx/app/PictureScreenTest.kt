package dev.lesonnx.app

import android.app.Activity
import android.content.Intent
import android.graphics.Bitmap
import android.graphics.BitmapFactory
import android.net.Uri
import android.provider.MediaStore
import dev.lesonnx.Bundle
import dev.lesonnx.ChatMessage
import dev.lesonnx.ChatRole
import dev.lesonnx.LoadOptions
import dev.lesonnx.Model
import dev.lesonnx.app.model.ChatModel
import dev.lesonnx.app.model.HostState
import dev.lesonnx.jvm.readPicture
import kotlinx.coroutines.runBlocking
import org.junit.Assert.assertArrayEquals
import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertNotNull
import org.junit.Assert.assertNull
import org.junit.Assert.assertTrue
import org.junit.Test
import org.robolectric.Shadows.shadowOf
import java.io.ByteArrayOutputStream
import java.io.File

/** Pictures of the gallery in a conversation, decoded by Android's own code and seen by the real library. */
class PictureScreenTest : ScreenTest() {
    private val question = "What is shown here?"

    private fun load(copy: (File) -> File, dark: Boolean = false) {
        copy(File(bundles, "bundle"))
        start(dark)
        waitFor("The least")
        click("Load")
        waitUntil("the model") { models.host.state.value is HostState.Ready }
        click("Chat")
    }

    /** Presses the button and lets the picker give [data]. */
    private fun pick(data: ByteArray, name: String) {
        val uri = Uri.parse("content://com.example.photos/$name")
        shadowOf(activity.contentResolver).registerInputStreamSupplier(uri) { data.inputStream() }
        pick(uri)
    }

    private fun pick(uri: Uri) {
        click("Add a picture")
        val asked = shadowOf(activity).nextStartedActivityForResult
        assertEquals(MediaStore.ACTION_PICK_IMAGES, asked.intent.action)
        assertEquals("image/*", asked.intent.type)
        shadowOf(activity).receiveResult(asked.intent, Activity.RESULT_OK, Intent().setData(uri))
        waitUntil("the picture") { !models.chat.state.value.isAttaching }
    }

    private fun waitForAnswer() = waitUntil("an answer") { !models.chat.state.value.isGenerating }

    @Test
    fun `a picture is picked, shown, taken back, picked again, and answered about`() {
        load(Fixtures::copyPictured)
        waitFor("Say something")
        pick(Fixtures.wide.readBytes(), "1")
        val expected = readPicture(Fixtures.wide.toPath())
        val picked = models.chat.state.value.pictures.single()
        assertEquals(expected.height to expected.width, picked.height to picked.width)
        assertArrayEquals(expected.pixels, picked.pixels)
        val label = "Picture of ${expected.width} by ${expected.height} pixels"
        assertNotNull(find(label))
        draw("chat-picture")
        click("Remove the picture")
        assertNull(find(label))
        assertTrue(models.chat.state.value.pictures.isEmpty())

        pick(Fixtures.wide.readBytes(), "2")
        type(question)
        click("Send")
        waitForAnswer()
        val messages = models.chat.state.value.messages
        assertEquals(expected.key, messages.first().pictures.single().key)
        assertTrue(models.chat.state.value.pictures.isEmpty())
        assertNotNull(find(label))
        val answer = runBlocking {
            Model.load(Bundle(File(bundles, "bundle").toPath()), Fixtures.platform, LoadOptions()).use { model ->
                model.chat(listOf(ChatMessage(ChatRole.USER, question, listOf(expected))), ChatModel.DEFAULT_OPTIONS).text()
            }
        }
        assertEquals(answer, messages.last().text)
        assertTrue(messages.last().note.orEmpty(), "pictures read in" in messages.last().note.orEmpty())

        // The conversation goes on with the picture in it, which is known by now.
        type("And what else?")
        click("Send")
        waitForAnswer()
        val second = models.chat.state.value.messages.last()
        assertFalse(second.note.orEmpty(), second.isError || "pictures read in" in second.note.orEmpty())
    }

    @Test
    fun `what is no picture is said, and a large one is decoded smaller`() {
        load(Fixtures::copyPictured, dark = true)
        pick("no picture".toByteArray(), "3")
        waitFor("not a picture that Android can decode, or a broken one")
        assertTrue(models.chat.state.value.pictures.isEmpty())
        draw("chat-picture-problem")
        pick("content://media/external/images/gone".let(Uri::parse))
        waitFor("the picture cannot be read: Unknown URI : content://media/external/images/gone")
        val large = ByteArrayOutputStream()
        val small = BitmapFactory.decodeFile(Fixtures.wide.path)
        Bitmap.createScaledBitmap(small, 3000, 2000, true).compress(Bitmap.CompressFormat.JPEG, 80, large)
        pick(large.toByteArray(), "4")
        val picked = models.chat.state.value.pictures.single()
        assertTrue("${picked.width} x ${picked.height}", picked.width * picked.height in 3_900_000..4_000_000)
        assertNull(models.chat.state.value.problem)
    }

    @Test
    fun `a bundle without eyes says so and takes none`() {
        load({ Fixtures.copySample(it) })
        val why = "this bundle has no eyes: it takes no pictures"
        assertTrue(texts().toString(), texts().any { "No pictures: $why." in it })
        assertFalse(checkNotNull(find("No pictures: $why")).isEnabled)
        assertNull(find("Add a picture"))
    }
}
