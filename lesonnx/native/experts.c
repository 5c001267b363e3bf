/* Computes a batch of experts: checks it, cuts it into tickets, and lets any number of threads draw them.
 *
 * It knows nothing of ONNX Runtime. Tickets are drawn in order from one counter, and wait only for lower ones: prepare input rows, then columns of gate and up with their activation, then columns of down.
 * How the work is cut decides speed alone; every output element is one canonical product.
 */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>

#if defined(_WIN32)
#include <windows.h>
#else
#include <sched.h>
#endif

#include "format.h"

#define PIECE_ROWS 64                       /* input rows that one ticket takes together */
#define PREPARE_ROWS 8                      /* input rows that one ticket prepares */
#define ROUND_BYTES ((int64_t)8 << 20)      /* intermediates held at a time; longer batches go in rounds */
#define MIN_TICKETS 32                      /* enough for eight uneven cores */
#define MIN_TICKET_PRODUCTS ((int64_t)1 << 15)
#define MIN_PARALLEL_PRODUCTS ((int64_t)1 << 18) /* below, waking threads costs more than it saves */
#define MAX_WORKERS 64

/* Up to PIECE_ROWS rows of one expert. */
typedef struct {
    const uint8_t *expert;
    const int64_t *rows;
    int64_t m;
    int64_t first; /* index of its first row in the round's intermediates */
} piece;

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

    const piece *pieces; /* of this round */
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
} run;

static void pause_thread(int spins) {
    if (spins < 256) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
        return;
    }
#if defined(_WIN32)
    SwitchToThread();
#else
    sched_yield();
#endif
}

/* Waits until other threads have finished tickets that they have already begun. */
static void wait_for_zero(atomic_int *left) {
    for (int spins = 0; atomic_load_explicit(left, memory_order_acquire) != 0; spins += spins < 1024) {
        pause_thread(spins);
    }
}

static lesonnx_product product_of(const lesonnx_format *f, const lesonnx_matrix *matrix, const uint8_t *expert) {
    lesonnx_product p = {0};
    p.format = f;
    p.weights = expert + matrix->weight_offset;
    p.scales = matrix->bits == 32 ? NULL : (const float *)(const void *)(expert + matrix->scales_offset);
    p.bias = matrix->bias_offset < 0 ? NULL : (const float *)(const void *)(expert + matrix->bias_offset);
    return p;
}

static void prepare_ticket(run *r, int64_t ticket) {
    const int64_t end = lesonnx_min(r->num_prepared, (ticket + 1) * PREPARE_ROWS);
    for (int64_t i = ticket * PREPARE_ROWS; i < end; i++) {
        const float *x = r->batch->hidden + r->tokens[i] * r->kind->hidden_size;
        r->isa->prepare(&r->gate, x, 0, r->gate.steps, r->gate_rows + i * r->gate.row_bytes);
        if (r->up_rows != r->gate_rows) {
            r->isa->prepare(&r->up, x, 0, r->up.steps, r->up_rows + i * r->up.row_bytes);
        }
    }
    atomic_fetch_sub_explicit(&r->prepare_left, 1, memory_order_release);
}

/* The first weights that a ticket reads; NULL for one that only prepares. */
static const uint8_t *weights_of(const run *r, int64_t ticket) {
    ticket -= r->prepare_tickets;
    if (ticket < 0 || ticket >= r->num_pieces * (r->up_tickets + r->down_tickets)) {
        return NULL;
    }
    if (ticket < r->num_pieces * r->up_tickets) {
        return r->pieces[ticket / r->up_tickets].expert + r->kind->gate.weight_offset +
               ticket % r->up_tickets * r->up_columns * r->gate.weight_stride;
    }
    ticket -= r->num_pieces * r->up_tickets;
    return r->pieces[ticket / r->down_tickets].expert + r->kind->down.weight_offset +
           ticket % r->down_tickets * r->down_columns * r->down.weight_stride;
}

static void up_ticket(run *r, int64_t ticket, const uint8_t *next, uint8_t *scratch) {
    const int64_t index = ticket / r->up_tickets, sub = ticket % r->up_tickets;
    const piece *p = &r->pieces[index];
    const int64_t size = r->kind->intermediate_size;
    const int64_t first = sub * r->up_columns, last = lesonnx_min(size, first + r->up_columns);
    float *values = (float *)(void *)scratch; /* gate then up, [PIECE_ROWS, up_columns] each */
    const uint8_t *gate_rows[PIECE_ROWS], *up_rows[PIECE_ROWS];
    float *gate_out[PIECE_ROWS], *up_out[PIECE_ROWS];

    wait_for_zero(&r->prepare_left);
    for (int64_t i = 0; i < p->m; i++) {
        const int64_t prepared = r->prepared_of[p->rows[i] / r->batch->slots];
        gate_rows[i] = r->gate_rows + prepared * r->gate.row_bytes;
        up_rows[i] = r->up_rows + prepared * r->up.row_bytes;
        gate_out[i] = values + i * r->up_columns;
        up_out[i] = values + (p->m + i) * r->up_columns;
    }
    lesonnx_product gate = product_of(&r->gate, &r->kind->gate, p->expert);
    lesonnx_product up = product_of(&r->up, &r->kind->up, p->expert);
    gate.first = up.first = first;
    gate.last = up.last = last;
    gate.m = up.m = p->m;
    gate.rows = gate_rows;
    up.rows = up_rows;
    gate.out = gate_out;
    up.out = up_out;
    gate.scratch = up.scratch = scratch + lesonnx_ceil_div(2 * p->m * r->up_columns * 4, 64) * 64;
    gate.next = up.weights + first * r->up.weight_stride;
    up.next = next;
    r->isa->multiply(&gate);
    r->isa->multiply(&up);
    for (int64_t i = 0; i < p->m; i++) {
        r->isa->activate(r->kind, last - first, gate_out[i], up_out[i], r->hidden + (p->first + i) * size + first);
    }

    const int64_t group = first / r->group_columns;
    if (atomic_fetch_sub_explicit(&r->group_left[index * r->groups + group], 1, memory_order_acq_rel) == 1) {
        const int64_t first_step = group * r->group_columns / r->down.step_columns;
        const int64_t last_step = lesonnx_min(r->down.steps, (group + 1) * r->group_columns / r->down.step_columns);
        for (int64_t i = p->first; i < p->first + p->m; i++) {
            r->isa->prepare(&r->down, r->hidden + i * size, first_step, last_step,
                            r->down_rows + i * r->down.row_bytes);
        }
        atomic_fetch_sub_explicit(&r->piece_left[index], 1, memory_order_release);
    }
}

static void down_ticket(run *r, int64_t ticket, const uint8_t *next, uint8_t *scratch) {
    const int64_t index = ticket / r->down_tickets;
    const piece *p = &r->pieces[index];
    const uint8_t *rows[PIECE_ROWS];
    float *out[PIECE_ROWS];
    lesonnx_product down = product_of(&r->down, &r->kind->down, p->expert);
    down.first = ticket % r->down_tickets * r->down_columns;
    down.last = lesonnx_min(r->kind->hidden_size, down.first + r->down_columns);
    for (int64_t i = 0; i < p->m; i++) {
        rows[i] = r->down_rows + (p->first + i) * r->down.row_bytes;
        out[i] = r->batch->output + p->rows[i] * r->kind->hidden_size + down.first;
    }
    down.m = p->m;
    down.rows = rows;
    down.out = out;
    down.scratch = scratch;
    down.next = next;
    wait_for_zero(&r->piece_left[index]);
    r->isa->multiply(&down);
}

static void *aligned_new(size_t bytes) {
    /* Rounded up to whole cache lines; the pointer to free lies before the buffer. */
    void *raw = malloc(bytes + 64 + sizeof(void *));
    if (!raw) {
        return NULL;
    }
    const uintptr_t at = ((uintptr_t)raw + sizeof(void *) + 63) & ~(uintptr_t)63;
    ((void **)at)[-1] = raw;
    return (void *)at;
}

static void aligned_free(void *buffer) {
    if (buffer) {
        free(((void **)buffer)[-1]);
    }
}

static int64_t draw(run *r) { return atomic_fetch_add_explicit(&r->next, 1, memory_order_relaxed); }

/* A worker: draws tickets until none is left. `index` is of no interest. */
static void work(void *data, size_t index) {
    run *r = data;
    (void)index;
    if (atomic_load_explicit(&r->next, memory_order_relaxed) >= r->total) {
        return;
    }
    uint8_t *scratch = aligned_new(r->scratch_bytes);
    if (!scratch) {
        return; /* other workers may manage; what nobody did is counted at the end */
    }
    int64_t ticket = draw(r);
    while (ticket < r->total) {
        /* Drawn early, so that its weights can be prefetched. No deadlock: the lowest unfinished ticket never waits,
         * and whoever holds it is not at work on a higher one. */
        const int64_t next = draw(r);
        const uint8_t *next_weights = weights_of(r, next);
        const int64_t up = ticket - r->prepare_tickets, down = up - r->num_pieces * r->up_tickets;
        if (up < 0) {
            prepare_ticket(r, ticket);
        } else if (down < 0) {
            up_ticket(r, up, next_weights, scratch);
        } else {
            down_ticket(r, down, next_weights, scratch);
        }
        atomic_fetch_add_explicit(&r->done, 1, memory_order_relaxed);
        ticket = next;
    }
    aligned_free(scratch);
}

/* Columns of one ticket: as many as leave enough tickets for every core, a power of two of at least 16. */
static int64_t ticket_columns(int64_t size, int64_t depth, int64_t rows, int64_t pieces) {
    int64_t columns = 128;
    while (columns > 16 && pieces * lesonnx_ceil_div(size, columns) < MIN_TICKETS &&
           columns / 2 * depth * lesonnx_ceil_div(rows, pieces) >= MIN_TICKET_PRODUCTS) {
        columns /= 2;
    }
    return columns;
}

/* Runs the pieces of one round; 0 or LESONNX_NO_MEMORY. */
static int run_round(run *r, int64_t rows, int64_t largest_piece, int prepare, lesonnx_parallel_for parallel_for,
                     void *host) {
    const lesonnx_kind *k = r->kind;
    r->up_columns = ticket_columns(k->intermediate_size, k->hidden_size * 2, rows, r->num_pieces);
    r->down_columns = ticket_columns(k->hidden_size, k->intermediate_size, rows, r->num_pieces);
    r->group_columns = lesonnx_max(r->up_columns, r->down.step_columns);
    r->up_tickets = lesonnx_ceil_div(k->intermediate_size, r->up_columns);
    r->down_tickets = lesonnx_ceil_div(k->hidden_size, r->down_columns);
    r->groups = lesonnx_ceil_div(k->intermediate_size, r->group_columns);
    r->prepare_tickets = prepare ? lesonnx_ceil_div(r->num_prepared, PREPARE_ROWS) : 0;
    r->total = r->prepare_tickets + r->num_pieces * (r->up_tickets + r->down_tickets);

    const size_t values = (size_t)(lesonnx_ceil_div(2 * largest_piece * r->up_columns * 4, 64) * 64);
    const size_t gate_bytes = r->isa->scratch_bytes(&r->gate, largest_piece);
    const size_t up_bytes = r->isa->scratch_bytes(&r->up, largest_piece);
    const size_t down_bytes = r->isa->scratch_bytes(&r->down, largest_piece);
    const size_t first = values + (gate_bytes > up_bytes ? gate_bytes : up_bytes);
    r->scratch_bytes = first > down_bytes ? first : down_bytes;

    const int64_t per_group = r->group_columns / r->up_columns;
    for (int64_t i = 0; i < r->num_pieces; i++) {
        for (int64_t g = 0; g < r->groups; g++) {
            const int64_t left = lesonnx_min(per_group, r->up_tickets - g * per_group);
            atomic_init(&r->group_left[i * r->groups + g], (int)left);
        }
        atomic_init(&r->piece_left[i], (int)r->groups);
    }
    atomic_init(&r->prepare_left, (int)r->prepare_tickets);
    atomic_init(&r->next, 0);
    atomic_init(&r->done, 0);

    const int64_t products = rows * k->hidden_size * k->intermediate_size * 3;
    if (parallel_for && products >= MIN_PARALLEL_PRODUCTS && r->total > 1) {
        parallel_for(host, work, (size_t)lesonnx_min(r->total, MAX_WORKERS), r);
    } else {
        work(r, 0);
    }
    return atomic_load(&r->done) == r->total ? LESONNX_OK : LESONNX_NO_MEMORY;
}

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
            return lesonnx_fail(message, bytes,
                                "row_starts[%" PRId64 "] is %" PRId64 ", more than the next, %" PRId64, e,
                                b->row_starts[e], b->row_starts[e + 1]);
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

int lesonnx_experts(const lesonnx_kind *kind, const lesonnx_batch *batch, lesonnx_parallel_for parallel_for,
                    void *host, char *message, size_t message_bytes) {
    run r = {0};
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
    const int64_t max_pieces = batch->num_experts + n / PIECE_ROWS;
    const int64_t row_bytes = kind->intermediate_size * 4 + r.down.row_bytes;
    const int64_t round_rows = lesonnx_min(n, lesonnx_max(PIECE_ROWS, ROUND_BYTES / row_bytes));
    const int64_t max_groups = max_pieces * lesonnx_ceil_div(kind->intermediate_size, 16);
    const size_t seen_bytes = (size_t)(batch->tokens * batch->slots / 8 + 1);
    uint8_t *seen = calloc(seen_bytes, 1);
    int32_t *prepared_of = malloc((size_t)batch->tokens * sizeof *prepared_of);
    int64_t *tokens = malloc((size_t)lesonnx_min(n, batch->tokens) * sizeof *tokens);
    piece *pieces = malloc((size_t)max_pieces * sizeof *pieces);
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
    prepared = aligned_new((size_t)(r.num_prepared * prepared_bytes));
    intermediates = aligned_new((size_t)(round_rows * row_bytes + 64));
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
            const int64_t m = lesonnx_min(batch->row_starts[expert + 1] - at, PIECE_ROWS);
            if (rows + m > round_rows) {
                break;
            }
            pieces[r.num_pieces++] = (piece){batch->cache + batch->offsets[expert], batch->rows + at, m, rows};
            rows += m;
            at += m;
            largest = lesonnx_max(largest, m);
        }
        r.group_left = counters + r.num_pieces;
        status = run_round(&r, rows, largest, begun == 0, parallel_for, host);
    }
end:
    if (status == LESONNX_NO_MEMORY) {
        (void)lesonnx_fail(message, message_bytes, "out of memory for the intermediates of %" PRId64 " rows", n);
    }
    aligned_free(intermediates);
    aligned_free(prepared);
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
    uint8_t *prepared = aligned_new((size_t)(PIECE_ROWS * f.row_bytes));
    uint8_t *scratch = aligned_new(isa->scratch_bytes(&f, PIECE_ROWS));
    if (!prepared || !scratch) {
        aligned_free(prepared);
        aligned_free(scratch);
        (void)lesonnx_fail(message, message_bytes, "out of memory");
        return LESONNX_NO_MEMORY;
    }
    for (int64_t at = 0; at < num_rows; at += PIECE_ROWS) {
        const uint8_t *rows[PIECE_ROWS];
        float *out[PIECE_ROWS];
        lesonnx_product p = product_of(&f, matrix, weights);
        p.last = matrix->rows;
        p.m = lesonnx_min(PIECE_ROWS, num_rows - at);
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
    aligned_free(scratch);
    aligned_free(prepared);
    return LESONNX_OK;
}
