/* The reference, for any processor: every other instruction set is tested against it. */
#include "elementwise.h"
#include "scalar.h"

static void multiply(const lesonnx_product *p) { lesonnx_scalar_multiply(p); }

static size_t scratch_bytes(const lesonnx_format *f, int64_t m) {
    (void)f, (void)m;
    return 0;
}

const lesonnx_isa_table lesonnx_portable = {"portable", lesonnx_prepare, multiply, lesonnx_activate, scratch_bytes};
