/* The reference: the canonical arithmetic as plain loops. Every other instruction set is tested against it. */
#include "elementwise.h"

/* Weight r of byte i of a packed group: the bytes hold 8 / bits weights, low bits first. */
static int32_t unpack(uint8_t byte, int bits, int r) { return (byte >> (r * bits)) & ((1 << bits) - 1); }

static float quantized_product(const lesonnx_format *f, const uint8_t *weights, const float *scales,
                               const uint8_t *row) {
    const int expand = 8 / f->bits;
    float lanes[8] = {0};
    for (int64_t step = 0; step < f->steps; step++) {
        const int8_t *input = (const int8_t *)(row + step * f->unit_bytes);
        const int32_t *offset = (const int32_t *)(input + f->vectors * LESONNX_UNIT);
        const float *input_scale = (const float *)(offset + 8);
        for (int lane = 0; lane < 8; lane++) {
            const int64_t block = step * f->parts + lane * f->parts / 8;
            float scale = 0.0f;
            int32_t sum = 0;
            if (block < f->blocks) {
                scale = input_scale[lane] * scales[block];
                sum = offset[lane];
                for (int v = 0; v < f->vectors; v++) {
                    const uint8_t *group = weights + step * f->step_bytes + (v / expand) * LESONNX_UNIT;
                    for (int i = lane * 4; i < lane * 4 + 4; i++) {
                        sum += unpack(group[i], f->bits, v % expand) * input[v * LESONNX_UNIT + i];
                    }
                }
            }
            lanes[lane] = fmaf((float)sum, scale, lanes[lane]);
        }
    }
    return lesonnx_add_lanes(lanes);
}

/* Element e goes to lane e mod 16; lanes j and j + 8 are added first. */
static float float_product(const lesonnx_format *f, const float *weights, const float *row) {
    float lanes[16] = {0};
    for (int64_t i = 0; i < f->steps * 16; i++) {
        lanes[i % 16] = fmaf(i < f->columns ? weights[i] : 0.0f, row[i], lanes[i % 16]);
    }
    for (int j = 0; j < 8; j++) {
        lanes[j] += lanes[j + 8];
    }
    return lesonnx_add_lanes(lanes);
}

static void multiply(const lesonnx_product *p) {
    const lesonnx_format *f = p->format;
    for (int64_t n = p->first; n < p->last; n++) {
        const uint8_t *weights = p->weights + n * f->weight_stride;
        for (int64_t i = 0; i < p->m; i++) {
            float sum = f->bits == 32 ? float_product(f, (const float *)weights, (const float *)p->rows[i])
                                      : quantized_product(f, weights, p->scales + n * f->blocks, p->rows[i]);
            p->out[i][n - p->first] = p->bias ? sum + p->bias[n] : sum;
        }
    }
}

static size_t scratch_bytes(const lesonnx_format *f, int64_t m) {
    (void)f, (void)m;
    return 0;
}

const lesonnx_isa_table lesonnx_portable = {"portable", lesonnx_prepare, multiply, lesonnx_activate, scratch_bytes};
