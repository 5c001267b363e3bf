/* AVX2 without a dot-product instruction: maddubs and madd sum bytes in groups of four. */
#include "kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

#include "elementwise.h"
#include "x86_256.h"

#define MAX_ROWS 2
#define PANEL_ROWS 8
#define SIGNED_FULL 1

/* maddubs adds two products in 16 bits. The 8 granules of a block leave room there for weights of 4 and 2 bits
 * (8 * 2 * 15 * 127 < 2^15). With 8 bits the weight is made signed first and its sign moved to the input, so that
 * |w| * a never saturates (2 * 128 * 127 < 2^15). */
LESONNX_INLINE ivec dot(int full, int parts, ivec acc, ivec weight, ivec input) {
    (void)parts;
    if (!full) {
        return _mm256_add_epi16(acc, _mm256_maddubs_epi16(weight, input));
    }
    const ivec based = _mm256_xor_si256(weight, _mm256_set1_epi8((char)0x80));
    const ivec pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(based), _mm256_sign_epi8(input, based));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
LESONNX_INLINE ivec sums(int full, ivec acc) { return full ? acc : _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }

#include "tile.h"
#include "x86_float.h"

static void multiply(const lesonnx_product *p) { (p->format->bits == 32 ? multiply_float : multiply_tiles)(p); }

const lesonnx_isa_table lesonnx_avx2 = {"avx2", lesonnx_prepare, multiply, lesonnx_activate, tile_scratch_bytes};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
