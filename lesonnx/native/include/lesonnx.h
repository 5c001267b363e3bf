/* The public C interface of the expert kernel: what tests, fuzzers and hosts without ONNX Runtime call.
 *
 * ONNX Runtime itself needs only RegisterCustomOps. Every function is thread-safe; buffers are the
 * caller's. A function that can fail returns 0 or a positive LESONNX_* code and writes one line into `message`.
 */
#ifndef LESONNX_H
#define LESONNX_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define LESONNX_API __declspec(dllexport)
#else
#define LESONNX_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { LESONNX_OK = 0, LESONNX_BAD_INPUT = 1, LESONNX_NO_MEMORY = 2 };

enum { LESONNX_SWIGLU = 0, LESONNX_GEGLU = 1, LESONNX_REGLU = 2, LESONNX_SWIGLU_CLAMPED = 3 };

/* One linear map y = x W^T (+ bias). Offsets in bytes from the start of the expert (or of `weights`), -1 for none.
 * bits 2, 4, 8: W is [rows, ceil(columns / block_size), block_size * bits / 8] bytes, low bits first, zero point
 * 2^(bits-1), scales float32 [rows, blocks], as MatMulNBits stores them. bits 32: float32 [rows, columns], block_size
 * 0, no scales. bias float32 [rows]. */
typedef struct {
    int64_t rows;
    int64_t columns;
    int64_t bits;
    int64_t block_size;
    int64_t weight_offset;
    int64_t scales_offset;
    int64_t bias_offset;
} lesonnx_matrix;

/* Experts that share shape, bits and activation: down(act(gate x) * up x). */
typedef struct {
    int64_t hidden_size;
    int64_t intermediate_size;
    int64_t expert_bytes;
    int64_t activation;
    float alpha;
    float limit;
    lesonnx_matrix gate;
    lesonnx_matrix up;
    lesonnx_matrix down;
} lesonnx_kind;

/* What one call computes. Expert e lies at cache + offsets[e] and computes rows[row_starts[e] .. row_starts[e+1]); row
 * r reads hidden[r / slots] and writes output[r]. A row is named at most once. */
typedef struct {
    const float *hidden; /* [tokens, hidden_size] */
    int64_t tokens;
    int64_t slots;
    const uint8_t *cache;
    int64_t cache_bytes;
    const int64_t *offsets; /* [num_experts] */
    int64_t num_experts;
    const int64_t *row_starts; /* [num_experts + 1] */
    const int64_t *rows;       /* [num_rows] */
    int64_t num_rows;
    float *output; /* [tokens, slots, hidden_size]; only the named rows are written */
} lesonnx_batch;

/* Calls task(data, i) for i in 0..total-1, on any threads, and returns when all are done. */
typedef void (*lesonnx_parallel_for)(void *host, void (*task)(void *data, size_t index), size_t total, void *data);

/* The instruction set in use, e.g. "avx512vnni"; NULL if LESONNX_ISA names one that this machine does not have. */
LESONNX_API const char *lesonnx_isa(void);

/* The instruction sets that this machine has, best first, separated by spaces. */
LESONNX_API const char *lesonnx_isas(void);

/* Uses another instruction set from the next call on (NULL: choose again). Returns 0, or LESONNX_BAD_INPUT. */
LESONNX_API int lesonnx_use_isa(const char *name);

/* Checks a kind of expert: shapes, bits, offsets inside expert_bytes. */
LESONNX_API int lesonnx_check_kind(const lesonnx_kind *kind, char *message, size_t message_bytes);

/* output[m, matrix.rows] = input[m, matrix.columns] W^T (+ bias), on the calling thread. */
LESONNX_API int lesonnx_matmul(const lesonnx_matrix *matrix, const uint8_t *weights, int64_t weights_bytes,
                               const float *input, int64_t num_rows, float *output, char *message,
                               size_t message_bytes);

/* Computes a batch of experts; `parallel_for` NULL: on the calling thread. */
LESONNX_API int lesonnx_experts(const lesonnx_kind *kind, const lesonnx_batch *batch, lesonnx_parallel_for parallel_for,
                                void *host, char *message, size_t message_bytes);

/* Registers the operator lesonnx::Experts: what ONNX Runtime calls after it has loaded the library, and what a host
 * that links it calls itself. Returns NULL, or a status of that runtime's. */
struct OrtStatus;
struct OrtSessionOptions;
struct OrtApiBase;
LESONNX_API struct OrtStatus *RegisterCustomOps(struct OrtSessionOptions *options, const struct OrtApiBase *base);

/* Reads memory as fast as one thread can and returns a checksum: the yardstick of `lesonnx doctor` and `bench`. */
LESONNX_API uint64_t lesonnx_read_memory(const void *data, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
