/* AVX2 without a dot-product instruction: maddubs and madd sum bytes 4j..4j+3 into lane j. */
#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

#include "elementwise.h"

/* maddubs adds two products in 16 bits. Weights of 4 and 2 bits leave room for four of those; with 8 bits the weight
 * is made signed first and its sign moved to the input, so that |w| * a never saturates (128 * 127 * 2 < 2^15). */
LESONNX_INLINE __m256i step_dot(const __m256i *w, int vectors, int full, const uint8_t *unit) {
    const __m256i *input = (const __m256i *)unit;
    const __m256i ones = _mm256_set1_epi16(1);
    if (full) {
        __m256i sum = _mm256_setzero_si256();
        for (int v = 0; v < vectors; v++) {
            const __m256i weight = _mm256_xor_si256(w[v], _mm256_set1_epi8((char)0x80));
            const __m256i signed_input = _mm256_sign_epi8(_mm256_load_si256(input + v), weight);
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weight), signed_input);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
        return sum;
    }
    __m256i pairs = _mm256_maddubs_epi16(w[0], _mm256_load_si256(input));
    for (int v = 1; v < vectors; v++) {
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[v], _mm256_load_si256(input + v)));
    }
    return _mm256_add_epi32(_mm256_madd_epi16(pairs, ones), _mm256_load_si256(input + vectors));
}

#include "x86_256.h"
#include "x86_256_multiply.h"

const lesonnx_isa_table lesonnx_avx2 = {"avx2", lesonnx_prepare, multiply, lesonnx_activate, scratch_bytes};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
