/* AVX-512 VNNI: vpdpbusd on 512 bits, four columns a register. */
#include "kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#endif

#include "elementwise.h"

#define LANES 4
#define MAX_ROWS 4
#define PANEL_ROWS 12
#define SIGNED_FULL 0

typedef __m512i ivec;
typedef __m512 fvec;

LESONNX_INLINE ivec load_rows(const uint8_t *p, int64_t stride) {
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + 4 * stride)), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + 8 * stride)), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + 12 * stride)), 3);
}
LESONNX_INLINE ivec load_panel(const uint8_t *p) { return _mm512_load_si512(p); }
LESONNX_INLINE void store_panel(uint8_t *p, ivec x) { _mm512_store_si512(p, x); }
LESONNX_INLINE ivec broadcast_unit(const uint8_t *p) {
    return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)p));
}
LESONNX_INLINE ivec and_byte(ivec x, int mask) { return _mm512_and_si512(x, _mm512_set1_epi8((char)mask)); }
LESONNX_INLINE ivec shift_right(ivec x, int n) { return _mm512_srli_epi16(x, (unsigned)n); }
LESONNX_INLINE ivec zero_ivec(void) { return _mm512_setzero_si512(); }
LESONNX_INLINE ivec dot(int full, int parts, ivec acc, ivec weight, ivec input) {
    (void)full, (void)parts;
    return _mm512_dpbusd_epi32(acc, weight, input);
}
LESONNX_INLINE ivec sums(int full, ivec acc) {
    (void)full;
    return acc;
}
LESONNX_INLINE ivec even(ivec a, ivec b) {
    return _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), 0x88));
}
LESONNX_INLINE ivec odd(ivec a, ivec b) {
    return _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), 0xDD));
}
LESONNX_INLINE ivec add_sums(ivec a, ivec b) { return _mm512_add_epi32(a, b); }
LESONNX_INLINE ivec add_int(ivec x, int32_t value) { return _mm512_add_epi32(x, _mm512_set1_epi32(value)); }
LESONNX_INLINE fvec to_float(ivec x) { return _mm512_cvtepi32_ps(x); }
LESONNX_INLINE fvec scale_by(fvec x, float value) { return _mm512_mul_ps(x, _mm512_set1_ps(value)); }
LESONNX_INLINE fvec fused(fvec a, fvec b, fvec acc) { return _mm512_fmadd_ps(a, b, acc); }
LESONNX_INLINE fvec load_floats(const float *p) { return _mm512_loadu_ps(p); }
LESONNX_INLINE void store_floats(float *p, fvec x) { _mm512_storeu_ps(p, x); }
LESONNX_INLINE fvec add_floats(fvec a, fvec b) { return _mm512_add_ps(a, b); }
LESONNX_INLINE fvec zero_fvec(void) { return _mm512_setzero_ps(); }
/* To the second level: the first has too few miss buffers to keep memory busy. */
LESONNX_INLINE void prefetch(const uint8_t *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

#include "x86_512_row.h"

#include "tile.h"
#include "x86_float.h"

static void multiply(const lesonnx_product *p) { (p->format->bits == 32 ? multiply_float : multiply_tiles)(p); }

const lesonnx_isa_table lesonnx_avx512vnni = {"avx512vnni", lesonnx_prepare, multiply, lesonnx_activate,
                                              tile_scratch_bytes};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
