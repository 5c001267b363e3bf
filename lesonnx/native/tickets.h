/* One round of a batch: pieces of experts, cut into tickets that any number of threads draw.
 *
 * experts.c fills in what a round needs (owner of all buffers); tickets.c runs it. A run is used by the threads that
 * draw its tickets, and its counters are the only thing that they write in common.
 */
#ifndef LESONNX_TICKETS_H
#define LESONNX_TICKETS_H

#include <stdatomic.h>

#include "kernel.h"

#define LESONNX_PIECE_ROWS 64 /* input rows that one ticket takes together */

/* Up to LESONNX_PIECE_ROWS rows of one expert. */
typedef struct {
    const uint8_t *expert;
    const int64_t *rows;
    int64_t m;
    int64_t first; /* index of its first row in the round's intermediates */
} lesonnx_piece;

typedef struct {
    const lesonnx_isa_table *isa;
    const lesonnx_kind *kind;
    const lesonnx_batch *batch;
    lesonnx_format gate, up, down;

    const int32_t *prepared_of; /* [tokens] index among the prepared rows, or -1 */
    const int64_t *tokens;      /* [num_prepared] */
    int64_t num_prepared;
    uint8_t *gate_rows; /* [num_prepared, gate.row_bytes] */
    uint8_t *up_rows;   /* the same memory if the formats agree */

    const lesonnx_piece *pieces; /* of this round */
    int64_t num_pieces;
    float *hidden;      /* [rows of the round, intermediate_size] after the activation */
    uint8_t *down_rows; /* [rows of the round, down.row_bytes] */
    size_t scratch_bytes;

    int64_t up_columns;    /* columns of gate and up in a ticket */
    int64_t down_columns;  /* columns of down in a ticket */
    int64_t group_columns; /* columns that are quantized together, a multiple of up_columns and of down's step */
    int64_t up_tickets, down_tickets, groups; /* a piece */
    int64_t prepare_tickets, total;
    atomic_int *group_left; /* [num_pieces, groups] tickets still to come */
    atomic_int *piece_left; /* [num_pieces] groups still to come */
    atomic_int prepare_left;
    atomic_int_fast64_t next, done;
} lesonnx_run;

/* Runs the pieces of one round; `prepare`: input rows are not prepared yet. LESONNX_OK or LESONNX_NO_MEMORY. */
int lesonnx_run_round(lesonnx_run *run, int64_t rows, int64_t largest_piece, int prepare,
                      lesonnx_parallel_for parallel_for, void *host);

/* The product of a matrix that lies in `expert`; rows, columns and buffers still to be set. */
LESONNX_INLINE lesonnx_product lesonnx_product_of(const lesonnx_format *f, const lesonnx_matrix *matrix,
                                                  const uint8_t *expert) {
    lesonnx_product p = {0};
    p.format = f;
    p.weights = expert + matrix->weight_offset;
    p.scales = matrix->bits == 32 ? NULL : (const float *)(const void *)(expert + matrix->scales_offset);
    p.bias = matrix->bias_offset < 0 ? NULL : (const float *)(const void *)(expert + matrix->bias_offset);
    return p;
}

#endif
