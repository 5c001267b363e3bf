/* What a matrix and a kind of expert must satisfy, and how a matrix is cut into steps. */
#include "format.h"

#include <inttypes.h>
#include <stdio.h>

/* Far above any model; keeps every product of sizes inside 64 bits. */
#define MAX_DIMENSION ((int64_t)1 << 24)
#define MAX_EXPERT_BYTES ((int64_t)1 << 48)

int lesonnx_fail(char *message, size_t bytes, const char *format, ...) {
    if (message && bytes) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(message, bytes, format, arguments);
        va_end(arguments);
    }
    return LESONNX_BAD_INPUT;
}

lesonnx_format lesonnx_format_of(const lesonnx_matrix *m) {
    lesonnx_format f = {0};
    f.bits = (int32_t)m->bits;
    f.rows = m->rows;
    f.columns = m->columns;
    if (m->bits == 32) {
        f.parts = 1;
        f.step_columns = 16;
        f.steps = lesonnx_ceil_div(m->columns, 16);
        f.full_steps = m->columns / 16;
        f.step_bytes = 64;
        f.weight_stride = m->columns * 4;
        f.row_bytes = f.steps * 64;
        return f;
    }
    const int64_t block_bytes = m->block_size * m->bits / 8;
    f.block_size = (int32_t)m->block_size;
    f.expand = 8 / f.bits;
    f.step_bytes = lesonnx_max(block_bytes, LESONNX_UNIT);
    f.units = (int32_t)(f.step_bytes / LESONNX_UNIT);
    f.parts = (int32_t)(f.step_bytes / block_bytes);
    f.step_columns = m->block_size * f.parts;
    f.blocks = lesonnx_ceil_div(m->columns, m->block_size);
    f.steps = lesonnx_ceil_div(f.blocks, f.parts);
    f.full_steps = f.blocks / f.parts;
    f.weight_stride = f.blocks * block_bytes;
    f.sums_at = f.steps * f.step_columns;
    f.scales_at = f.sums_at + f.steps * f.parts * 4;
    f.row_bytes = lesonnx_ceil_div(f.scales_at + f.steps * f.parts * 4, 64) * 64;
    return f;
}

static int check_span(const char *name, const char *part, int64_t offset, int64_t length, int64_t alignment,
                      int64_t total, char *message, size_t bytes) {
    if (offset < 0 || offset > total || length > total - offset) {
        return lesonnx_fail(message, bytes, "%s: %s at %" PRId64 " (%" PRId64 " bytes) is not inside %" PRId64 " bytes",
                            name, part, offset, length, total);
    }
    if (offset % alignment) {
        return lesonnx_fail(message, bytes, "%s: %s offset %" PRId64 " is not a multiple of %" PRId64, name, part,
                            offset, alignment);
    }
    return LESONNX_OK;
}

int lesonnx_check_matrix(const char *name, const lesonnx_matrix *m, int64_t total_bytes, char *message, size_t bytes) {
    if (m->rows < 1 || m->rows > MAX_DIMENSION || m->columns < 1 || m->columns > MAX_DIMENSION) {
        return lesonnx_fail(message, bytes, "%s: shape [%" PRId64 ",%" PRId64 "] is not in 1..%" PRId64, name, m->rows,
                            m->columns, MAX_DIMENSION);
    }
    if (m->bits != 2 && m->bits != 4 && m->bits != 8 && m->bits != 32) {
        return lesonnx_fail(message, bytes, "%s: bits is %" PRId64 ", expected 2, 4, 8 or 32", name, m->bits);
    }
    const int64_t b = m->block_size;
    if (m->bits == 32 ? b != 0 : (b != 16 && b != 32 && b != 64 && b != 128)) {
        return lesonnx_fail(message, bytes, "%s: block_size is %" PRId64 ", expected %s", name, b,
                            m->bits == 32 ? "0 (float weights have no blocks)" : "16, 32, 64 or 128");
    }
    const lesonnx_format f = lesonnx_format_of(m);
    int status = check_span(name, "weight", m->weight_offset, m->rows * f.weight_stride, m->bits == 32 ? 4 : 1,
                            total_bytes, message, bytes);
    if (!status && m->bits != 32) {
        status = check_span(name, "scales", m->scales_offset, m->rows * f.blocks * 4, 4, total_bytes, message, bytes);
    }
    if (!status && m->bits == 32 && m->scales_offset != -1) {
        status = lesonnx_fail(message, bytes, "%s: scales offset is %" PRId64 ", expected -1 for float weights", name,
                              m->scales_offset);
    }
    if (!status && m->bias_offset != -1) {
        status = check_span(name, "bias", m->bias_offset, m->rows * 4, 4, total_bytes, message, bytes);
    }
    return status;
}

int lesonnx_check_kind(const lesonnx_kind *k, char *message, size_t bytes) {
    if (k->activation < LESONNX_SWIGLU || k->activation > LESONNX_SWIGLU_CLAMPED) {
        return lesonnx_fail(message, bytes, "activation %" PRId64 " is unknown", k->activation);
    }
    if (k->expert_bytes < 1 || k->expert_bytes > MAX_EXPERT_BYTES) {
        return lesonnx_fail(message, bytes, "expert_bytes is %" PRId64 ", expected at least 1", k->expert_bytes);
    }
    if (k->activation == LESONNX_SWIGLU_CLAMPED && !(k->limit > 0.0f && k->alpha - k->alpha == 0.0f)) {
        return lesonnx_fail(message, bytes, "limit is %g and alpha %g, expected a positive and a finite number",
                            (double)k->limit, (double)k->alpha);
    }
    const lesonnx_matrix *matrices[3] = {&k->gate, &k->up, &k->down};
    static const char *const names[3] = {"gate", "up", "down"};
    for (int i = 0; i < 3; i++) {
        const int64_t rows = i == 2 ? k->hidden_size : k->intermediate_size;
        const int64_t columns = i == 2 ? k->intermediate_size : k->hidden_size;
        if (matrices[i]->rows != rows || matrices[i]->columns != columns) {
            return lesonnx_fail(message, bytes, "%s is [%" PRId64 ",%" PRId64 "], expected [%" PRId64 ",%" PRId64 "]",
                                names[i], matrices[i]->rows, matrices[i]->columns, rows, columns);
        }
        const int status = lesonnx_check_matrix(names[i], matrices[i], k->expert_bytes, message, bytes);
        if (status) {
            return status;
        }
    }
    return LESONNX_OK;
}
