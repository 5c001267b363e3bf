/* One input row on AVX-512: whole cache lines of each weight row, instead of 16 bytes of four.
 *
 * A 512-bit register holds 64 bytes (four units, a lane each) of one weight row, and meets the input's granules put
 * side by side in the same way. Sixteen rows' sums become sixteen columns by adding neighbours twice within lanes, then
 * lanes (as far as they belong to one block). It reads each line once, and needs no inserts.
 */
#ifndef LESONNX_X86_512_ROW_H
#define LESONNX_X86_512_ROW_H

#include "tile_base.h"

#define LINE_BYTES 64
#define RUN 4

LESONNX_INLINE __m512i even_lanes(__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0x88); }
LESONNX_INLINE __m512i odd_lanes(__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0xDD); }

/* The input that meets one line: out[r] has granule r of its four units. */
LESONNX_INLINE void line_input(const uint8_t *levels, int bits, __m512i out[4]) {
    __m512i z[4];
    for (int i = 0; i < 8 / bits; i++) {
        z[i] = _mm512_loadu_si512(levels + i * LINE_BYTES);
    }
    if (bits == 4) {
        out[0] = even_lanes(z[0], z[1]);
        out[1] = odd_lanes(z[0], z[1]);
    } else {
        const __m512i even0 = even_lanes(z[0], z[1]), even1 = even_lanes(z[2], z[3]);
        const __m512i odd0 = odd_lanes(z[0], z[1]), odd1 = odd_lanes(z[2], z[3]);
        out[0] = even_lanes(even0, even1);
        out[1] = even_lanes(odd0, odd1);
        out[2] = odd_lanes(even0, even1);
        out[3] = odd_lanes(odd0, odd1);
    }
}

/* Four registers, four columns each, lanes unit by unit: to one register per block, whose lanes are the columns. */
LESONNX_INLINE void blocks_of(const __m512i in[4], int blocks, __m512i *out) {
    const __m512i even0 = even_lanes(in[0], in[1]), odd0 = odd_lanes(in[0], in[1]);
    const __m512i even1 = even_lanes(in[2], in[3]), odd1 = odd_lanes(in[2], in[3]);
    if (blocks == 4) {
        out[0] = even_lanes(even0, even1);
        out[1] = even_lanes(odd0, odd1);
        out[2] = odd_lanes(even0, even1);
        out[3] = odd_lanes(odd0, odd1);
        return;
    }
    const __m512i pairs0 = add_sums(even0, odd0), pairs1 = add_sums(even1, odd1);
    if (blocks == 2) {
        out[0] = even_lanes(pairs0, pairs1);
        out[1] = odd_lanes(pairs0, pairs1);
        return;
    }
    out[0] = add_sums(even_lanes(pairs0, pairs1), odd_lanes(pairs0, pairs1));
}

/* The tile for one row, `blocks` blocks a line. Four rows are read for RUN lines before the next four, so that memory
 * sees longer runs. */
LESONNX_INLINE void line_tile(const lesonnx_format *f, int bits, int blocks, const tile_source *source,
                              const uint8_t *row, fvec *acc) {
    const int expand = 8 / bits;
    const int64_t stride = f->weight_stride, lines = stride / LINE_BYTES;
    const int32_t *zero_sums = (const int32_t *)(row + f->sums_at);
    const float *input_scales = (const float *)(row + f->scales_at);
    float scales[SCALE_BLOCKS * TILE_COLUMNS] __attribute__((aligned(64)));
    *acc = zero_fvec();
    for (int64_t first = 0; first < lines; first += RUN) {
        const int run = (int)lesonnx_min(RUN, lines - first);
        __m512i quads[RUN][4];
        for (int quad = 0; quad < 4; quad++) {
            for (int s = 0; s < run; s++) {
                const int64_t at = (first + s) * LINE_BYTES;
                __m512i input[4], sum[4];
                line_input(row + at * expand, bits, input);
                for (int v = 0; v < 4; v++) {
                    const int64_t from = (quad * 4 + v) * stride + at;
                    const __m512i raw = _mm512_loadu_si512(source->weights + from);
                    if (source->ahead) {
                        prefetch(source->ahead + from);
                    }
                    sum[v] = zero_ivec();
                    for (int r = 0; r < expand; r++) {
                        sum[v] = _mm512_dpbusd_epi32(sum[v], granule(raw, bits, r), input[r]);
                    }
                }
                columns_of(sum, 1, &quads[s][quad]);
            }
        }
        for (int s = 0; s < run; s++) {
            const int64_t block = (first + s) * blocks;
            __m512i whole[4];
            blocks_of(quads[s], blocks, whole);
            if (block % SCALE_BLOCKS == 0) {
                transpose_scales(source->scales, f->blocks, block, scales);
            }
            for (int i = 0; i < blocks; i++) {
                const fvec scale =
                    scale_by(load_floats(scales + (block + i) % SCALE_BLOCKS * TILE_COLUMNS), input_scales[block + i]);
                *acc = fused(to_float(add_int(whole[i], zero_sums[block + i])), scale, *acc);
            }
        }
    }
}

/* 0 where it does not apply: rows that are not whole lines, and 8 bits, which gain nothing (docs/kernel.md). */
LESONNX_INLINE int one_row_tile(const lesonnx_format *f, int bits, const tile_source *source, const uint8_t *row,
                                fvec *acc) {
    if (bits == 8 || f->weight_stride % LINE_BYTES) {
        return 0;
    }
    switch (f->units) {
        case 4: line_tile(f, bits, 1, source, row, acc); break;
        case 2: line_tile(f, bits, 2, source, row, acc); break;
        default: line_tile(f, bits, 4, source, row, acc); break;
    }
    return 1;
}

#define ONE_ROW_TILE one_row_tile

#endif
