/* AVX-VNNI: the 256-bit body with vpdpbusd in its VEX encoding (client processors without AVX-512). */
#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avxvnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avxvnni")
#endif

#include "elementwise.h"

LESONNX_INLINE __m256i step_dot(const __m256i *w, int vectors, int full, const uint8_t *unit) {
    const __m256i *input = (const __m256i *)unit;
    __m256i sum = _mm256_load_si256(input + vectors);
    (void)full;
    for (int v = 0; v < vectors; v++) {
        sum = _mm256_dpbusd_avx_epi32(sum, w[v], _mm256_load_si256(input + v));
    }
    return sum;
}

#include "x86_256.h"
#include "x86_256_multiply.h"

const lesonnx_isa_table lesonnx_avxvnni = {"avxvnni", lesonnx_prepare, multiply, lesonnx_activate, scratch_bytes};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
