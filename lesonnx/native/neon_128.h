/* 128-bit vectors of AArch64 for tile.h: one column a register; and the float product (bits 32). */
#ifndef LESONNX_NEON_128_H
#define LESONNX_NEON_128_H

#include "kernel.h"

#define LANES 1
#define MAX_ROWS 4
#define PANEL_ROWS 12
#define SIGNED_FULL 1

typedef int32x4_t ivec;
typedef float32x4_t fvec;

LESONNX_INLINE ivec load_rows(const uint8_t *p, int64_t stride) {
    (void)stride; /* a register is one row */
    return vreinterpretq_s32_u8(vld1q_u8(p));
}
LESONNX_INLINE ivec load_panel(const uint8_t *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
LESONNX_INLINE void store_panel(uint8_t *p, ivec x) { vst1q_u8(p, vreinterpretq_u8_s32(x)); }
LESONNX_INLINE ivec broadcast_unit(const uint8_t *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
LESONNX_INLINE ivec and_byte(ivec x, int mask) {
    return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(x), vdupq_n_u8((uint8_t)mask)));
}
LESONNX_INLINE ivec shift_right(ivec x, int n) {
    const uint8x16_t bytes = vreinterpretq_u8_s32(x); /* the instruction takes its count as a constant */
    return vreinterpretq_s32_u8(n == 2 ? vshrq_n_u8(bytes, 2) : n == 4 ? vshrq_n_u8(bytes, 4) : vshrq_n_u8(bytes, 6));
}
LESONNX_INLINE ivec zero_ivec(void) { return vdupq_n_s32(0); }
/* Weights of 2 and 4 bits are signed bytes as they are; those of 8 lose their zero point here. */
LESONNX_INLINE int8x16_t signed_weight(int full, ivec weight) {
    return vreinterpretq_s8_s32(full ? veorq_s32(weight, vreinterpretq_s32_u8(vdupq_n_u8(0x80))) : weight);
}
LESONNX_INLINE ivec sums(int full, ivec acc) {
    (void)full;
    return acc;
}
LESONNX_INLINE ivec even(ivec a, ivec b) { return vuzp1q_s32(a, b); }
LESONNX_INLINE ivec odd(ivec a, ivec b) { return vuzp2q_s32(a, b); }
LESONNX_INLINE ivec add_sums(ivec a, ivec b) { return vaddq_s32(a, b); }
LESONNX_INLINE ivec add_int(ivec x, int32_t value) { return vaddq_s32(x, vdupq_n_s32(value)); }
LESONNX_INLINE fvec to_float(ivec x) { return vcvtq_f32_s32(x); }
LESONNX_INLINE fvec scale_by(fvec x, float value) { return vmulq_n_f32(x, value); }
LESONNX_INLINE fvec fused(fvec a, fvec b, fvec acc) { return vfmaq_f32(acc, a, b); }
LESONNX_INLINE fvec load_floats(const float *p) { return vld1q_f32(p); }
LESONNX_INLINE void store_floats(float *p, fvec x) { vst1q_f32(p, x); }
LESONNX_INLINE fvec add_floats(fvec a, fvec b) { return vaddq_f32(a, b); }
LESONNX_INLINE fvec zero_fvec(void) { return vdupq_n_f32(0.0f); }
/* To the second level: the first has too few miss buffers to keep memory busy. */
LESONNX_INLINE void prefetch(const uint8_t *p) { __builtin_prefetch(p, 0, 2); }

LESONNX_INLINE void float_tile(const lesonnx_product *p, int64_t i, int mr, int64_t n) {
    const lesonnx_format *f = p->format;
    const float *w = (const float *)(p->weights + n * f->weight_stride);
    float32x4_t acc[4][4];
    for (int m = 0; m < mr; m++) {
        for (int k = 0; k < 4; k++) {
            acc[m][k] = vdupq_n_f32(0.0f);
        }
    }
    for (int64_t step = 0; step < f->steps; step++) {
        float tail[16] = {0};
        const float *from = w + step * 16;
        if (step == f->full_steps) {
            memcpy(tail, from, (size_t)(f->columns - step * 16) * 4);
            from = tail;
        }
        for (int k = 0; k < 4; k++) {
            const float32x4_t weight = vld1q_f32(from + k * 4);
            for (int m = 0; m < mr; m++) {
                const float *row = (const float *)p->rows[i + m] + step * 16;
                acc[m][k] = vfmaq_f32(acc[m][k], weight, vld1q_f32(row + k * 4));
            }
        }
    }
    for (int m = 0; m < mr; m++) {
        const float32x4_t pairs = vpaddq_f32(vaddq_f32(acc[m][0], acc[m][2]), vaddq_f32(acc[m][1], acc[m][3]));
        const float32x4_t fours = vpaddq_f32(pairs, pairs);
        const float sum = vgetq_lane_f32(fours, 0) + vgetq_lane_f32(fours, 1);
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
