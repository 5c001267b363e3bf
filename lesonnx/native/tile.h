/* The product in tiles of 4 * LANES columns, written once for every instruction set with vectors.
 *
 * Register v of four holds 16 bytes each of the weight rows v, v + 4, v + 8, ...: a 128-bit lane is one column. So a
 * block's integer sums of four registers, added in neighbouring pairs twice, come out as the columns in order, and one
 * float multiply-add serves 4 * LANES outputs. Few rows read the pack as it lies; for many, a tile's weights are
 * unpacked once into scratch (the panel) and all rows go over it.
 *
 * The including file (after its target pragma) defines LANES, ivec, fvec and:
 *   load_rows(p, stride)  16 bytes from p, p + 4 stride, p + 8 stride, ...     load_panel(p), store_panel(p, x)
 *   broadcast_unit(p)     16 bytes in every lane                              and_byte(x, mask), shift_right(x, n)
 *   dot(full, parts, acc, w, a)  acc + bytes of w (unsigned) times a (signed), summed in groups of four (with parts 1
 *                         within the lane in any way); acc starts as zero_ivec()
 *   sums(full, acc)       acc as int32                                        SIGNED_FULL: 8-bit sums are zero-based
 *   even(a, b), odd(a, b) int32 0 and 2 (1 and 3) of a, then of b, by lane    add_sums(a, b), add_int(x, value)
 *   to_float(x), scale_by(x, value), fused(a, b, acc), load_floats, store_floats, add_floats, zero_fvec()
 *   prefetch(address), MAX_ROWS (1, 2 or 4 rows in a tile), PANEL_ROWS (rows from which a panel pays)
 */
#ifndef LESONNX_TILE_H
#define LESONNX_TILE_H

#include "tile_base.h"

/* One step's integer sums of mr rows. `raw` and `stride` are the packed rows, or `raw` the panel's step. */
LESONNX_INLINE void step_sums(int bits, int parts, int panel, int full, int mr, int units, const uint8_t *raw,
                              int64_t stride, const uint8_t *const *rows, int64_t at, const uint8_t *ahead,
                              ivec acc[][4]) {
    const int expand = panel ? 1 : 8 / bits;
    for (int m = 0; m < mr; m++) {
        for (int v = 0; v < 4; v++) {
            acc[m][v] = zero_ivec();
        }
    }
    for (int u = 0; u < units; u++) {
        ivec packed[4];
        for (int v = 0; v < 4; v++) {
            if (panel) {
                packed[v] = load_panel(raw + (u * 4 + v) * LANES * LESONNX_UNIT);
            } else {
                packed[v] = load_rows(raw + v * stride + u * LESONNX_UNIT, stride);
                if (ahead && v % (4 / LANES) == 0) { /* once a cache line */
                    prefetch(ahead + (u * 4 + v) * LANES * LESONNX_UNIT);
                }
            }
        }
        for (int r = 0; r < expand; r++) {
            ivec input[4];
            for (int m = 0; m < mr; m++) {
                input[m] = broadcast_unit(rows[m] + at + (u * expand + r) * LESONNX_UNIT);
            }
            for (int v = 0; v < 4; v++) {
                const ivec weight = panel ? packed[v] : granule(packed[v], bits, r);
                for (int m = 0; m < mr; m++) {
                    acc[m][v] = dot(full, parts, acc[m][v], weight, input[m]);
                }
            }
        }
    }
    for (int m = 0; m < mr; m++) {
        for (int v = 0; v < 4; v++) {
            acc[m][v] = sums(full, acc[m][v]);
        }
    }
}

/* mr rows times the columns of a tile, to acc[m]. bits and parts are constants where this is inlined. */
LESONNX_INLINE void tile(const lesonnx_format *f, int bits, int parts, int panel, int mr, const tile_source *source,
                         const uint8_t *const *rows, fvec *acc) {
    const int full = bits == 8;
    const int units = panel ? f->units * f->expand : f->units;
    const int64_t row_step = f->step_columns;
    const int64_t source_step = panel ? row_step * TILE_COLUMNS : f->step_bytes;
    float scale_buffer[SCALE_BLOCKS * TILE_COLUMNS] __attribute__((aligned(64)));
    uint8_t tail[TILE_COLUMNS * LESONNX_UNIT] __attribute__((aligned(64)));
    for (int m = 0; m < mr; m++) {
        acc[m] = zero_fvec();
    }
    for (int64_t step = 0; step < f->steps; step++) {
        const int64_t block = step * parts;
        const uint8_t *raw = source->weights + step * source_step;
        const uint8_t *ahead = NULL;
        int64_t stride = f->weight_stride;
        const float *scales =
            panel ? source->scales + block * TILE_COLUMNS : scale_buffer + block % SCALE_BLOCKS * TILE_COLUMNS;
        if (panel && source->ahead) { /* spread over the steps: a burst would overflow the miss buffers */
            for (int64_t line = 0; line < f->step_bytes * TILE_COLUMNS; line += 64) {
                prefetch(source->ahead + step * f->step_bytes * TILE_COLUMNS + line);
            }
        }
        if (!panel) {
            if (block % SCALE_BLOCKS == 0) {
                transpose_scales(source->scales, f->blocks, block, scale_buffer);
            }
            if (source->ahead) {
                ahead = source->ahead + step * source_step * TILE_COLUMNS;
            }
            if (parts > 1 && step == f->full_steps) {
                const int64_t left = stride - step * source_step;
                memset(tail, 0, sizeof tail);
                for (int n = 0; n < TILE_COLUMNS; n++) {
                    memcpy(tail + n * LESONNX_UNIT, raw + n * stride, (size_t)left);
                }
                raw = tail;
                stride = LESONNX_UNIT;
                ahead = NULL;
            }
        }
        ivec partial[4][4];
        step_sums(bits, parts, panel, full, mr, units, raw, stride, rows, step * row_step, ahead, partial);
        const int valid = parts == 1 ? 1 : (int)lesonnx_min(parts, f->blocks - block);
        for (int m = 0; m < mr; m++) {
            ivec whole[4];
            columns_of(partial[m], parts, whole);
            const int32_t *zero_sums = (const int32_t *)(rows[m] + f->sums_at) + block;
            const float *input_scales = (const float *)(rows[m] + f->scales_at) + block;
            for (int i = 0; i < parts; i++) {
                if (i < valid) {
                    const ivec sum = full && SIGNED_FULL ? whole[i] : add_int(whole[i], zero_sums[i]);
                    const fvec scale = scale_by(load_floats(scales + i * TILE_COLUMNS), input_scales[i]);
                    acc[m] = fused(to_float(sum), scale, acc[m]);
                }
            }
        }
    }
}

#ifndef ONE_ROW_TILE /* an instruction set may have a better way for one row of packed weights; 1 if it took it */
#define ONE_ROW_TILE(f, bits, source, row, acc) 0
#endif

/* A tile for mr rows, then the bias, then those of its columns that the product asks for. */
LESONNX_INLINE void tile_out(const lesonnx_product *p, int bits, int parts, int panel, int mr,
                             const tile_source *source, int64_t i, int64_t base, int64_t n) {
    fvec acc[4];
    const int done = mr == 1 && parts == 1 && !panel && ONE_ROW_TILE(p->format, bits, source, p->rows[i], acc);
    if (!done) {
        tile(p->format, bits, parts, panel, mr, source, p->rows + i, acc);
    }
    for (int m = 0; m < mr; m++) {
        if (p->bias) {
            acc[m] = add_floats(acc[m], load_floats(p->bias + base));
        }
        if (base == n && n + TILE_COLUMNS <= p->last) {
            store_floats(p->out[i + m] + (n - p->first), acc[m]);
        } else {
            float values[TILE_COLUMNS];
            store_floats(values, acc[m]);
            const int64_t end = lesonnx_min(base + TILE_COLUMNS, p->last);
            memcpy(p->out[i + m] + (n - p->first), values + (n - base), (size_t)(end - n) * 4);
        }
    }
}

LESONNX_INLINE void all_rows(const lesonnx_product *p, int bits, int parts, int panel, const tile_source *source,
                             int64_t base, int64_t n) {
    tile_source fetched = *source; /* only the first rows prefetch what comes after */
    fetched.ahead = NULL;
    int64_t i = 0;
    if (MAX_ROWS == 4) {
        for (; i + 4 <= p->m; i += 4) {
            tile_out(p, bits, parts, panel, 4, i ? &fetched : source, i, base, n);
        }
    }
    for (; i + 2 <= p->m; i += 2) {
        tile_out(p, bits, parts, panel, 2, i ? &fetched : source, i, base, n);
    }
    if (i < p->m) {
        tile_out(p, bits, parts, panel, 1, i ? &fetched : source, i, base, n);
    }
}

/* One function for each way to unpack, so that the inner loops are straight code. */
#define TILE_ROWS(name, bits, parts, panel)                                                          \
    static void name(const lesonnx_product *p, const tile_source *source, int64_t base, int64_t n) { \
        all_rows(p, bits, parts, panel, source, base, n);                                            \
    }
TILE_ROWS(packed_8, 8, 1, 0)
TILE_ROWS(packed_4, 4, 1, 0)
TILE_ROWS(packed_4x2, 4, 2, 0)
TILE_ROWS(packed_2, 2, 1, 0)
TILE_ROWS(packed_2x2, 2, 2, 0)
TILE_ROWS(packed_2x4, 2, 4, 0)
TILE_ROWS(panel_full, 8, 1, 1)
TILE_ROWS(panel_1, 4, 1, 1)
TILE_ROWS(panel_2, 4, 2, 1)
TILE_ROWS(panel_4, 4, 4, 1)

typedef void tile_rows(const lesonnx_product *p, const tile_source *source, int64_t base, int64_t n);

static tile_rows *packed_rows(const lesonnx_format *f) {
    switch (f->bits * 8 + f->parts) {
        case 65: return packed_8;
        case 33: return packed_4;
        case 34: return packed_4x2;
        case 17: return packed_2;
        case 18: return packed_2x2;
        default: return packed_2x4;
    }
}

static tile_rows *panel_rows(const lesonnx_format *f) {
    return f->bits == 8 ? panel_full : f->parts == 1 ? panel_1 : f->parts == 2 ? panel_2 : panel_4;
}

LESONNX_INLINE void unpack_units(const lesonnx_format *f, int bits, const uint8_t *w, uint8_t *out) {
    const int64_t whole = f->weight_stride / LESONNX_UNIT;
    for (int64_t u = 0; u < whole; u++) {
        for (int v = 0; v < 4; v++) {
            const ivec raw = load_rows(w + v * f->weight_stride + u * LESONNX_UNIT, f->weight_stride);
            for (int r = 0; r < 8 / bits; r++) {
                store_panel(out + ((u * (8 / bits) + r) * 4 + v) * LANES * LESONNX_UNIT, granule(raw, bits, r));
            }
        }
    }
    const int64_t left = f->weight_stride - whole * LESONNX_UNIT;
    if (left) {
        uint8_t tail[TILE_COLUMNS * LESONNX_UNIT] = {0};
        for (int n = 0; n < TILE_COLUMNS; n++) {
            memcpy(tail + n * LESONNX_UNIT, w + n * f->weight_stride + whole * LESONNX_UNIT, (size_t)left);
        }
        for (int v = 0; v < 4; v++) {
            const ivec raw = load_rows(tail + v * LESONNX_UNIT, LESONNX_UNIT);
            for (int r = 0; r < 8 / bits; r++) {
                store_panel(out + ((whole * (8 / bits) + r) * 4 + v) * LANES * LESONNX_UNIT, granule(raw, bits, r));
            }
        }
    }
}

LESONNX_INLINE int64_t panel_weight_bytes(const lesonnx_format *f) { return f->steps * f->step_columns * TILE_COLUMNS; }

/* The tile at `source` unpacked into `panel`. */
LESONNX_INLINE tile_source unpack_tile(const lesonnx_format *f, const tile_source *source, uint8_t *panel) {
    float *scales = (float *)(panel + panel_weight_bytes(f));
    switch (f->bits) {
        case 8: unpack_units(f, 8, source->weights, panel); break;
        case 4: unpack_units(f, 4, source->weights, panel); break;
        default: unpack_units(f, 2, source->weights, panel); break;
    }
    for (int64_t b = 0; b < f->blocks; b += SCALE_BLOCKS) {
        transpose_scales(source->scales, f->blocks, b, scales + b * TILE_COLUMNS);
    }
    const tile_source unpacked = {panel, scales, source->ahead};
    return unpacked;
}

LESONNX_INLINE void prefetch_scales(const lesonnx_format *f, const float *scales) {
    for (int64_t at = 0; at < f->blocks * TILE_COLUMNS * 4; at += 64) {
        prefetch((const uint8_t *)scales + at);
    }
}

static void multiply_tiles(const lesonnx_product *p) {
    const lesonnx_format *f = p->format;
    if (f->rows < TILE_COLUMNS) {
        lesonnx_scalar_multiply(p);
        return;
    }
    const int unpack = p->m >= PANEL_ROWS;
    tile_rows *run = unpack ? panel_rows(f) : packed_rows(f);
    for (int64_t n = p->first; n < p->last; n += TILE_COLUMNS) {
        /* The matrix's last tile is moved back to be whole: columns before n are computed again, and not stored. */
        const int64_t base = lesonnx_min(n, f->rows - TILE_COLUMNS);
        tile_source source = {p->weights + base * f->weight_stride, p->scales + base * f->blocks, p->next};
        if (n + TILE_COLUMNS < p->last) {
            source.ahead = source.weights + TILE_COLUMNS * f->weight_stride;
            prefetch_scales(f, source.scales + TILE_COLUMNS * f->blocks);
        }
        if (unpack) {
            source = unpack_tile(f, &source, p->scratch);
        }
        run(p, &source, base, n);
    }
}

static size_t tile_scratch_bytes(const lesonnx_format *f, int64_t m) {
    return f->bits == 32 || m < PANEL_ROWS
               ? 0
               : (size_t)(panel_weight_bytes(f) + (f->blocks + SCALE_BLOCKS) * TILE_COLUMNS * 4);
}

#endif
