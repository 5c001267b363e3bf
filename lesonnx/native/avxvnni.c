/* AVX-VNNI: vpdpbusd on 256 bits in its VEX encoding (client processors without AVX-512). */
#include "kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avxvnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avxvnni")
#endif

#include "elementwise.h"
#include "x86_256.h"

#define MAX_ROWS 2
#define PANEL_ROWS 8
#define SIGNED_FULL 0

LESONNX_INLINE ivec dot(int full, int parts, ivec acc, ivec weight, ivec input) {
    (void)full, (void)parts;
    return _mm256_dpbusd_avx_epi32(acc, weight, input);
}
LESONNX_INLINE ivec sums(int full, ivec acc) {
    (void)full;
    return acc;
}

#include "tile.h"
#include "x86_float.h"

static void multiply(const lesonnx_product *p) { (p->format->bits == 32 ? multiply_float : multiply_tiles)(p); }

const lesonnx_isa_table lesonnx_avxvnni = {"avxvnni", lesonnx_prepare, multiply, lesonnx_activate, tile_scratch_bytes};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
