/* What tile.h and an instruction set's own ways of it share: unpacking, adding up, scales. See tile.h for the terms. */
#ifndef LESONNX_TILE_BASE_H
#define LESONNX_TILE_BASE_H

#include "scalar.h"

#define TILE_COLUMNS (4 * LANES)
#define SCALE_BLOCKS 8 /* blocks whose scales are transposed together, a multiple of 4 and of any `parts` */

LESONNX_INLINE ivec granule(ivec raw, int bits, int r) {
    if (bits == 8) {
        return raw;
    }
    const int mask = (1 << bits) - 1;
    return r == 0 ? and_byte(raw, mask) : and_byte(shift_right(raw, r * bits), mask);
}

/* Four registers to one per block of the step (`parts`), columns in order. */
LESONNX_INLINE void columns_of(const ivec in[4], int parts, ivec *out) {
    const ivec even0 = even(in[0], in[1]), odd0 = odd(in[0], in[1]);
    const ivec even1 = even(in[2], in[3]), odd1 = odd(in[2], in[3]);
    if (parts == 4) {
        out[0] = even(even0, even1);
        out[1] = even(odd0, odd1);
        out[2] = odd(even0, even1);
        out[3] = odd(odd0, odd1);
        return;
    }
    const ivec pairs0 = add_sums(even0, odd0), pairs1 = add_sums(even1, odd1);
    if (parts == 2) {
        out[0] = even(pairs0, pairs1);
        out[1] = odd(pairs0, pairs1);
        return;
    }
    out[0] = add_sums(even(pairs0, pairs1), odd(pairs0, pairs1));
}

/* Scales of blocks first..first+SCALE_BLOCKS-1, where they exist, to out[block - first][column]. Four blocks are
 * loaded at a time; the last four of a row may overlap those before, so that nothing past the row is read. */
LESONNX_INLINE void transpose_scales(const float *scales, int64_t blocks, int64_t first, float *out) {
    if (blocks < 4) {
        for (int64_t b = 0; b < blocks; b++) {
            for (int n = 0; n < TILE_COLUMNS; n++) {
                out[b * TILE_COLUMNS + n] = scales[n * blocks + b];
            }
        }
        return;
    }
    for (int64_t b = first; b < lesonnx_min(first + SCALE_BLOCKS, blocks); b += 4) {
        const int64_t from = lesonnx_min(b, blocks - 4);
        ivec rows[4], by_block[4];
        for (int v = 0; v < 4; v++) {
            rows[v] = load_rows((const uint8_t *)(scales + v * blocks + from), blocks * 4);
        }
        columns_of(rows, 4, by_block);
        for (int i = 0; i < 4; i++) {
            if (from + i >= first) {
                store_panel((uint8_t *)(out + (from + i - first) * TILE_COLUMNS), by_block[i]);
            }
        }
    }
}

/* Weights of a tile: in the pack (`weights` at its first row), or in a panel. */
typedef struct {
    const uint8_t *weights;
    const float *scales;
    const uint8_t *ahead; /* the weights to read after these, or NULL */
} tile_source;

#endif
