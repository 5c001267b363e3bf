/* AVX-512 VNNI: the 256-bit body with vpdpbusd for few rows; for many, pairs of rows in 512-bit registers.
 *
 * The lower half of a register holds one input row, the upper half another, and both meet the same 32 weight bytes: so
 * 512 bits keep the canonical 8 lanes. */
#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#endif

#include "elementwise.h"

LESONNX_INLINE __m256i step_dot(const __m256i *w, int vectors, int full, const uint8_t *unit) {
    const __m256i *input = (const __m256i *)unit;
    __m256i sum = _mm256_load_si256(input + vectors);
    (void)full;
    for (int v = 0; v < vectors; v++) {
        sum = _mm256_dpbusd_epi32(sum, w[v], _mm256_load_si256(input + v));
    }
    return sum;
}

#include "x86_256.h"

#define PANEL_ROWS 6    /* from here on, unpacking and pairing once pay for their writes */
#define PAIRS 4         /* pairs of rows in one tile */
#define TILE_COLUMNS 2  /* columns in one tile */

LESONNX_INLINE __m512 twice(__m256 x) { return _mm512_castsi512_ps(_mm512_broadcast_i64x4(_mm256_castps_si256(x))); }

/* Rows a and b, unit by unit (32 bytes) side by side. */
static void pair_rows(const uint8_t *a, const uint8_t *b, int64_t row_bytes, uint8_t *out) {
    for (int64_t at = 0; at < row_bytes; at += LESONNX_UNIT) {
        const __m256i upper = _mm256_load_si256((const __m256i *)(b + at));
        _mm256_store_si256((__m256i *)(out + 2 * at), _mm256_load_si256((const __m256i *)(a + at)));
        _mm256_store_si256((__m256i *)(out + 2 * at + LESONNX_UNIT), upper);
    }
}

/* pairs x nr outputs: `paired` holds the pairs, one after the other; sums[(n * pairs + pair) * 2 + half]. */
LESONNX_INLINE void pair_tile(const lesonnx_format *f, const columns *c, int vectors, int uniform,
                              const scale_map *map, const uint8_t *paired, int pairs, int64_t n, int nr, float *sums) {
    __m512 acc[PAIRS * TILE_COLUMNS];
    const int parts = uniform ? 1 : f->parts;
    const uint8_t *w = c->weights + (n - c->first) * c->weight_stride;
    const float *scales = c->scales + (n - c->first) * c->scale_stride;
    for (int i = 0; i < pairs * nr; i++) {
        acc[i] = _mm512_setzero_ps();
    }
    for (int64_t step = 0; step < c->steps; step++) {
        __m512i weight[TILE_COLUMNS][LESONNX_MAX_VECTORS];
        __m512 scale[TILE_COLUMNS];
        for (int k = 0; k < nr; k++) {
            const __m256i *from = (const __m256i *)(w + k * c->weight_stride + step * vectors * LESONNX_UNIT);
            for (int v = 0; v < vectors; v++) {
                weight[k][v] = _mm512_broadcast_i64x4(_mm256_loadu_si256(from + v));
            }
            scale[k] = twice(load_scale(scales + k * c->scale_stride + step * parts, uniform, map));
        }
        for (int pair = 0; pair < pairs; pair++) {
            const __m512i *unit = (const __m512i *)(paired + (pair * f->row_bytes + step * f->unit_bytes) * 2);
            const __m512i offset = _mm512_load_si512(unit + vectors);
            const __m512 input_scale = _mm512_castsi512_ps(_mm512_load_si512(unit + vectors + 1));
            __m512i sum[TILE_COLUMNS];
            for (int k = 0; k < nr; k++) {
                sum[k] = offset;
            }
            for (int v = 0; v < vectors; v++) {
                const __m512i input = _mm512_load_si512(unit + v);
                for (int k = 0; k < nr; k++) {
                    sum[k] = _mm512_dpbusd_epi32(sum[k], weight[k][v], input);
                }
            }
            for (int k = 0; k < nr; k++) {
                acc[k * pairs + pair] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[k]),
                                                        _mm512_mul_ps(input_scale, scale[k]), acc[k * pairs + pair]);
            }
        }
    }
    for (int i = 0; i < pairs * nr; i += 2) {
        const __m512 second = i + 1 < pairs * nr ? acc[i + 1] : acc[i];
        float both[4];
        _mm_storeu_ps(both, add_lanes4(_mm512_castps512_ps256(acc[i]), _mm512_extractf32x8_ps(acc[i], 1),
                                       _mm512_castps512_ps256(second), _mm512_extractf32x8_ps(second, 1)));
        memcpy(sums + i * 2, both, i + 1 < pairs * nr ? 16 : 8);
    }
}

LESONNX_INLINE void pair_tiles(const lesonnx_product *p, const columns *c, int vectors, int uniform,
                               const scale_map *map, const uint8_t *paired, int64_t i, int pairs) {
    float sums[PAIRS * TILE_COLUMNS * 2];
    const int64_t rows = lesonnx_min(pairs * 2, p->m - i);
    for (int64_t n = c->first; n < c->last; n += TILE_COLUMNS) {
        const int nr = (int)lesonnx_min(TILE_COLUMNS, c->last - n);
        if (nr == TILE_COLUMNS) {
            pair_tile(p->format, c, vectors, uniform, map, paired, pairs, n, TILE_COLUMNS, sums);
        } else {
            pair_tile(p->format, c, vectors, uniform, map, paired, pairs, n, 1, sums);
        }
        for (int k = 0; k < nr; k++) {
            for (int64_t j = 0; j < rows; j++) {
                const float sum = sums[k * pairs * 2 + j];
                p->out[i + j][n + k - p->first] = p->bias ? sum + p->bias[n + k] : sum;
            }
        }
    }
}

LESONNX_INLINE void run_pairs(const lesonnx_product *p, const columns *c, int vectors, int uniform,
                              const scale_map *map, const uint8_t *paired) {
    const int64_t pair_bytes = p->format->row_bytes * 2;
    int64_t i = 0;
    for (; i + PAIRS * 2 - 1 <= p->m; i += PAIRS * 2) {
        pair_tiles(p, c, vectors, uniform, map, paired + i / 2 * pair_bytes, i, PAIRS);
    }
    for (; i + 3 <= p->m; i += 4) {
        pair_tiles(p, c, vectors, uniform, map, paired + i / 2 * pair_bytes, i, 2);
    }
    for (; i < p->m; i += 2) {
        pair_tiles(p, c, vectors, uniform, map, paired + i / 2 * pair_bytes, i, 1);
    }
}

#define RUN_PAIRS(name, vectors, uniform)                                                                  \
    static void name(const lesonnx_product *p, const columns *c, const scale_map *map, const uint8_t *paired) { \
        run_pairs(p, c, vectors, uniform, map, paired);                                                    \
    }
RUN_PAIRS(pairs_4u, 4, 1)
RUN_PAIRS(pairs_4s, 4, 0)
RUN_PAIRS(pairs_2u, 2, 1)
RUN_PAIRS(pairs_2s, 2, 0)
RUN_PAIRS(pairs_1u, 1, 1)
RUN_PAIRS(pairs_1s, 1, 0)

static size_t paired_bytes(const lesonnx_format *f, int64_t m) { return (size_t)((m + 1) / 2 * f->row_bytes * 2); }

static void multiply(const lesonnx_product *p) {
    const lesonnx_format *f = p->format;
    if (f->bits == 32) {
        multiply_float(p);
        return;
    }
    const scale_map map = scale_map_of(f);
    if (p->m < PANEL_ROWS) {
        const columns c = packed_columns(p);
        run_packed(p, &c, &map);
        return;
    }
    uint8_t *paired = p->scratch, *panel = p->scratch + paired_bytes(f, p->m);
    for (int64_t i = 0; i < p->m; i += 2) {
        pair_rows(p->rows[i], p->rows[lesonnx_min(i + 1, p->m - 1)], f->row_bytes, paired + i * f->row_bytes);
    }
    const int in_place = f->bits == 8 && f->full_steps == f->steps;
    const int64_t width = panel_columns(f);
    for (int64_t n = p->first; n < p->last; n += width) {
        const int64_t end = lesonnx_min(n + width, p->last);
        columns c;
        if (in_place) {
            c = packed_columns(p);
            c.weights += (n - p->first) * c.weight_stride;
            c.scales += (n - p->first) * c.scale_stride;
            c.first = n;
            c.last = end;
        } else {
            c = unpack_panel(p, n, end, panel);
        }
        switch (f->vectors * 2 + map.uniform) {
            case 9: pairs_4u(p, &c, &map, paired); break;
            case 8: pairs_4s(p, &c, &map, paired); break;
            case 5: pairs_2u(p, &c, &map, paired); break;
            case 4: pairs_2s(p, &c, &map, paired); break;
            case 3: pairs_1u(p, &c, &map, paired); break;
            default: pairs_1s(p, &c, &map, paired); break;
        }
    }
}

static size_t scratch_bytes(const lesonnx_format *f, int64_t m) {
    return f->bits == 32 || m < PANEL_ROWS
               ? 0
               : paired_bytes(f, m) + (size_t)(panel_columns(f) * panel_column_bytes(f));
}

const lesonnx_isa_table lesonnx_avx512vnni = {"avx512vnni", lesonnx_prepare, multiply, lesonnx_activate,
                                              scratch_bytes};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
