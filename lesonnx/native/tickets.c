/* The tickets of a round: prepare input rows, then columns of gate and up with their activation, then columns of down.
 *
 * They are drawn in order from one counter, and wait only for lower ones. How the work is cut decides speed alone;
 * every output element is one canonical product.
 */
#include "tickets.h"

#include "buffer.h"

#if defined(_WIN32)
#include <windows.h>
#else
#include <sched.h>
#endif

#define PREPARE_ROWS 8 /* input rows that one ticket prepares */
#define MIN_TICKETS 16 /* two for each of eight cores; more cost one core 5 % */
#define MIN_TICKET_PRODUCTS ((int64_t)1 << 15)
#define MIN_PARALLEL_PRODUCTS ((int64_t)1 << 18) /* below, waking threads costs more than it saves */
#define MAX_WORKERS 64

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

/* Waits for lower tickets. Whoever holds them is at work on them, or on lower ones. */
static void wait_for_zero(atomic_int *left) {
    for (int spins = 0; atomic_load_explicit(left, memory_order_acquire) != 0; spins += spins < 1024) {
        pause_thread(spins);
    }
}

static void prepare_ticket(lesonnx_run *r, int64_t ticket) {
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
static const uint8_t *weights_of(const lesonnx_run *r, int64_t ticket) {
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

static void up_ticket(lesonnx_run *r, int64_t ticket, const uint8_t *next, uint8_t *scratch) {
    const int64_t index = ticket / r->up_tickets, sub = ticket % r->up_tickets;
    const lesonnx_piece *p = &r->pieces[index];
    const int64_t size = r->kind->intermediate_size;
    const int64_t first = sub * r->up_columns, last = lesonnx_min(size, first + r->up_columns);
    float *values = (float *)(void *)scratch; /* gate then up, [LESONNX_PIECE_ROWS, up_columns] each */
    const uint8_t *gate_rows[LESONNX_PIECE_ROWS], *up_rows[LESONNX_PIECE_ROWS];
    float *gate_out[LESONNX_PIECE_ROWS], *up_out[LESONNX_PIECE_ROWS];

    wait_for_zero(&r->prepare_left);
    for (int64_t i = 0; i < p->m; i++) {
        const int64_t prepared = r->prepared_of[p->rows[i] / r->batch->slots];
        gate_rows[i] = r->gate_rows + prepared * r->gate.row_bytes;
        up_rows[i] = r->up_rows + prepared * r->up.row_bytes;
        gate_out[i] = values + i * r->up_columns;
        up_out[i] = values + (p->m + i) * r->up_columns;
    }
    lesonnx_product gate = lesonnx_product_of(&r->gate, &r->kind->gate, p->expert);
    lesonnx_product up = lesonnx_product_of(&r->up, &r->kind->up, p->expert);
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

static void down_ticket(lesonnx_run *r, int64_t ticket, const uint8_t *next, uint8_t *scratch) {
    const int64_t index = ticket / r->down_tickets;
    const lesonnx_piece *p = &r->pieces[index];
    const uint8_t *rows[LESONNX_PIECE_ROWS];
    float *out[LESONNX_PIECE_ROWS];
    lesonnx_product down = lesonnx_product_of(&r->down, &r->kind->down, p->expert);
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

static int64_t draw(lesonnx_run *r) { return atomic_fetch_add_explicit(&r->next, 1, memory_order_relaxed); }

/* A worker: draws tickets until none is left. `index` is of no interest. */
static void work(void *data, size_t index) {
    lesonnx_run *r = data;
    (void)index;
    if (atomic_load_explicit(&r->next, memory_order_relaxed) >= r->total) {
        return;
    }
    uint8_t *scratch = lesonnx_new(r->scratch_bytes);
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
    lesonnx_free(scratch);
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

int lesonnx_run_round(lesonnx_run *r, int64_t rows, int64_t largest_piece, int prepare,
                      lesonnx_parallel_for parallel_for, void *host) {
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
