/* Computes the same seeded experts and products on one instruction set and prints a hash of each result.
 *
 * Two builds of the kernel (processors, compilers, instruction sets) agree if they print the same lines.
 *   kernel_vectors           the instruction set that dispatch chooses, and those that are there
 *   kernel_vectors NAME      the hashes on that instruction set
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../lesonnx/native/include/lesonnx.h"

static uint64_t state;

static uint32_t draw(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

/* -1..1 in steps of 2^-20, so that every compiler makes the same float. */
static float draw_float(void) { return (float)((int32_t)(draw() % 2097153u) - 1048576) / 1048576.0f; }

static uint64_t hash_of(const float *values, int64_t count) {
    uint64_t hash = 1469598103934665603u;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        hash = (hash ^ bits) * 1099511628211u;
    }
    return hash;
}

static int64_t place(int64_t *at, int64_t bytes) {
    const int64_t offset = *at;
    *at = (offset + bytes + 63) / 64 * 64;
    return offset;
}

static lesonnx_matrix matrix_at(int64_t *at, int64_t rows, int64_t columns, int bits, int block) {
    lesonnx_matrix m = {rows, columns, bits, block, 0, -1, -1};
    const int64_t blocks = block ? (columns + block - 1) / block : 0;
    m.weight_offset = place(at, bits == 32 ? rows * columns * 4 : rows * blocks * block * bits / 8);
    if (bits != 32) {
        m.scales_offset = place(at, rows * blocks * 4);
    }
    m.bias_offset = place(at, rows * 4);
    return m;
}

static void put_floats(uint8_t *at, int64_t count, float size, float least) {
    for (int64_t i = 0; i < count; i++) {
        const float value = least + draw_float() * size;
        memcpy(at + i * 4, &value, 4);
    }
}

static void fill(uint8_t *expert, const lesonnx_matrix *m) {
    const int64_t blocks = m->block_size ? (m->columns + m->block_size - 1) / m->block_size : 0;
    if (m->bits == 32) {
        put_floats(expert + m->weight_offset, m->rows * m->columns, 0.1f, 0.0f);
    } else {
        for (int64_t i = 0; i < m->rows * blocks * m->block_size * m->bits / 8; i++) {
            expert[m->weight_offset + i] = (uint8_t)draw();
        }
        put_floats(expert + m->scales_offset, m->rows * blocks, 0.005f, 0.01f);
    }
    put_floats(expert + m->bias_offset, m->rows, 0.5f, 0.0f);
}

int main(int argc, char **argv) {
    static const int layouts[][2] = {{2, 16},  {2, 32}, {2, 64}, {2, 128}, {4, 16},  {4, 32}, {4, 64},
                                     {4, 128}, {8, 16}, {8, 32}, {8, 64},  {8, 128}, {32, 0}};
    static const int64_t sizes[][2] = {{64, 16}, {200, 136}, {33, 17}, {512, 256}};
    static const int64_t row_counts[] = {1, 2, 3, 5, 8, 13, 70};
    if (argc < 2) {
        printf("%s (of %s)\n", lesonnx_isa(), lesonnx_isas());
        return 0;
    }
    if (lesonnx_use_isa(argv[1])) {
        fprintf(stderr, "%s is not one of: %s\n", argv[1], lesonnx_isas());
        return 1;
    }
    for (size_t l = 0; l < sizeof layouts / sizeof layouts[0]; l++) {
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            char message[256] = "";
            const int64_t hidden = sizes[s][0], intermediate = sizes[s][1];
            const int *other = layouts[(l + s * 5) % (sizeof layouts / sizeof layouts[0])];
            int64_t at = 0;
            lesonnx_kind kind = {hidden, intermediate, 0, (int64_t)((l + s) % 4), 1.702f, 0.75f, {0}, {0}, {0}};
            kind.gate = matrix_at(&at, intermediate, hidden, layouts[l][0], layouts[l][1]);
            kind.up = matrix_at(&at, intermediate, hidden, other[0], other[1]);
            kind.down = matrix_at(&at, hidden, intermediate, layouts[l][0], layouts[l][1]);
            kind.expert_bytes = at;
            uint8_t *expert = aligned_alloc(64, (size_t)at);
            float *input = malloc(70 * (size_t)hidden * 4), *output = calloc(70 * (size_t)hidden, 4);
            if (!expert || !input || !output) {
                return 1;
            }
            memset(expert, 0, (size_t)at);
            state = l * 100 + s;
            fill(expert, &kind.gate);
            fill(expert, &kind.up);
            fill(expert, &kind.down);
            put_floats((uint8_t *)input, 70 * hidden, 2.0f, 0.0f);
            for (size_t r = 0; r < sizeof row_counts / sizeof row_counts[0]; r++) {
                const int64_t m = row_counts[r], offset = 0, starts[2] = {0, m};
                int64_t rows[70];
                for (int64_t i = 0; i < m; i++) {
                    rows[i] = i;
                }
                lesonnx_batch batch = {input, m, 1, expert, at, &offset, 1, starts, rows, m, output};
                if (lesonnx_experts(&kind, &batch, NULL, NULL, message, sizeof message)) {
                    fprintf(stderr, "%s\n", message);
                    return 1;
                }
                printf("bits %d block %d hidden %" PRId64 " rows %" PRId64 " %016" PRIx64 "\n", layouts[l][0],
                       layouts[l][1], hidden, m, hash_of(output, m * hidden));
            }
            free(expert);
            free(input);
            free(output);
        }
    }
    return 0;
}
