/* 256-bit vectors for tile.h: two columns a register. */
#ifndef LESONNX_X86_256_H
#define LESONNX_X86_256_H

#include "kernel.h"

#define LANES 2

typedef __m256i ivec;
typedef __m256 fvec;

LESONNX_INLINE ivec load_rows(const uint8_t *p, int64_t stride) {
    const __m128i low = _mm_loadu_si128((const __m128i *)p);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_loadu_si128((const __m128i *)(p + 4 * stride)), 1);
}
LESONNX_INLINE ivec load_panel(const uint8_t *p) { return _mm256_load_si256((const __m256i *)p); }
LESONNX_INLINE void store_panel(uint8_t *p, ivec x) { _mm256_store_si256((__m256i *)p, x); }
LESONNX_INLINE ivec broadcast_unit(const uint8_t *p) {
    return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)p));
}
LESONNX_INLINE ivec and_byte(ivec x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi8((char)mask)); }
LESONNX_INLINE ivec shift_right(ivec x, int n) { return _mm256_srli_epi16(x, n); }
LESONNX_INLINE ivec zero_ivec(void) { return _mm256_setzero_si256(); }
LESONNX_INLINE ivec even(ivec a, ivec b) {
    return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0x88));
}
LESONNX_INLINE ivec odd(ivec a, ivec b) {
    return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0xDD));
}
LESONNX_INLINE ivec add_sums(ivec a, ivec b) { return _mm256_add_epi32(a, b); }
LESONNX_INLINE ivec add_int(ivec x, int32_t value) { return _mm256_add_epi32(x, _mm256_set1_epi32(value)); }
LESONNX_INLINE fvec to_float(ivec x) { return _mm256_cvtepi32_ps(x); }
LESONNX_INLINE fvec scale_by(fvec x, float value) { return _mm256_mul_ps(x, _mm256_set1_ps(value)); }
LESONNX_INLINE fvec fused(fvec a, fvec b, fvec acc) { return _mm256_fmadd_ps(a, b, acc); }
LESONNX_INLINE fvec load_floats(const float *p) { return _mm256_loadu_ps(p); }
LESONNX_INLINE void store_floats(float *p, fvec x) { _mm256_storeu_ps(p, x); }
LESONNX_INLINE fvec add_floats(fvec a, fvec b) { return _mm256_add_ps(a, b); }
LESONNX_INLINE fvec zero_fvec(void) { return _mm256_setzero_ps(); }
/* To the second level: the first has too few miss buffers to keep memory busy. */
LESONNX_INLINE void prefetch(const uint8_t *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

#endif
