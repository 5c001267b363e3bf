/* The plain C functions: a batch of experts, checked and run in rounds, and a single product.
 *
 * It knows nothing of ONNX Runtime, nor of how a round is spread over threads (tickets.c).
 */
#include <inttypes.h>

#include "buffer.h"
#include "format.h"
#include "tickets.h"

#define ROUND_BYTES ((int64_t)8 << 20) /* intermediates held at a time; longer batches go in rounds */

static int same_format(const lesonnx_matrix *a, const lesonnx_matrix *b) {
    return a->bits == b->bits && a->block_size == b->block_size;
}

static int check_batch(const lesonnx_kind *k, const lesonnx_batch *b, char *message, size_t bytes) {
    if (b->slots < 1 || b->tokens < 0 || b->num_experts < 0 || b->num_rows < 0 || b->cache_bytes < 0 ||
        b->tokens > INT32_MAX || b->slots > INT32_MAX) {
        return lesonnx_fail(message, bytes, "tokens %" PRId64 " or slots %" PRId64 " out of range", b->tokens,
                            b->slots);
    }
    if ((uintptr_t)b->cache % 4) {
        return lesonnx_fail(message, bytes, "the cache is not aligned to 4 bytes");
    }
    if (b->row_starts[0] != 0 || b->row_starts[b->num_experts] != b->num_rows) {
        return lesonnx_fail(message, bytes,
                            "row_starts goes from %" PRId64 " to %" PRId64 ", expected 0 to %" PRId64 " (rows)",
                            b->row_starts[0], b->row_starts[b->num_experts], b->num_rows);
    }
    for (int64_t e = 0; e < b->num_experts; e++) {
        const int64_t offset = b->offsets[e];
        if (offset < 0 || offset > b->cache_bytes || k->expert_bytes > b->cache_bytes - offset) {
            return lesonnx_fail(message, bytes,
                                "offsets[%" PRId64 "] is %" PRId64 ": an expert of %" PRId64
                                " bytes is not inside a cache of %" PRId64,
                                e, offset, k->expert_bytes, b->cache_bytes);
        }
        if (offset % 4) {
            return lesonnx_fail(message, bytes, "offsets[%" PRId64 "] is %" PRId64 ", not a multiple of 4", e, offset);
        }
        if (b->row_starts[e] > b->row_starts[e + 1]) {
            return lesonnx_fail(message, bytes, "row_starts[%" PRId64 "] is %" PRId64 ", more than the next, %" PRId64,
                                e, b->row_starts[e], b->row_starts[e + 1]);
        }
    }
    return LESONNX_OK;
}

/* Checks the rows, marks the tokens they read and counts them; prepared_of is [tokens], seen [tokens * slots bits]. */
static int collect_rows(const lesonnx_batch *b, uint8_t *seen, int32_t *prepared_of, int64_t *tokens, int64_t *count,
                        char *message, size_t bytes) {
    const int64_t limit = b->tokens * b->slots;
    *count = 0;
    for (int64_t i = 0; i < b->num_rows; i++) {
        const int64_t row = b->rows[i];
        if (row < 0 || row >= limit) {
            return lesonnx_fail(message, bytes, "rows[%" PRId64 "] is %" PRId64 ", expected 0..%" PRId64, i, row,
                                limit - 1);
        }
        if (seen[row / 8] >> (row % 8) & 1) {
            return lesonnx_fail(message, bytes, "rows[%" PRId64 "] names row %" PRId64 " a second time", i, row);
        }
        seen[row / 8] |= (uint8_t)(1u << (row % 8));
        const int64_t token = row / b->slots;
        if (prepared_of[token] < 0) {
            prepared_of[token] = (int32_t)*count;
            tokens[(*count)++] = token;
        }
    }
    return LESONNX_OK;
}

int lesonnx_experts(const lesonnx_kind *kind, const lesonnx_batch *batch, lesonnx_parallel_for parallel_for, void *host,
                    char *message, size_t message_bytes) {
    lesonnx_run r = {0};
    r.isa = lesonnx_active();
    if (!r.isa) {
        return lesonnx_fail(message, message_bytes, "LESONNX_ISA names none of: %s", lesonnx_isas());
    }
    int status = lesonnx_check_kind(kind, message, message_bytes);
    if (!status) {
        status = check_batch(kind, batch, message, message_bytes);
    }
    if (status || batch->num_rows == 0) {
        return status;
    }
    if (batch->num_rows > batch->tokens * batch->slots) {
        return lesonnx_fail(message, message_bytes, "%" PRId64 " rows for %" PRId64 " tokens of %" PRId64 " slots",
                            batch->num_rows, batch->tokens, batch->slots);
    }
    r.kind = kind;
    r.batch = batch;
    r.gate = lesonnx_format_of(&kind->gate);
    r.up = lesonnx_format_of(&kind->up);
    r.down = lesonnx_format_of(&kind->down);

    const int64_t n = batch->num_rows;
    const int64_t max_pieces = batch->num_experts + n / LESONNX_PIECE_ROWS;
    const int64_t row_bytes = kind->intermediate_size * 4 + r.down.row_bytes;
    const int64_t round_rows = lesonnx_min(n, lesonnx_max(LESONNX_PIECE_ROWS, ROUND_BYTES / row_bytes));
    const int64_t max_groups = max_pieces * lesonnx_ceil_div(kind->intermediate_size, 16);
    const size_t seen_bytes = (size_t)(batch->tokens * batch->slots / 8 + 1);
    uint8_t *seen = calloc(seen_bytes, 1);
    int32_t *prepared_of = malloc((size_t)batch->tokens * sizeof *prepared_of);
    int64_t *tokens = malloc((size_t)lesonnx_min(n, batch->tokens) * sizeof *tokens);
    lesonnx_piece *pieces = malloc((size_t)max_pieces * sizeof *pieces);
    atomic_int *counters = malloc((size_t)(max_groups + max_pieces) * sizeof *counters);
    uint8_t *prepared = NULL, *intermediates = NULL;
    if (!seen || !prepared_of || !tokens || !pieces || !counters) {
        status = LESONNX_NO_MEMORY;
        goto end;
    }
    memset(prepared_of, 0xff, (size_t)batch->tokens * sizeof *prepared_of);
    status = collect_rows(batch, seen, prepared_of, tokens, &r.num_prepared, message, message_bytes);
    if (status) {
        goto end;
    }
    const int shared = same_format(&kind->gate, &kind->up);
    const int64_t prepared_bytes = r.gate.row_bytes + (shared ? 0 : r.up.row_bytes);
    prepared = lesonnx_new((size_t)(r.num_prepared * prepared_bytes));
    intermediates = lesonnx_new((size_t)(round_rows * row_bytes + 64));
    if (!prepared || !intermediates) {
        status = LESONNX_NO_MEMORY;
        goto end;
    }
    r.prepared_of = prepared_of;
    r.tokens = tokens;
    r.gate_rows = prepared;
    r.up_rows = shared ? prepared : prepared + r.num_prepared * r.gate.row_bytes;
    r.down_rows = intermediates;
    r.hidden = (float *)(void *)(intermediates + round_rows * r.down.row_bytes);
    r.pieces = pieces;
    r.piece_left = counters;

    int64_t expert = 0, at = 0;
    for (int64_t begun = 0; at < n && !status; begun++) {
        int64_t rows = 0, largest = 0;
        r.num_pieces = 0;
        while (at < n) {
            while (at == batch->row_starts[expert + 1]) {
                expert++;
            }
            const int64_t m = lesonnx_min(batch->row_starts[expert + 1] - at, LESONNX_PIECE_ROWS);
            if (rows + m > round_rows) {
                break;
            }
            pieces[r.num_pieces++] = (lesonnx_piece){batch->cache + batch->offsets[expert], batch->rows + at, m, rows};
            rows += m;
            at += m;
            largest = lesonnx_max(largest, m);
        }
        r.group_left = counters + r.num_pieces;
        status = lesonnx_run_round(&r, rows, largest, begun == 0, parallel_for, host);
    }
end:
    if (status == LESONNX_NO_MEMORY) {
        (void)lesonnx_fail(message, message_bytes, "out of memory for the intermediates of %" PRId64 " rows", n);
    }
    lesonnx_free(intermediates);
    lesonnx_free(prepared);
    free(counters);
    free(pieces);
    free(tokens);
    free(prepared_of);
    free(seen);
    return status;
}

int lesonnx_matmul(const lesonnx_matrix *matrix, const uint8_t *weights, int64_t weights_bytes, const float *input,
                   int64_t num_rows, float *output, char *message, size_t message_bytes) {
    const lesonnx_isa_table *isa = lesonnx_active();
    if (!isa) {
        return lesonnx_fail(message, message_bytes, "LESONNX_ISA names none of: %s", lesonnx_isas());
    }
    const int status = lesonnx_check_matrix("matrix", matrix, weights_bytes, message, message_bytes);
    if (status) {
        return status;
    }
    if ((uintptr_t)weights % 4 || num_rows < 0) {
        return lesonnx_fail(message, message_bytes, "weights not aligned to 4 bytes, or fewer than 0 rows");
    }
    const lesonnx_format f = lesonnx_format_of(matrix);
    uint8_t *prepared = lesonnx_new((size_t)(LESONNX_PIECE_ROWS * f.row_bytes));
    uint8_t *scratch = lesonnx_new(isa->scratch_bytes(&f, LESONNX_PIECE_ROWS));
    if (!prepared || !scratch) {
        lesonnx_free(prepared);
        lesonnx_free(scratch);
        (void)lesonnx_fail(message, message_bytes, "out of memory");
        return LESONNX_NO_MEMORY;
    }
    for (int64_t at = 0; at < num_rows; at += LESONNX_PIECE_ROWS) {
        const uint8_t *rows[LESONNX_PIECE_ROWS];
        float *out[LESONNX_PIECE_ROWS];
        lesonnx_product p = lesonnx_product_of(&f, matrix, weights);
        p.last = matrix->rows;
        p.m = lesonnx_min(LESONNX_PIECE_ROWS, num_rows - at);
        p.rows = rows;
        p.out = out;
        p.scratch = scratch;
        for (int64_t i = 0; i < p.m; i++) {
            uint8_t *row = prepared + i * f.row_bytes;
            isa->prepare(&f, input + (at + i) * matrix->columns, 0, f.steps, row);
            rows[i] = row;
            out[i] = output + (at + i) * matrix->rows;
        }
        isa->multiply(&p);
    }
    lesonnx_free(scratch);
    lesonnx_free(prepared);
    return LESONNX_OK;
}
