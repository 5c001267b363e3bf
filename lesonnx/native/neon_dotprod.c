/* NEON with the dot-product instructions of ARMv8.2 (most phones since 2018). */
#include "kernel.h"

#if defined(__aarch64__)
#include <arm_neon.h>

/* Clang before 16 (Apple's before 15) declares these intrinsics only when the whole file is built for them. */
#if defined(__clang__) && !defined(__ARM_FEATURE_DOTPROD) &&       \
    ((defined(__apple_build_version__) && __clang_major__ < 15) || \
     (!defined(__apple_build_version__) && __clang_major__ < 16))
const lesonnx_isa_table lesonnx_dotprod = {"dotprod", NULL, NULL, NULL, NULL};
#else

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#include "elementwise.h"
#include "neon_128.h"

LESONNX_INLINE ivec dot(int full, int parts, ivec acc, ivec weight, ivec input) {
    (void)parts;
    return vdotq_s32(acc, signed_weight(full, weight), vreinterpretq_s8_s32(input));
}

#include "tile.h"

static void multiply(const lesonnx_product *p) { (p->format->bits == 32 ? multiply_float : multiply_tiles)(p); }

const lesonnx_isa_table lesonnx_dotprod = {"dotprod", lesonnx_prepare, multiply, lesonnx_activate, tile_scratch_bytes};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
#endif
