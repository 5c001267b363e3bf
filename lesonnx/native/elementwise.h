/* Quantization of inputs and activations: plain C that each instruction-set file compiles for itself.
 *
 * Every element is computed on its own with IEEE operations and fmaf, so that compilers may vectorize as they like
 * without changing a bit. No libm function but fmaf is used. Include it after the file's target pragma.
 */
#ifndef LESONNX_ELEMENTWISE_H
#define LESONNX_ELEMENTWISE_H

#include <math.h>

#include "kernel.h"

LESONNX_INLINE uint32_t lesonnx_bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

LESONNX_INLINE float lesonnx_float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Adding 1.5 * 2^23 rounds a small float to the nearest even integer, which then lies in the low bits. */
#define LESONNX_MAGIC 12582912.0f
#define LESONNX_MAGIC_BITS 0x4B400000u

/* One block to int8 as MatMulNBits does at accuracy_level=4: scale = max|x| / 127, q = round(x * (127 / max|x|)).
 * A maximum under 2^-100, where 127 / max could overflow, counts as zero. Inf or NaN gives a NaN scale. */
LESONNX_INLINE float lesonnx_quantize_block(const float *x, int64_t n, int64_t block, int8_t *q) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t magnitude = lesonnx_bits_of(x[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest < 0x0d800000u || largest >= 0x7f800000u) {
        memset(q, 0, (size_t)block);
        return largest >= 0x7f800000u ? lesonnx_float_of(0x7fc00000u) : 0.0f;
    }
    const float maximum = lesonnx_float_of(largest);
    const float inverse = 127.0f / maximum;
    for (int64_t i = 0; i < n; i++) {
        float shifted = x[i] * inverse + LESONNX_MAGIC;
        q[i] = (int8_t)(int32_t)(lesonnx_bits_of(shifted) - LESONNX_MAGIC_BITS);
    }
    if (n < block) {
        memset(q + n, 0, (size_t)(block - n));
    }
    return maximum / 127.0f;
}

/* The blocks of one step: levels in granule order, sums and scales. */
LESONNX_INLINE void lesonnx_prepare_step(const lesonnx_format *f, int bits, const float *x, int64_t step,
                                         uint8_t *row) {
    const int expand = 8 / bits;
    const int64_t block = f->block_size;
    int8_t q[128];
    int32_t *sums = (int32_t *)(row + f->sums_at) + step * f->parts;
    float *scales = (float *)(row + f->scales_at) + step * f->parts;
    for (int32_t part = 0; part < f->parts; part++) {
        const int64_t start = (step * f->parts + part) * block;
        const int64_t n = lesonnx_max(0, lesonnx_min(block, f->columns - start));
        int8_t *levels = q + part * block;
        if (n == 128) {
            scales[part] = lesonnx_quantize_block(x + start, 128, 128, levels);
        } else if (n == 32) {
            scales[part] = lesonnx_quantize_block(x + start, 32, block, levels);
        } else {
            scales[part] = lesonnx_quantize_block(n ? x + start : x, n, block, levels);
        }
        int32_t sum = 0;
        for (int64_t i = 0; i < block; i++) {
            sum += levels[i];
        }
        sums[part] = -(1 << (bits - 1)) * sum;
    }
    const int unit_levels = LESONNX_UNIT * expand;
    int8_t *ordered = (int8_t *)row + step * f->units * unit_levels;
    for (int32_t u = 0; u < f->units; u++) {
        for (int r = 0; r < expand; r++) {
            for (int i = 0; i < LESONNX_UNIT; i++) {
                ordered[u * unit_levels + r * LESONNX_UNIT + i] = q[u * unit_levels + i * expand + r];
            }
        }
    }
}

static void lesonnx_prepare(const lesonnx_format *f, const float *x, int64_t first, int64_t last, uint8_t *row) {
    if (f->bits == 32) {
        const int64_t end = lesonnx_min(f->columns, last * 16);
        memcpy(row + first * 64, x + first * 16, (size_t)(end - first * 16) * 4);
        memset(row + end * 4, 0, (size_t)(last * 16 - end) * 4);
        return;
    }
    for (int64_t step = first; step < last; step++) {
        switch (f->bits) {
            case 8: lesonnx_prepare_step(f, 8, x, step, row); break;
            case 4: lesonnx_prepare_step(f, 4, x, step, row); break;
            default: lesonnx_prepare_step(f, 2, x, step, row); break;
        }
    }
}

/* e^x within 1 ulp or so; x is held to [-87, 88], where the result is a normal float. Coefficients: Cephes expf. */
LESONNX_INLINE float lesonnx_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = fmaf(x, 1.44269504f, LESONNX_MAGIC);
    const float n = shifted - LESONNX_MAGIC;
    float r = fmaf(n, -0.693359375f, x);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p, r * r, r) + 1.0f;
    return p * lesonnx_float_of((lesonnx_bits_of(shifted) << 23) + 0x3f800000u);
}

/* x * sigmoid(s) */
LESONNX_INLINE float lesonnx_gated(float x, float s) { return x / (1.0f + lesonnx_exp(-s)); }

static void lesonnx_activate(const lesonnx_kind *kind, int64_t n, const float *gate, const float *up, float *out) {
    const float alpha = kind->alpha, limit = kind->limit;
    switch (kind->activation) {
        case LESONNX_SWIGLU:
            for (int64_t i = 0; i < n; i++) {
                out[i] = lesonnx_gated(gate[i], gate[i]) * up[i];
            }
            break;
        case LESONNX_GEGLU: /* 0.5 (1 + tanh z) = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3) */
            for (int64_t i = 0; i < n; i++) {
                const float x = gate[i];
                const float twice = x * fmaf(0.0713548162726f, x * x, 1.59576912161f);
                out[i] = lesonnx_gated(x, twice) * up[i];
            }
            break;
        case LESONNX_REGLU:
            for (int64_t i = 0; i < n; i++) {
                out[i] = (gate[i] < 0.0f ? 0.0f : gate[i]) * up[i];
            }
            break;
        default:
            for (int64_t i = 0; i < n; i++) {
                const float g = gate[i] > limit ? limit : gate[i];
                float u = up[i] > limit ? limit : up[i];
                u = u < -limit ? -limit : u;
                out[i] = (u + 1.0f) * lesonnx_gated(g, alpha * g);
            }
    }
}

#endif
