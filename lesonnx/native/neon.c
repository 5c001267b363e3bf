/* NEON as every AArch64 has it: widening multiplies and pairwise adds. */
#include "kernel.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#include "elementwise.h"
#include "neon_128.h"

/* Two products of 8-bit values fit 16 bits (2 * 128 * 127 < 2^15). */
LESONNX_INLINE ivec dot(int full, int parts, ivec acc, ivec weight, ivec input) {
    const int8x16_t w = signed_weight(full, weight), a = vreinterpretq_s8_s32(input);
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(a));
    if (parts == 1) {
        return vpadalq_s16(acc, vmlal_high_s8(low, w, a));
    }
    const int16x8_t high = vmull_high_s8(w, a);
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}

#include "tile.h"

static void multiply(const lesonnx_product *p) { (p->format->bits == 32 ? multiply_float : multiply_tiles)(p); }

const lesonnx_isa_table lesonnx_neon = {"neon", lesonnx_prepare, multiply, lesonnx_activate, tile_scratch_bytes};
#endif
