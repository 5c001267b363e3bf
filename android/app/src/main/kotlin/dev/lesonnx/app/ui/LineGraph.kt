package dev.lesonnx.app.ui

import android.graphics.Canvas
import android.graphics.LinearGradient
import android.graphics.Paint
import android.graphics.Path
import android.graphics.Shader
import android.view.View

/** A small graph of one figure over time, the newest at the right; zero is the bottom. */
class LineGraph(private val theme: Theme, private val ink: Int) : View(theme.context) {
    private var values = FloatArray(0)
    private var top = 0f
    private val line = Paint(Paint.ANTI_ALIAS_FLAG).apply {
        color = ink
        style = Paint.Style.STROKE
        strokeWidth = theme.dp(2).toFloat()
        strokeJoin = Paint.Join.ROUND
        strokeCap = Paint.Cap.ROUND
    }
    private val ground = Paint(Paint.ANTI_ALIAS_FLAG)
    private val base = Paint().apply {
        color = theme.palette.outline
        strokeWidth = theme.dp(1).toFloat()
    }
    private val dot = Paint(Paint.ANTI_ALIAS_FLAG).apply { color = ink }
    private val path = Path()

    /** Shows [values] on a scale up to [top], or to the largest of them where that is more. */
    fun show(values: FloatArray, top: Float = 0f) {
        this.values = values
        this.top = maxOf(top, values.maxOrNull() ?: 0f)
        invalidate()
    }

    override fun onMeasure(widthSpec: Int, heightSpec: Int) {
        setMeasuredDimension(getDefaultSize(suggestedMinimumWidth, widthSpec), theme.dp(HEIGHT))
    }

    override fun onSizeChanged(width: Int, height: Int, oldWidth: Int, oldHeight: Int) {
        val clear = ink and 0x00FFFFFF
        ground.shader = LinearGradient(0f, 0f, 0f, height.toFloat(), clear or (0x38 shl 24), clear, Shader.TileMode.CLAMP)
    }

    override fun onDraw(canvas: Canvas) {
        val bottom = height - theme.dp(1).toFloat()
        canvas.drawLine(0f, bottom, width.toFloat(), bottom, base)
        if (values.size < 2 || top <= 0f) return
        val inset = theme.dp(4).toFloat()
        val step = (width - 2 * inset) / (values.size - 1)
        fun y(value: Float) = bottom - value / top * (bottom - inset)
        path.rewind()
        path.moveTo(inset, y(values[0]))
        for (place in 1 until values.size) path.lineTo(inset + place * step, y(values[place]))
        canvas.drawPath(path, line)
        path.lineTo(width - inset, bottom)
        path.lineTo(inset, bottom)
        path.close()
        canvas.drawPath(path, ground)
        canvas.drawCircle(width - inset, y(values.last()), theme.dp(3.5f).toFloat(), dot)
    }

    private companion object {
        const val HEIGHT = 52
    }
}
