/* What the instruction-set files share: the prepared input row, the product they compute, and their table of functions.
 *
 * Canonical arithmetic (docs/kernel.md): the sum S of a block's products (int8 input times weight less zero point) is
 * an exact integer, so its order is free. An output is the fold over the blocks of its row, in order, of acc =
 * fma((float)S, input_scale * weight_scale, acc), from acc = 0; then the bias is added. Every file gives exactly these
 * bits, in whatever order it visits rows and columns.
 */
#ifndef LESONNX_KERNEL_H
#define LESONNX_KERNEL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "include/lesonnx.h"

#ifdef __clang__
/* GCC has no such pragma: the build passes -ffp-contract=off. */
#pragma STDC FP_CONTRACT OFF
#endif

#define LESONNX_INLINE static inline __attribute__((always_inline, unused))

#define LESONNX_UNIT 16 /* packed weight bytes that are unpacked together */

/* How a matrix's rows, and the input rows that meet them, are cut.
 *
 * A unit is 16 packed bytes of a weight row. It unpacks to `expand` = 8 / bits granules of 16 weights: weight i of
 * granule r is element i * expand + r of the unit. A step is the least run of whole units and whole blocks: one block
 * of `units` units, or one unit of `parts` blocks (4 / parts groups of 4 bytes each).
 *
 * A prepared input row has int8 [steps, units, expand, 16] in the order of the granules, then for each block int32
 * -zero_point * (sum of its inputs), then for each block the float input scale; blocks rounded up to whole steps. With
 * 32 bits it is just the floats, padded with zeros to steps of 16. */
typedef struct {
    int32_t bits;
    int32_t block_size;
    int32_t expand;
    int32_t units;
    int32_t parts;
    int64_t rows;
    int64_t columns;
    int64_t blocks;        /* scales of a weight row */
    int64_t steps;         /* steps of a row, the last perhaps partial */
    int64_t full_steps;    /* steps that lie wholly in the row */
    int64_t step_columns;  /* columns that a step covers */
    int64_t step_bytes;    /* packed weight bytes of a step */
    int64_t weight_stride; /* bytes from one weight row to the next */
    int64_t sums_at;       /* where the int32 sums of a prepared row begin */
    int64_t scales_at;     /* where its scales begin */
    int64_t row_bytes;     /* prepared bytes of a row, a multiple of 64 */
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
    uint8_t *scratch;    /* scratch_bytes(format, m), 64-byte aligned */
    const uint8_t *next; /* weights that this thread will read after these, to be prefetched; or NULL */
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

/* The sum of the 8 lanes that a float product (bits 32) ends with. */
LESONNX_INLINE float lesonnx_add_lanes(const float *a) {
    return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
}

#endif
