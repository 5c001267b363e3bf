/* The 256-bit x86 body, shared by the files avx2, avxvnni and avx512vnni.
 *
 * The including file defines step_dot(w, vectors, full, unit): the 8 lane sums of a step, zero point taken off;
 * `full` says that weights use all 8 bits. Few rows: weights are unpacked in registers. Many rows: a panel of columns
 * is unpacked once into scratch (in vector order, last step padded) and all rows go over it.
 */
#ifndef LESONNX_X86_256_H
#define LESONNX_X86_256_H

#include "kernel.h"

#define PANEL_BYTES (96 * 1024) /* unpacked weights that stay in the second-level cache beside the rows */
#define PANEL_COLUMNS 64

/* How the lanes of a step find their weight scale. */
typedef struct {
    int uniform; /* one block a step: broadcast it */
    __m256i mask;
    __m256i index;
} scale_map;

LESONNX_INLINE scale_map scale_map_of(const lesonnx_format *f) {
    scale_map map;
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const int lanes_log2 = f->parts == 8 ? 0 : f->parts == 4 ? 1 : f->parts == 2 ? 2 : 3;
    map.uniform = f->parts == 1;
    map.index = _mm256_srl_epi32(lane, _mm_cvtsi32_si128(lanes_log2));
    map.mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(f->parts), lane);
    return map;
}

LESONNX_INLINE __m256 load_scale(const float *scales, int uniform, const scale_map *map) {
    return uniform ? _mm256_broadcast_ss(scales)
                   : _mm256_permutevar8x32_ps(_mm256_maskload_ps(scales, map->mask), map->index);
}

/* The unpacked vectors of one step of a weight row. */
LESONNX_INLINE void load_step(const uint8_t *w, int bits, int vectors, __m256i out[LESONNX_MAX_VECTORS]) {
    const __m256i low4 = _mm256_set1_epi8(0x0f), low2 = _mm256_set1_epi8(0x03);
    if (bits == 8) {
        for (int v = 0; v < vectors; v++) {
            out[v] = _mm256_loadu_si256((const __m256i *)(w + v * LESONNX_UNIT));
        }
    } else if (bits == 4) {
        for (int g = 0; g < vectors / 2; g++) {
            const __m256i raw = _mm256_loadu_si256((const __m256i *)(w + g * LESONNX_UNIT));
            out[2 * g] = _mm256_and_si256(raw, low4);
            out[2 * g + 1] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), low4);
        }
    } else {
        const __m256i raw = _mm256_loadu_si256((const __m256i *)w);
        out[0] = _mm256_and_si256(raw, low2);
        out[1] = _mm256_and_si256(_mm256_srli_epi16(raw, 2), low2);
        out[2] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), low2);
        out[3] = _mm256_and_si256(_mm256_srli_epi16(raw, 6), low2);
    }
}

/* Canonical sums of four accumulators. */
LESONNX_INLINE __m128 add_lanes4(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

/* One step of a tile: nr weight rows against mr input rows. */
LESONNX_INLINE void tile_step(int bits, int full, int vectors, int uniform, const scale_map *map, int mr, int nr,
                              const uint8_t *const *w, const float *const *scales, const uint8_t *const *rows,
                              int64_t at_weight, int64_t at_scale, int64_t at_row, __m256 *acc) {
    for (int n = 0; n < nr; n++) {
        __m256i unpacked[LESONNX_MAX_VECTORS];
        load_step(w[n] + at_weight, bits, vectors, unpacked);
        const __m256 scale = load_scale(scales[n] + at_scale, uniform, map);
        for (int m = 0; m < mr; m++) {
            const uint8_t *unit = rows[m] + at_row;
            const __m256i sum = step_dot(unpacked, vectors, full, unit);
            const __m256 input_scale = _mm256_load_ps((const float *)(unit + (vectors + 1) * LESONNX_UNIT));
            acc[n * mr + m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(input_scale, scale),
                                              acc[n * mr + m]);
        }
    }
}

/* nr x mr outputs over whole rows. A partial last step is done on padded copies, so nothing is read past a row. */
LESONNX_INLINE void tile(const lesonnx_format *f, int bits, int full, int vectors, int uniform, const scale_map *map,
                         int mr, int nr, const uint8_t *const *w, const float *const *scales,
                         const uint8_t *const *rows, int64_t steps, int64_t step_bytes, int prefetch,
                         float *sums /* [nr * mr] */) {
    __m256 acc[8];
    const int64_t unit_bytes = (vectors + 2) * LESONNX_UNIT;
    const int parts = uniform ? 1 : f->parts;
    for (int i = 0; i < nr * mr; i++) {
        acc[i] = _mm256_setzero_ps();
    }
    for (int64_t step = 0; step < steps; step++) {
        if (prefetch) {
            for (int n = 0; n < nr; n++) {
                const uintptr_t ahead = (uintptr_t)w[n] + (uintptr_t)(step * step_bytes + nr * f->weight_stride);
                _mm_prefetch((const char *)ahead, _MM_HINT_T0);
            }
        }
        tile_step(bits, full, vectors, uniform, map, mr, nr, w, scales, rows, step * step_bytes, step * parts,
                  step * unit_bytes, acc);
    }
    if (!uniform && steps < f->steps) {
        uint8_t tail_weights[4][LESONNX_UNIT] = {{0}};
        float tail_scales[4][8] = {{0}};
        const uint8_t *tail_w[4];
        const float *tail_s[4];
        const int64_t blocks = f->blocks - steps * parts;
        for (int n = 0; n < nr; n++) {
            memcpy(tail_weights[n], w[n] + steps * step_bytes, (size_t)(f->weight_stride - steps * step_bytes));
            memcpy(tail_scales[n], scales[n] + steps * parts, (size_t)blocks * 4);
            tail_w[n] = tail_weights[n];
            tail_s[n] = tail_scales[n];
        }
        tile_step(bits, full, vectors, uniform, map, mr, nr, tail_w, tail_s, rows, 0, 0, steps * unit_bytes, acc);
    }
    for (int i = 0; i < nr * mr; i++) {
        if (i + 4 <= nr * mr) {
            _mm_storeu_ps(sums + i, add_lanes4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));
            i += 3;
        } else {
            _mm_store_ss(sums + i, add_lanes4(acc[i], acc[i], acc[i], acc[i]));
        }
    }
}

/* What a run of columns needs: the product's weights, or a panel of them unpacked to bytes. */
typedef struct {
    const uint8_t *weights; /* of column `first` */
    const float *scales;
    int64_t weight_stride;
    int64_t scale_stride;
    int64_t steps;
    int64_t step_bytes;
    int64_t first;
    int64_t last;
} columns;

LESONNX_INLINE void block_of_tiles(const lesonnx_product *p, const columns *c, int bits, int full, int vectors,
                                   int uniform, const scale_map *map, int64_t i, int mr, int64_t n, int nr,
                                   int prefetch) {
    const uint8_t *w[4];
    const float *scales[4];
    float sums[8];
    for (int k = 0; k < nr; k++) {
        w[k] = c->weights + (n - c->first + k) * c->weight_stride;
        scales[k] = c->scales + (n - c->first + k) * c->scale_stride;
    }
    tile(p->format, bits, full, vectors, uniform, map, mr, nr, w, scales, p->rows + i, c->steps, c->step_bytes,
         prefetch, sums);
    for (int k = 0; k < nr; k++) {
        for (int j = 0; j < mr; j++) {
            const float sum = sums[k * mr + j];
            p->out[i + j][n + k - p->first] = p->bias ? sum + p->bias[n + k] : sum;
        }
    }
}

/* All m rows against columns c: column by column when there are few rows, else rows in the outer loop, so that their
 * prepared bytes stay in the first-level cache. */
LESONNX_INLINE void run_columns(const lesonnx_product *p, const columns *c, int bits, int full, int vectors,
                                int uniform, const scale_map *map) {
    int64_t i = 0;
    for (; i + 4 <= p->m; i += 4) {
        int64_t n = c->first;
        for (; n + 2 <= c->last; n += 2) {
            block_of_tiles(p, c, bits, full, vectors, uniform, map, i, 4, n, 2, 0);
        }
        if (n < c->last) {
            block_of_tiles(p, c, bits, full, vectors, uniform, map, i, 4, n, 1, 0);
        }
    }
    if (i + 2 <= p->m) {
        int64_t n = c->first;
        for (; n + 2 <= c->last; n += 2) {
            block_of_tiles(p, c, bits, full, vectors, uniform, map, i, 2, n, 2, 1);
        }
        if (n < c->last) {
            block_of_tiles(p, c, bits, full, vectors, uniform, map, i, 2, n, 1, 0);
        }
        i += 2;
    }
    if (i < p->m) {
        int64_t n = c->first;
        for (; n + 4 <= c->last; n += 4) {
            block_of_tiles(p, c, bits, full, vectors, uniform, map, i, 1, n, 4, 1);
        }
        for (; n < c->last; n++) {
            block_of_tiles(p, c, bits, full, vectors, uniform, map, i, 1, n, 1, 0);
        }
    }
}

/* One function for each way to unpack, so that the inner loops are straight code. */
#define RUN_COLUMNS(name, bits, full, vectors, uniform)                                                     \
    static void name(const lesonnx_product *p, const columns *c, const scale_map *map) {                    \
        run_columns(p, c, bits, full, vectors, uniform, map);                                               \
    }
RUN_COLUMNS(run_8_4u, 8, 1, 4, 1)
RUN_COLUMNS(run_8_2u, 8, 1, 2, 1)
RUN_COLUMNS(run_8_1u, 8, 1, 1, 1)
RUN_COLUMNS(run_8_1s, 8, 1, 1, 0)
RUN_COLUMNS(run_4_4u, 4, 0, 4, 1)
RUN_COLUMNS(run_4_2u, 4, 0, 2, 1)
RUN_COLUMNS(run_4_2s, 4, 0, 2, 0)
RUN_COLUMNS(run_2_4u, 2, 0, 4, 1)
RUN_COLUMNS(run_2_4s, 2, 0, 4, 0)

static void run_packed(const lesonnx_product *p, const columns *c, const scale_map *map) {
    const lesonnx_format *f = p->format;
    switch (f->bits * 16 + f->vectors * 2 + map->uniform) {
        case 8 * 16 + 9: run_8_4u(p, c, map); break;
        case 8 * 16 + 5: run_8_2u(p, c, map); break;
        case 8 * 16 + 3: run_8_1u(p, c, map); break;
        case 8 * 16 + 2: run_8_1s(p, c, map); break;
        case 4 * 16 + 9: run_4_4u(p, c, map); break;
        case 4 * 16 + 5: run_4_2u(p, c, map); break;
        case 4 * 16 + 4: run_4_2s(p, c, map); break;
        case 2 * 16 + 9: run_2_4u(p, c, map); break;
        default: run_2_4s(p, c, map); break;
    }
}

/* Columns of packed weights as they lie in the pack. */
LESONNX_INLINE columns packed_columns(const lesonnx_product *p) {
    const lesonnx_format *f = p->format;
    columns c = {p->weights + p->first * f->weight_stride, p->scales + p->first * f->blocks, f->weight_stride,
                 f->blocks, f->full_steps, f->step_bytes, p->first, p->last};
    return c;
}

LESONNX_INLINE int64_t panel_columns(const lesonnx_format *f) {
    const int64_t column_bytes = f->steps * f->vectors * LESONNX_UNIT;
    return lesonnx_max(4, lesonnx_min(PANEL_COLUMNS, PANEL_BYTES / column_bytes) & ~(int64_t)3);
}

LESONNX_INLINE int64_t panel_column_bytes(const lesonnx_format *f) {
    return f->steps * (f->vectors * LESONNX_UNIT + f->parts * 4);
}

LESONNX_INLINE void unpack_column(const lesonnx_format *f, int bits, int vectors, const uint8_t *w, uint8_t *out) {
    __m256i unpacked[LESONNX_MAX_VECTORS];
    for (int64_t step = 0; step < f->steps; step++) {
        uint8_t tail[LESONNX_UNIT] = {0};
        const uint8_t *from = w + step * f->step_bytes;
        if (step == f->full_steps) {
            memcpy(tail, from, (size_t)(f->weight_stride - step * f->step_bytes));
            from = tail;
        }
        load_step(from, bits, vectors, unpacked);
        for (int v = 0; v < vectors; v++) {
            _mm256_storeu_si256((__m256i *)(out + (step * vectors + v) * LESONNX_UNIT), unpacked[v]);
        }
    }
}

/* Columns first..last-1 unpacked into `panel`, which holds panel_column_bytes for each. */
static columns unpack_panel(const lesonnx_product *p, int64_t first, int64_t last, uint8_t *panel) {
    const lesonnx_format *f = p->format;
    const int64_t stride = f->steps * f->vectors * LESONNX_UNIT;
    float *scales = (float *)(panel + (last - first) * stride);
    for (int64_t n = first; n < last; n++) {
        const uint8_t *w = p->weights + n * f->weight_stride;
        uint8_t *out = panel + (n - first) * stride;
        float *scale = scales + (n - first) * f->steps * f->parts;
        switch (f->bits * 8 + f->vectors) {
            case 8 * 8 + 4: unpack_column(f, 8, 4, w, out); break;
            case 8 * 8 + 2: unpack_column(f, 8, 2, w, out); break;
            case 8 * 8 + 1: unpack_column(f, 8, 1, w, out); break;
            case 4 * 8 + 4: unpack_column(f, 4, 4, w, out); break;
            case 4 * 8 + 2: unpack_column(f, 4, 2, w, out); break;
            default: unpack_column(f, 2, 4, w, out); break;
        }
        memcpy(scale, p->scales + n * f->blocks, (size_t)f->blocks * 4);
        memset(scale + f->blocks, 0, (size_t)(f->steps * f->parts - f->blocks) * 4);
    }
    columns c = {panel, scales, stride, f->steps * f->parts, f->steps, f->vectors * LESONNX_UNIT, first, last};
    return c;
}

/* bits 32: 16 lanes in two accumulators, 2 rows at a time. */
LESONNX_INLINE void float_tile(const lesonnx_product *p, int64_t i, int mr, int64_t n) {
    const lesonnx_format *f = p->format;
    const float *w = (const float *)(p->weights + n * f->weight_stride);
    __m256 acc[4][2];
    for (int m = 0; m < mr; m++) {
        acc[m][0] = acc[m][1] = _mm256_setzero_ps();
    }
    for (int64_t step = 0; step < f->steps; step++) {
        float tail[16] = {0};
        const float *from = w + step * 16;
        if (step == f->full_steps) {
            memcpy(tail, from, (size_t)(f->columns - step * 16) * 4);
            from = tail;
        }
        const __m256 w0 = _mm256_loadu_ps(from), w1 = _mm256_loadu_ps(from + 8);
        for (int m = 0; m < mr; m++) {
            const float *row = (const float *)p->rows[i + m] + step * 16;
            acc[m][0] = _mm256_fmadd_ps(w0, _mm256_load_ps(row), acc[m][0]);
            acc[m][1] = _mm256_fmadd_ps(w1, _mm256_load_ps(row + 8), acc[m][1]);
        }
    }
    for (int m = 0; m < mr; m++) {
        const __m256 lanes = _mm256_add_ps(acc[m][0], acc[m][1]);
        const float sum = _mm_cvtss_f32(add_lanes4(lanes, lanes, lanes, lanes));
        p->out[i + m][n - p->first] = p->bias ? sum + p->bias[n] : sum;
    }
}

static void multiply_float(const lesonnx_product *p) {
    for (int64_t n = p->first; n < p->last; n++) {
        int64_t i = 0;
        for (; i + 4 <= p->m; i += 4) {
            float_tile(p, i, 4, n);
        }
        for (; i < p->m; i++) {
            float_tile(p, i, 1, n);
        }
    }
}

#endif
