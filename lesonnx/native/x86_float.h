/* bits 32 on x86: 16 lanes in two 256-bit accumulators, up to 4 rows at a time. */
#ifndef LESONNX_X86_FLOAT_H
#define LESONNX_X86_FLOAT_H

#include "kernel.h"

/* ((0+1)+(2+3)) + ((4+5)+(6+7)) */
LESONNX_INLINE float add_lanes(__m256 a) {
    const __m256 pairs = _mm256_hadd_ps(a, a);
    const __m256 fours = _mm256_hadd_ps(pairs, pairs);
    return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
}

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
        const float sum = add_lanes(_mm256_add_ps(acc[m][0], acc[m][1]));
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
