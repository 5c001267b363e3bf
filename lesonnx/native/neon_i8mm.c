/* NEON with the 8-bit matrix products of ARMv8.6 (i8mm): two rows times two columns an instruction.
 *
 * Rows are taken in pairs, their 8-byte halves interleaved in scratch, and so are the columns of a panel. Single rows,
 * and blocks shorter than a unit (whose halves belong to different blocks), go the way of neon_dotprod.c.
 */
#include "kernel.h"

#if defined(__aarch64__)
#include <arm_neon.h>

/* Clang before 16 (Apple's before 15) declares these intrinsics only when the whole file is built for them. */
#if defined(__clang__) && !defined(__ARM_FEATURE_MATMUL_INT8) &&   \
    ((defined(__apple_build_version__) && __clang_major__ < 15) || \
     (!defined(__apple_build_version__) && __clang_major__ < 16))
const lesonnx_isa_table lesonnx_i8mm = {"i8mm", NULL, NULL, NULL, NULL};
#else

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod,i8mm"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#endif

#include "elementwise.h"
#include "neon_128.h"

LESONNX_INLINE ivec dot(int full, int parts, ivec acc, ivec weight, ivec input) {
    (void)parts;
    return vdotq_s32(acc, signed_weight(full, weight), vreinterpretq_s8_s32(input));
}

#include "tile.h"

#define MAX_PAIRS 4
#define PAIR_ROWS 3 /* fewer rows would not repay the interleaving */

LESONNX_INLINE int8x16_t low_halves(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}
LESONNX_INLINE int8x16_t high_halves(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

/* Two rows of `length` bytes, unit by unit: low halves, then high halves. */
static void interleave(const uint8_t *a, const uint8_t *b, int64_t length, uint8_t *out) {
    for (int64_t at = 0; at < length; at += LESONNX_UNIT) {
        const int8x16_t x = vld1q_s8((const int8_t *)a + at), y = vld1q_s8((const int8_t *)b + at);
        vst1q_s8((int8_t *)out + 2 * at, low_halves(x, y));
        vst1q_s8((int8_t *)out + 2 * at + LESONNX_UNIT, high_halves(x, y));
    }
}

/* A panel of tile.h made signed, columns 0 and 1, then 2 and 3 interleaved, in place. */
static void interleave_panel(const lesonnx_format *f, uint8_t *panel) {
    const int full = f->bits == 8;
    for (int64_t at = 0; at < panel_weight_bytes(f); at += 4 * LESONNX_UNIT) {
        int8x16_t column[4];
        for (int v = 0; v < 4; v++) {
            column[v] = signed_weight(full, load_panel(panel + at + v * LESONNX_UNIT));
        }
        for (int v = 0; v < 4; v += 2) {
            vst1q_s8((int8_t *)panel + at + v * LESONNX_UNIT, low_halves(column[v], column[v + 1]));
            vst1q_s8((int8_t *)panel + at + (v + 1) * LESONNX_UNIT, high_halves(column[v], column[v + 1]));
        }
    }
}

/* `pairs` pairs of rows from row i on, times the four columns of the panel. */
LESONNX_INLINE void pair_tile(const lesonnx_product *p, int pairs, const tile_source *source, const uint8_t *ahead,
                              const uint8_t *paired, int64_t i, fvec *acc /* [2 * pairs] */) {
    const lesonnx_format *f = p->format;
    const int full = f->bits == 8;
    const int granules = f->units * f->expand;
    for (int m = 0; m < 2 * pairs; m++) {
        acc[m] = zero_fvec();
    }
    for (int64_t block = 0; block < f->blocks; block++) {
        const int8_t *weights = (const int8_t *)source->weights + block * f->step_columns * 4;
        const int8_t *inputs = (const int8_t *)paired + block * f->step_columns * 2;
        int32x4_t sum[MAX_PAIRS][2];
        for (int64_t line = 0; ahead && line < f->step_bytes * TILE_COLUMNS; line += 64) {
            prefetch(ahead + block * f->step_bytes * TILE_COLUMNS + line);
        }
        for (int pair = 0; pair < pairs; pair++) {
            sum[pair][0] = sum[pair][1] = vdupq_n_s32(0);
        }
        for (int g = 0; g < granules; g++) {
            int8x16_t w[4];
            for (int v = 0; v < 4; v++) {
                w[v] = vld1q_s8(weights + (g * 4 + v) * LESONNX_UNIT);
            }
            for (int pair = 0; pair < pairs; pair++) {
                const int8_t *input = inputs + pair * f->sums_at * 2 + g * 2 * LESONNX_UNIT;
                const int8x16_t low = vld1q_s8(input), high = vld1q_s8(input + LESONNX_UNIT);
                sum[pair][0] = vmmlaq_s32(vmmlaq_s32(sum[pair][0], low, w[0]), high, w[1]);
                sum[pair][1] = vmmlaq_s32(vmmlaq_s32(sum[pair][1], low, w[2]), high, w[3]);
            }
        }
        const fvec weight_scale = load_floats(source->scales + block * TILE_COLUMNS);
        for (int m = 0; m < 2 * pairs; m++) {
            const uint8_t *row = p->rows[lesonnx_min(i + m, p->m - 1)];
            const int64x2_t left = vreinterpretq_s64_s32(sum[m / 2][0]), right = vreinterpretq_s64_s32(sum[m / 2][1]);
            ivec whole = vreinterpretq_s32_s64(m % 2 ? vzip2q_s64(left, right) : vzip1q_s64(left, right));
            if (!full) {
                whole = add_int(whole, ((const int32_t *)(row + f->sums_at))[block]);
            }
            const fvec scale = scale_by(weight_scale, ((const float *)(row + f->scales_at))[block]);
            acc[m] = fused(to_float(whole), scale, acc[m]);
        }
    }
}

LESONNX_INLINE void pair_rows(const lesonnx_product *p, int pairs, const tile_source *source, const uint8_t *paired,
                              int64_t i, int64_t base, int64_t n) {
    fvec acc[2 * MAX_PAIRS];
    /* Only the first rows prefetch what comes after. */
    pair_tile(p, pairs, source, i ? NULL : source->ahead, paired + i * p->format->sums_at, i, acc);
    for (int m = 0; m < 2 * pairs && i + m < p->m; m++) {
        float values[TILE_COLUMNS];
        store_floats(values, p->bias ? add_floats(acc[m], load_floats(p->bias + base)) : acc[m]);
        const int64_t end = lesonnx_min(base + TILE_COLUMNS, p->last);
        memcpy(p->out[i + m] + (n - p->first), values + (n - base), (size_t)(end - n) * 4);
    }
}

static size_t paired_bytes(const lesonnx_format *f, int64_t m) { return (size_t)((m + 1) / 2 * 2 * f->sums_at); }

static int by_pairs(const lesonnx_format *f, int64_t m) {
    return m >= PAIR_ROWS && f->parts == 1 && f->rows >= TILE_COLUMNS;
}

static void multiply_pairs(const lesonnx_product *p) {
    const lesonnx_format *f = p->format;
    uint8_t *panel = p->scratch;
    uint8_t *paired = panel + panel_weight_bytes(f) + (f->blocks + SCALE_BLOCKS) * TILE_COLUMNS * 4;
    for (int64_t i = 0; i < p->m; i += 2) {
        interleave(p->rows[i], p->rows[lesonnx_min(i + 1, p->m - 1)], f->sums_at, paired + i * f->sums_at);
    }
    for (int64_t n = p->first; n < p->last; n += TILE_COLUMNS) {
        const int64_t base = lesonnx_min(n, f->rows - TILE_COLUMNS);
        tile_source source = {p->weights + base * f->weight_stride, p->scales + base * f->blocks, p->next};
        if (n + TILE_COLUMNS < p->last) {
            source.ahead = source.weights + TILE_COLUMNS * f->weight_stride;
        }
        source = unpack_tile(f, &source, panel);
        interleave_panel(f, panel);
        int64_t i = 0;
        for (; i + 2 * MAX_PAIRS <= p->m; i += 2 * MAX_PAIRS) {
            pair_rows(p, MAX_PAIRS, &source, paired, i, base, n);
        }
        for (; i + 4 <= p->m; i += 4) {
            pair_rows(p, 2, &source, paired, i, base, n);
        }
        for (; i < p->m; i += 2) {
            pair_rows(p, 1, &source, paired, i, base, n);
        }
    }
}

static void multiply(const lesonnx_product *p) {
    const lesonnx_format *f = p->format;
    if (f->bits == 32) {
        multiply_float(p);
    } else if (by_pairs(f, p->m)) {
        multiply_pairs(p);
    } else {
        multiply_tiles(p);
    }
}

static size_t scratch_bytes(const lesonnx_format *f, int64_t m) {
    const size_t tiles = tile_scratch_bytes(f, m);
    if (f->bits == 32 || !by_pairs(f, m)) {
        return tiles;
    }
    const size_t panel = (size_t)(panel_weight_bytes(f) + (f->blocks + SCALE_BLOCKS) * TILE_COLUMNS * 4);
    return panel + paired_bytes(f, m);
}

const lesonnx_isa_table lesonnx_i8mm = {"i8mm", lesonnx_prepare, multiply, lesonnx_activate, scratch_bytes};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
#endif
