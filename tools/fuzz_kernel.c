/* Fuzzes the kernel's plain C functions: kinds, offsets, rows and buffers of any values. Built with sanitizers, every
 * buffer of exactly its size, so that a read outside is caught.
 *
 * With libFuzzer (clang) define LESONNX_LIBFUZZER; otherwise it is a program: fuzz_kernel SECONDS [SEED].
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../lesonnx/native/include/lesonnx.h"

#define LARGEST 20000 /* widths that the fuzzer has memory for */

typedef struct {
    const uint8_t *data;
    size_t left;
} bytes;

static uint8_t byte_of(bytes *b) {
    if (!b->left) {
        return 0;
    }
    b->left--;
    return *b->data++;
}

/* Mostly one of the usual values, at times anything. */
static int64_t value_of(bytes *b, const int64_t *usual, int count) {
    const uint8_t kind = byte_of(b);
    if (kind < 236) {
        return usual[kind % count];
    }
    int64_t any = 0;
    for (int i = 0; i < 8; i++) {
        any = (int64_t)(((uint64_t)any << 8) | byte_of(b));
    }
    return kind < 246 ? any % 300 : any;
}

static int64_t near(bytes *b, int64_t value) {
    static const int64_t steps[] = {1, -1, 4, -4, 64, 4096, -64, 1 << 20};
    const uint8_t pick = byte_of(b); /* as it should be, 31 times of 32 */
    return pick < 248 ? value : value + steps[pick % 8];
}

static lesonnx_matrix matrix_of(bytes *b, int64_t rows, int64_t columns, int64_t *at) {
    static const int64_t bits[] = {2, 4, 8, 32, 4, 4}, blocks[] = {16, 32, 64, 128};
    static const int64_t absent[] = {-1};
    lesonnx_matrix m;
    m.rows = near(b, rows);
    m.columns = near(b, columns);
    m.bits = value_of(b, bits, 6);
    m.block_size = value_of(b, blocks, 4);
    if (m.bits == 32 && byte_of(b) < 250) {
        m.block_size = 0;
    }
    const int64_t block = m.block_size > 0 && m.block_size <= 128 ? m.block_size : 16;
    const int64_t count = (columns + block - 1) / block;
    m.weight_offset = near(b, *at);
    *at += m.bits == 32 ? rows * columns * 4 : rows * count * block * (m.bits > 0 && m.bits < 9 ? m.bits : 8) / 8;
    *at = (*at + 3) / 4 * 4;
    m.scales_offset = m.bits == 32 ? value_of(b, absent, 1) : near(b, *at);
    if (m.bits != 32) {
        *at += rows * count * 4;
    }
    m.bias_offset = -1;
    if (byte_of(b) & 1) {
        m.bias_offset = near(b, *at);
        *at += rows * 4;
    }
    return m;
}

/* Runs the task backwards, as another thread might. */
static void backwards(void *host, void (*task)(void *, size_t), size_t total, void *data) {
    (void)host;
    for (size_t i = total; i-- > 0;) {
        task(data, i);
    }
}

static void fill(bytes *b, uint8_t *at, size_t count) {
    uint32_t x = (uint32_t)byte_of(b) << 8 | byte_of(b);
    for (size_t i = 0; i < count; i++) {
        x = x * 1664525u + 1013904223u;
        at[i] = (uint8_t)(x >> 24);
    }
}

/* Exactly `count` bytes, so that the sanitizer sees every step outside. */
static void *exactly(size_t count) {
    void *p = malloc(count ? count : 1);
    if (!p) {
        abort();
    }
    return p;
}

static long computed;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const int64_t sizes[] = {1, 7, 16, 17, 33, 64, 100, 136, 200, 256};
    static const int64_t small[] = {0, 1, 1, 2, 3, 5, 9, 14, 70};
    static const char *const isas[] = {"portable", "avx2", "avxvnni", "avx512vnni", "neon", "dotprod", "i8mm"};
    bytes b = {data, size};
    char message[160];
    const uint8_t isa = byte_of(&b);
    if (lesonnx_use_isa(isas[isa % 7])) {
        lesonnx_use_isa(NULL);
    }
    const int64_t hidden = sizes[byte_of(&b) % 10], intermediate = sizes[byte_of(&b) % 10];
    int64_t at = 0;
    lesonnx_kind kind;
    memset(&kind, 0, sizeof kind);
    kind.hidden_size = near(&b, hidden);
    kind.intermediate_size = near(&b, intermediate);
    kind.activation = byte_of(&b) % 16 ? byte_of(&b) % 4 : byte_of(&b);
    kind.alpha = 1.702f;
    kind.limit = byte_of(&b) % 8 ? 7.0f : -1.0f;
    kind.gate = matrix_of(&b, intermediate, hidden, &at);
    kind.up = matrix_of(&b, intermediate, hidden, &at);
    kind.down = matrix_of(&b, hidden, intermediate, &at);
    kind.expert_bytes = near(&b, at);

    const int64_t experts = byte_of(&b) % 5, tokens = small[byte_of(&b) % 9], slots = small[1 + byte_of(&b) % 5];
    const int64_t total = tokens * slots;
    int64_t num_rows = total ? byte_of(&b) % (total + 1) : 0;
    num_rows = byte_of(&b) % 16 ? num_rows : small[byte_of(&b) % 9];
    int64_t cache_bytes = near(&b, at * (experts ? experts : 1));
    if (cache_bytes < 0 || at > (8 << 20)) {
        return 0;
    }
    /* `hidden` and `output` must fit what the kind says (the operator checks their shapes). */
    const int64_t width = kind.hidden_size > 0 ? kind.hidden_size : 1;
    if (width > LARGEST) {
        return 0;
    }
    float *input = exactly((size_t)(tokens * width) * 4), *output = exactly((size_t)(total * width) * 4);
    uint8_t *cache = exactly((size_t)cache_bytes);
    int64_t *offsets = exactly((size_t)experts * 8), *starts = exactly((size_t)(experts + 1) * 8);
    int64_t *rows = exactly((size_t)num_rows * 8);
    fill(&b, (uint8_t *)input, (size_t)(tokens * width) * 4);
    fill(&b, cache, (size_t)cache_bytes);
    for (int64_t e = 0; e <= experts; e++) {
        starts[e] = e == experts ? num_rows : num_rows * e / experts;
        starts[e] = byte_of(&b) < 252 ? starts[e] : near(&b, starts[e]);
        if (e < experts) {
            offsets[e] = near(&b, at * e);
        }
    }
    const int64_t stride = byte_of(&b) % 4 ? 1 : 7; /* 7 shares no divisor with most sizes: another order */
    for (int64_t i = 0; i < num_rows; i++) {
        rows[i] = total ? i * stride % total : 0;
        if (byte_of(&b) == 255) {
            rows[i] = value_of(&b, small, 9);
        }
    }
    lesonnx_batch batch = {input, tokens, slots, cache, cache_bytes, offsets, experts, starts, rows, num_rows, output};
    if (lesonnx_experts(&kind, &batch, isa & 128 ? backwards : NULL, NULL, message, sizeof message) == 0) {
        computed += num_rows > 0;
    }
    const int64_t columns = kind.gate.columns > 0 ? kind.gate.columns : 1;
    const int64_t out_rows = kind.gate.rows > 0 ? kind.gate.rows : 1;
    if (byte_of(&b) % 2 && columns <= LARGEST && out_rows <= LARGEST) {
        const int64_t m = byte_of(&b) % 20;
        float *x = exactly((size_t)(m * columns) * 4), *y = exactly((size_t)(m * out_rows) * 4);
        fill(&b, (uint8_t *)x, (size_t)(m * columns) * 4);
        (void)lesonnx_matmul(&kind.gate, cache, cache_bytes, x, m, y, message, sizeof message);
        free(x);
        free(y);
    }
    free(rows);
    free(starts);
    free(offsets);
    free(cache);
    free(output);
    free(input);
    return 0;
}

#ifndef LESONNX_LIBFUZZER
int main(int argc, char **argv) {
    const double seconds = argc > 1 ? atof(argv[1]) : 10;
    uint64_t state = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    const time_t start = time(NULL);
    long runs = 0;
    uint8_t data[512];
    while (difftime(time(NULL), start) < seconds) {
        for (size_t i = 0; i < sizeof data; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            data[i] = (uint8_t)(state >> 56);
        }
        LLVMFuzzerTestOneInput(data, sizeof data);
        runs++;
    }
    printf("%ld inputs, %ld of them computed, nothing found\n", runs, computed);
    return computed ? 0 : 1;
}
#endif
