/* What the instruction-set files share: the prepared input row, the product they compute, and their table of functions.
 *
 * Canonical arithmetic (docs/kernel.md): a weight row is cut into steps. A step has `vectors` vectors of 32 unpacked
 * weights; lane j of 8 sums bytes 4j..4j+3 of each, as integers. Then lane j does one fused multiply-add,
 * acc[j] = fma((float)sum[j], input_scale * weight_scale, acc[j]), and at the end of the row the lanes are added
 * pairwise: ((0+1)+(2+3)) + ((4+5)+(6+7)). Every file gives exactly these bits, in whatever order it visits rows.
 */
#ifndef LESONNX_KERNEL_H
#define LESONNX_KERNEL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "lesonnx.h"

#ifdef __clang__
/* GCC has no such pragma: the build passes -ffp-contract=off. */
#pragma STDC FP_CONTRACT OFF
#endif

#define LESONNX_INLINE static inline __attribute__((always_inline, unused))

#define LESONNX_UNIT 32       /* bytes of a vector: 8 lanes of 4 */
#define LESONNX_MAX_VECTORS 4 /* a step has 1, 2 or 4 vectors */

/* How a matrix's rows, and the input rows that meet them, are cut into steps.
 *
 * A 32-byte group of packed weights gives 8 / bits vectors; byte i of vector r is element i * (8 / bits) + r of the
 * group, so input rows are prepared in that order. A block of at least 32 packed bytes is one step (parts = 1);
 * shorter blocks share a step of one group, `parts` of them, each owning 8 / parts lanes.
 *
 * Prepared input row, per step: int8 [vectors, 32], then per lane int32 [8] -zero_point * sum of the lane's inputs,
 * then float [8] the input scale of the lane's block. bits 32: just the floats, padded with zeros to 16 (a step). */
typedef struct {
    int32_t bits;
    int32_t block_size;
    int32_t vectors;
    int32_t parts;
    int64_t columns;
    int64_t blocks;        /* scales of a weight row */
    int64_t steps;         /* steps of a row, the last perhaps partial */
    int64_t full_steps;    /* steps whose `parts` blocks all exist */
    int64_t step_columns;  /* columns that a step covers */
    int64_t step_bytes;    /* packed weight bytes of a step */
    int64_t weight_stride; /* bytes from one weight row to the next */
    int64_t unit_bytes;    /* prepared bytes of a step */
    int64_t row_bytes;     /* prepared bytes of a row */
} lesonnx_format;

/* out[i][n - first] = rows[i] . W[n] + bias[n] for n in first..last-1 and the m prepared rows. */
typedef struct {
    const lesonnx_format *format;
    const uint8_t *weights;
    const float *scales;
    const float *bias; /* or NULL */
    int64_t first;
    int64_t last;
    const uint8_t *const *rows;
    int64_t m;
    float *const *out;
    uint8_t *scratch; /* scratch_bytes(format, m), 64-byte aligned */
} lesonnx_product;

/* An instruction set. Functions keep no state. */
typedef struct {
    const char *name;
    /* Steps first..last-1 of a prepared row from the floats x[columns]. */
    void (*prepare)(const lesonnx_format *format, const float *x, int64_t first, int64_t last, uint8_t *row);
    void (*multiply)(const lesonnx_product *product);
    void (*activate)(const lesonnx_kind *kind, int64_t n, const float *gate, const float *up, float *out);
    size_t (*scratch_bytes)(const lesonnx_format *format, int64_t m);
} lesonnx_isa_table;

extern const lesonnx_isa_table lesonnx_portable;
#if defined(__x86_64__)
extern const lesonnx_isa_table lesonnx_avx2, lesonnx_avxvnni, lesonnx_avx512vnni;
#elif defined(__aarch64__)
extern const lesonnx_isa_table lesonnx_neon, lesonnx_dotprod, lesonnx_i8mm;
#endif

/* The table in use, or NULL when LESONNX_ISA names none that this machine has (dispatch.c). */
const lesonnx_isa_table *lesonnx_active(void);

/* The cut of a valid matrix into steps. */
lesonnx_format lesonnx_format_of(const lesonnx_matrix *matrix);

LESONNX_INLINE int64_t lesonnx_min(int64_t a, int64_t b) { return a < b ? a : b; }
LESONNX_INLINE int64_t lesonnx_max(int64_t a, int64_t b) { return a > b ? a : b; }
LESONNX_INLINE int64_t lesonnx_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Product of one row with 16 lanes of float accumulators (bits 32) ends like this everywhere. */
LESONNX_INLINE float lesonnx_add_lanes(const float *a) {
    return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
}

#endif
