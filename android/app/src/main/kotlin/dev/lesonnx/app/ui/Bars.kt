package dev.lesonnx.app.ui

import android.graphics.Canvas
import android.graphics.Paint
import android.graphics.Path
import android.graphics.RectF
import android.view.View

/** A bar that is full up to a share; [heightDp] high, its ends round. */
class ShareBar(private val theme: Theme, private val heightDp: Int = 8, ink: Int = theme.palette.accent) : View(theme.context) {
    private var share = 0f
    private val full = Paint(Paint.ANTI_ALIAS_FLAG).apply { color = ink }
    private val empty = Paint(Paint.ANTI_ALIAS_FLAG).apply { color = theme.palette.sunken }
    private val box = RectF()

    fun show(share: Float) {
        this.share = share.coerceIn(0f, 1f)
        invalidate()
    }

    override fun onMeasure(widthSpec: Int, heightSpec: Int) {
        setMeasuredDimension(getDefaultSize(suggestedMinimumWidth, widthSpec), theme.dp(heightDp))
    }

    override fun onDraw(canvas: Canvas) {
        val radius = height / 2f
        box.set(0f, 0f, width.toFloat(), height.toFloat())
        canvas.drawRoundRect(box, radius, radius, empty)
        if (share <= 0f) return
        box.right = maxOf(height.toFloat(), width * share)
        canvas.drawRoundRect(box, radius, radius, full)
    }
}

/** Shares of a whole side by side in one bar. */
class StackBar(private val theme: Theme, private val inks: List<Int>) : View(theme.context) {
    private var values = FloatArray(inks.size)
    private val paint = Paint(Paint.ANTI_ALIAS_FLAG)
    private val clip = Path()

    /** Shows one value an ink; only their proportions count. */
    fun show(values: FloatArray) {
        this.values = values
        invalidate()
    }

    override fun onMeasure(widthSpec: Int, heightSpec: Int) {
        setMeasuredDimension(getDefaultSize(suggestedMinimumWidth, widthSpec), theme.dp(HEIGHT))
    }

    override fun onDraw(canvas: Canvas) {
        val radius = height / 2f
        clip.rewind()
        clip.addRoundRect(0f, 0f, width.toFloat(), height.toFloat(), radius, radius, Path.Direction.CW)
        canvas.clipPath(clip)
        canvas.drawColor(theme.palette.sunken)
        val sum = values.sum()
        if (sum <= 0f) return
        var left = 0f
        for ((place, value) in values.withIndex()) {
            val right = left + value / sum * width
            paint.color = inks[place]
            canvas.drawRect(left, 0f, right, height.toFloat(), paint)
            left = right
        }
    }

    private companion object {
        const val HEIGHT = 14
    }
}
