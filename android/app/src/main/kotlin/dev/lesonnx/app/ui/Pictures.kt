package dev.lesonnx.app.ui

import android.graphics.Bitmap
import android.graphics.Outline
import android.view.Gravity
import android.view.View
import android.view.ViewOutlineProvider
import android.widget.FrameLayout
import android.widget.ImageView
import android.widget.LinearLayout
import dev.lesonnx.app.model.ChatState
import dev.lesonnx.vision.Picture

/** A picture as a small square, [size] dp a side. */
fun Theme.thumbnail(picture: Picture, size: Int): ImageView = ImageView(context).apply {
    setImageBitmap(smaller(picture, dp(size)))
    scaleType = ImageView.ScaleType.CENTER_CROP
    contentDescription = "Picture of ${picture.width} by ${picture.height} pixels"
    layoutParams = LinearLayout.LayoutParams(dp(size), dp(size))
    clipToOutline = true
    val radius = dp(10).toFloat()
    outlineProvider = object : ViewOutlineProvider() {
        override fun getOutline(view: View, outline: Outline) = outline.setRoundRect(0, 0, view.width, view.height, radius)
    }
}

/** Every so many pixels of a picture, so that its shorter side has about [side]. */
private fun smaller(picture: Picture, side: Int): Bitmap {
    val step = maxOf(minOf(picture.height, picture.width) / side, 1)
    // A long strip is shown by its middle alone, so no more of it is taken.
    val height = minOf(maxOf(picture.height / step, 1), 4 * side)
    val width = minOf(maxOf(picture.width / step, 1), 4 * side)
    val top = (picture.height - height * step) / 2
    val left = (picture.width - width * step) / 2
    val colours = IntArray(height * width) { index ->
        val place = Picture.CHANNELS * ((top + index / width * step) * picture.width + left + index % width * step)
        val (red, green, blue) = List(Picture.CHANNELS) { picture.pixels[place + it].toInt() and 0xFF }
        (0xFF shl 24) or (red shl 16) or (green shl 8) or blue
    }
    return Bitmap.createBitmap(colours, width, height, Bitmap.Config.ARGB_8888)
}

/** The pictures that go with the next message, each with a button that takes it back, and what is wrong with one. */
class PictureTray(private val theme: Theme, private val remove: (Picture) -> Unit) {
    private val pictures = theme.row(gap = 8)
    private val opening = theme.quiet("Opening the picture …")
    private val problem = theme.column()
    private var shown: ChatState? = null

    val view: View = theme.column(problem, opening, pictures, gap = 6)

    fun render(state: ChatState) {
        val before = shown
        shown = state
        if (before?.pictures != state.pictures) pictures.show(state.pictures.map(::removable))
        if (before == null || before.problem != state.problem) problem.show(listOfNotNull(state.problem?.let { theme.notice(it, Tone.ERROR) }))
        opening.visibility = if (state.isAttaching) View.VISIBLE else View.GONE
        view.visibility = if (state.isAttaching || state.pictures.isNotEmpty() || state.problem != null) View.VISIBLE else View.GONE
    }

    private fun removable(picture: Picture): View = FrameLayout(theme.context).apply {
        addView(theme.thumbnail(picture, TRAY_PICTURE), FrameLayout.LayoutParams(theme.dp(TRAY_PICTURE), theme.dp(TRAY_PICTURE)))
        addView(
            theme.iconButton(Icon.CLEAR, "Remove the picture", theme.palette.text, theme.palette.surface) { remove(picture) },
            FrameLayout.LayoutParams(theme.dp(REMOVE), theme.dp(REMOVE), Gravity.TOP or Gravity.END),
        )
        layoutParams = narrow()
    }

    private companion object {
        /** In dp. */
        const val TRAY_PICTURE = 96
        const val REMOVE = 40
    }
}
