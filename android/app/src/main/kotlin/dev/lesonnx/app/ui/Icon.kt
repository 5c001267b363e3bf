package dev.lesonnx.app.ui

import android.graphics.Canvas
import android.graphics.ColorFilter
import android.graphics.Paint
import android.graphics.Path
import android.graphics.PixelFormat
import android.graphics.RectF
import android.graphics.drawable.Drawable

/** The app's icons: strokes on a grid of 24 by 24. */
enum class Icon(internal val draw: Pen.() -> Unit) {
    BUNDLES({
        path(true, 12f, 3.5f, 20.5f, 8f, 12f, 12.5f, 3.5f, 8f)
        path(false, 3.5f, 12f, 12f, 16.5f, 20.5f, 12f)
        path(false, 3.5f, 16f, 12f, 20.5f, 20.5f, 16f)
    }),
    CHAT({
        curve {
            moveTo(7f, 4.5f)
            lineTo(17f, 4.5f)
            quadTo(20.5f, 4.5f, 20.5f, 8f)
            lineTo(20.5f, 13f)
            quadTo(20.5f, 16.5f, 17f, 16.5f)
            lineTo(12f, 16.5f)
            lineTo(7f, 20.5f)
            lineTo(7f, 16.5f)
            quadTo(3.5f, 16.5f, 3.5f, 13f)
            lineTo(3.5f, 8f)
            quadTo(3.5f, 4.5f, 7f, 4.5f)
            close()
        }
    }),
    PULSE({ path(false, 2.5f, 12.5f, 7f, 12.5f, 10f, 5f, 14f, 19.5f, 17f, 12.5f, 21.5f, 12.5f) }),
    BARS({
        path(false, 4f, 6f, 12f, 6f)
        path(false, 4f, 12f, 20f, 12f)
        path(false, 4f, 18f, 16f, 18f)
    }),
    FOLDER({ path(true, 3.5f, 6f, 9.5f, 6f, 11.5f, 8.5f, 20.5f, 8.5f, 20.5f, 18.5f, 3.5f, 18.5f) }),
    ARCHIVE({
        path(true, 4f, 9f, 4f, 19.5f, 20f, 19.5f, 20f, 9f)
        path(true, 3f, 4.5f, 21f, 4.5f, 21f, 9f, 3f, 9f)
        path(false, 10f, 13f, 14f, 13f)
    }),
    DOWNLOAD({
        path(false, 12f, 4f, 12f, 15f)
        path(false, 7f, 10.5f, 12f, 15.5f, 17f, 10.5f)
        path(false, 4.5f, 20f, 19.5f, 20f)
    }),
    DELETE({
        path(false, 4.5f, 7f, 19.5f, 7f)
        path(false, 9f, 7f, 9f, 4f, 15f, 4f, 15f, 7f)
        path(false, 6.5f, 7f, 7.5f, 20f, 16.5f, 20f, 17.5f, 7f)
    }),
    SEND({
        path(false, 12f, 19.5f, 12f, 5f)
        path(false, 5.5f, 11f, 12f, 4.5f, 18.5f, 11f)
    }),
    PICTURE({
        path(true, 3.5f, 5f, 20.5f, 5f, 20.5f, 19f, 3.5f, 19f)
        path(false, 3.5f, 16f, 9f, 11f, 13f, 15f, 15.5f, 13f, 20.5f, 17f)
        path(true, 15.5f, 8.2f, 16.8f, 9.5f, 15.5f, 10.8f, 14.2f, 9.5f)
    }),
    STOP({ fill(RectF(6.5f, 6.5f, 17.5f, 17.5f), 2f) }),
    CLEAR({
        path(false, 6f, 6f, 18f, 18f)
        path(false, 18f, 6f, 6f, 18f)
    }),
    WARNING({
        path(true, 12f, 4f, 21f, 19.5f, 3f, 19.5f)
        path(false, 12f, 10f, 12f, 14.2f)
        path(false, 12f, 16.8f, 12f, 16.9f)
    }),
    CHECK({ path(false, 5f, 12.5f, 10f, 17.5f, 19.5f, 7f) }),
    RUN({ path(true, 7.5f, 5f, 18.5f, 12f, 7.5f, 19f) }),
}

/** Draws an icon's strokes. */
class Pen internal constructor(private val canvas: Canvas, private val paint: Paint) {
    /** A line through points (x, y, x, y, ...), back to the first one if [closed]. */
    fun path(closed: Boolean, vararg points: Float) = curve {
        moveTo(points[0], points[1])
        for (place in 2 until points.size step 2) lineTo(points[place], points[place + 1])
        if (closed) close()
    }

    fun curve(shape: Path.() -> Unit) = canvas.drawPath(Path().apply(shape), paint)

    fun fill(box: RectF, radius: Float) {
        paint.style = Paint.Style.FILL
        canvas.drawRoundRect(box, radius, radius, paint)
        paint.style = Paint.Style.STROKE
    }
}

/** An icon of a colour; [sizePixels] wide and high. */
class IconDrawable(private val icon: Icon, color: Int, private val sizePixels: Int) : Drawable() {
    private val paint = Paint(Paint.ANTI_ALIAS_FLAG).apply {
        this.color = color
        style = Paint.Style.STROKE
        strokeWidth = 1.8f
        strokeCap = Paint.Cap.ROUND
        strokeJoin = Paint.Join.ROUND
    }

    override fun draw(canvas: Canvas) {
        val saved = canvas.save()
        canvas.translate(bounds.left.toFloat(), bounds.top.toFloat())
        canvas.scale(bounds.width() / GRID, bounds.height() / GRID)
        icon.draw(Pen(canvas, paint))
        canvas.restoreToCount(saved)
    }

    override fun getIntrinsicWidth(): Int = sizePixels

    override fun getIntrinsicHeight(): Int = sizePixels

    override fun setAlpha(alpha: Int) {
        paint.alpha = alpha
    }

    override fun setColorFilter(filter: ColorFilter?) {
        paint.colorFilter = filter
    }

    @Deprecated("Android asks for it still")
    override fun getOpacity(): Int = PixelFormat.TRANSLUCENT

    private companion object {
        const val GRID = 24f
    }
}
