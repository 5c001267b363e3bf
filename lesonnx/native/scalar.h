/* The canonical arithmetic as plain loops: the reference of portable.c, and what other files do with tiny matrices. */
#ifndef LESONNX_SCALAR_H
#define LESONNX_SCALAR_H

#include <math.h>

#include "kernel.h"

/* Packed byte `i` of a block, its granule r: the bytes hold 8 / bits weights, low bits first. */
LESONNX_INLINE int32_t lesonnx_unpack(const uint8_t *block, int64_t i, int bits, int r) {
    return (block[i] >> (r * bits)) & ((1 << bits) - 1);
}

LESONNX_INLINE float lesonnx_scalar_product(const lesonnx_format *f, const uint8_t *weights, const float *scales,
                                            const uint8_t *row) {
    const int8_t *levels = (const int8_t *)row;
    const int32_t *sums = (const int32_t *)(row + f->sums_at);
    const float *input_scales = (const float *)(row + f->scales_at);
    const int64_t block_bytes = f->step_bytes / f->parts;
    float acc = 0.0f;
    for (int64_t b = 0; b < f->blocks; b++) {
        int32_t sum = sums[b];
        for (int64_t at = b * block_bytes; at < (b + 1) * block_bytes; at++) {
            const int8_t *unit = levels + at / LESONNX_UNIT * LESONNX_UNIT * f->expand;
            for (int r = 0; r < f->expand; r++) {
                sum += lesonnx_unpack(weights, at, f->bits, r) * unit[r * LESONNX_UNIT + at % LESONNX_UNIT];
            }
        }
        acc = fmaf((float)sum, input_scales[b] * scales[b], acc);
    }
    return acc;
}

/* bits 32: element e goes to lane e mod 16; lanes j and j + 8 are added first, then neighbours. */
LESONNX_INLINE float lesonnx_scalar_float_product(const lesonnx_format *f, const float *weights, const float *row) {
    float lanes[16] = {0};
    for (int64_t i = 0; i < f->steps * 16; i++) {
        lanes[i % 16] = fmaf(i < f->columns ? weights[i] : 0.0f, row[i], lanes[i % 16]);
    }
    for (int j = 0; j < 8; j++) {
        lanes[j] += lanes[j + 8];
    }
    return lesonnx_add_lanes(lanes);
}

LESONNX_INLINE void lesonnx_scalar_multiply(const lesonnx_product *p) {
    const lesonnx_format *f = p->format;
    for (int64_t n = p->first; n < p->last; n++) {
        const uint8_t *weights = p->weights + n * f->weight_stride;
        for (int64_t i = 0; i < p->m; i++) {
            const float sum = f->bits == 32
                                  ? lesonnx_scalar_float_product(f, (const float *)weights, (const float *)p->rows[i])
                                  : lesonnx_scalar_product(f, weights, p->scales + n * f->blocks, p->rows[i]);
            p->out[i][n - p->first] = p->bias ? sum + p->bias[n] : sum;
        }
    }
}

#endif
