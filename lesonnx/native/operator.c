/* The ONNX Runtime operator lesonnx::Experts: reads attributes and tensors, checks shapes, hands over to experts.c.
 *
 * Inputs hidden [T,H] float, cache [bytes] uint8, offsets [n] int64, row_starts [n+1] int64, rows [m] int64; output
 * [T,slots,H] float, of which only the named rows are written. A kernel object is read-only after its creation, so
 * that runs may overlap.
 */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "format.h"
#include "ort_api.h"

#define MESSAGE_BYTES 256

typedef struct {
    const OrtApi *api;
    lesonnx_kind kind;
    int64_t slots;
} experts_kernel;

static OrtStatus *error(const OrtApi *api, const char *message) {
    char line[MESSAGE_BYTES + 32];
    snprintf(line, sizeof line, "lesonnx::Experts: %s", message);
    return ORT_ENTRY(api, CreateStatus)(ORT_INVALID_ARGUMENT, line);
}

/* Attributes: the first that is missing or of another type leaves its name in `missing`. */
typedef struct {
    const OrtApi *api;
    const OrtKernelInfo *info;
    char missing[64];
} attributes;

static void note(attributes *a, OrtStatus *status, const char *name) {
    if (status) {
        ORT_ENTRY(a->api, ReleaseStatus)(status);
        if (!a->missing[0]) {
            snprintf(a->missing, sizeof a->missing, "%s", name);
        }
    }
}

static int64_t get_int(attributes *a, const char *prefix, const char *name) {
    char full[64];
    int64_t value = 0;
    snprintf(full, sizeof full, "%s%s", prefix, name);
    note(a, ORT_ENTRY(a->api, KernelInfoGetAttribute_int64)(a->info, full, &value), full);
    return value;
}

static float get_float(attributes *a, const char *name) {
    float value = 0.0f;
    note(a, ORT_ENTRY(a->api, KernelInfoGetAttribute_float)(a->info, name, &value), name);
    return value;
}

static lesonnx_matrix get_matrix(attributes *a, const char *prefix, int64_t rows, int64_t columns) {
    lesonnx_matrix m;
    m.rows = rows;
    m.columns = columns;
    m.bits = get_int(a, prefix, "_bits");
    m.block_size = get_int(a, prefix, "_block_size");
    m.weight_offset = get_int(a, prefix, "_weight_offset");
    m.scales_offset = get_int(a, prefix, "_scales_offset");
    m.bias_offset = get_int(a, prefix, "_bias_offset");
    return m;
}

/* The activation's number, or -1. */
static int64_t get_activation(attributes *a) {
    static const char *const names[] = {"swiglu", "geglu", "reglu", "swiglu_clamped"};
    char name[32] = {0};
    size_t size = sizeof name;
    OrtStatus *status = ORT_ENTRY(a->api, KernelInfoGetAttribute_string)(a->info, "activation", name, &size);
    note(a, status, "activation");
    for (int i = 0; i < 4 && !status; i++) {
        if (strcmp(name, names[i]) == 0) {
            return i;
        }
    }
    return -1;
}

static OrtStatus *LESONNX_ORT_CALL create_kernel(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info,
                                                 void **out) {
    (void)op;
    attributes a = {api, info, {0}};
    experts_kernel k = {0};
    char message[MESSAGE_BYTES];
    k.api = api;
    k.slots = get_int(&a, "", "slots");
    k.kind.hidden_size = get_int(&a, "", "hidden_size");
    k.kind.intermediate_size = get_int(&a, "", "intermediate_size");
    k.kind.expert_bytes = get_int(&a, "", "expert_bytes");
    k.kind.activation = get_activation(&a);
    k.kind.alpha = get_float(&a, "alpha");
    k.kind.limit = get_float(&a, "limit");
    k.kind.gate = get_matrix(&a, "gate", k.kind.intermediate_size, k.kind.hidden_size);
    k.kind.up = get_matrix(&a, "up", k.kind.intermediate_size, k.kind.hidden_size);
    k.kind.down = get_matrix(&a, "down", k.kind.hidden_size, k.kind.intermediate_size);
    if (a.missing[0]) {
        snprintf(message, sizeof message, "attribute %s is missing or of another type", a.missing);
        return error(api, message);
    }
    if (k.slots < 1 || k.slots > INT32_MAX) {
        snprintf(message, sizeof message, "slots is %" PRId64 ", expected at least 1", k.slots);
        return error(api, message);
    }
    if (k.kind.activation < 0) {
        return error(api, "activation is unknown, expected swiglu, geglu, reglu or swiglu_clamped");
    }
    if (lesonnx_check_kind(&k.kind, message, sizeof message)) {
        return error(api, message);
    }
    experts_kernel *kernel = malloc(sizeof *kernel);
    if (!kernel) {
        return error(api, "out of memory");
    }
    *kernel = k;
    *out = kernel;
    return NULL;
}

static void LESONNX_ORT_CALL destroy_kernel(void *kernel) { free(kernel); }

/* The data of input `index`, its element type and rank checked; dims receives the shape. */
static OrtStatus *get_input(const OrtApi *api, const OrtKernelContext *context, size_t index, const char *name,
                            int type, size_t rank, int64_t *dims, const void **data) {
    const OrtValue *value = NULL;
    OrtTensorTypeAndShapeInfo *shape = NULL;
    void *mutable_data = NULL;
    size_t count = 0;
    int actual = 0;
    OrtStatus *status = ORT_ENTRY(api, KernelContext_GetInput)(context, index, &value);
    if (!status && !value) {
        status = error(api, "an input is missing");
    }
    if (!status) {
        status = ORT_ENTRY(api, GetTensorTypeAndShape)(value, &shape);
    }
    if (!status) {
        status = ORT_ENTRY(api, GetTensorElementType)(shape, &actual);
    }
    if (!status) {
        status = ORT_ENTRY(api, GetDimensionsCount)(shape, &count);
    }
    if (!status && (actual != type || count != rank)) {
        char message[MESSAGE_BYTES];
        snprintf(message, sizeof message, "%s has element type %d and %zu dimensions, expected %d and %zu", name,
                 actual, count, type, rank);
        status = error(api, message);
    }
    if (!status) {
        status = ORT_ENTRY(api, GetDimensions)(shape, dims, rank);
    }
    if (shape) {
        ORT_ENTRY(api, ReleaseTensorTypeAndShapeInfo)(shape);
    }
    if (!status) {
        /* The interface has no const variant; the operator does not write through it. */
        status = ORT_ENTRY(api, GetTensorMutableData)((OrtValue *)(uintptr_t)value, &mutable_data);
    }
    *data = mutable_data;
    return status;
}

typedef struct {
    const OrtApi *api;
    const OrtKernelContext *context;
    OrtStatus *status;
} thread_host;

static void parallel_for(void *host, void (*task)(void *, size_t), size_t total, void *data) {
    thread_host *h = host;
    h->status = ORT_ENTRY(h->api, KernelContext_ParallelFor)(h->context, task, total, 0, data);
}

static OrtStatus *LESONNX_ORT_CALL compute(void *op_kernel, OrtKernelContext *context) {
    const experts_kernel *k = op_kernel;
    const OrtApi *api = k->api;
    lesonnx_batch b = {0};
    int64_t hidden[2], cache, offsets, row_starts, rows;
    const void *data[5] = {0};
    char message[MESSAGE_BYTES];
    OrtStatus *status = get_input(api, context, 0, "hidden", ORT_TENSOR_FLOAT, 2, hidden, &data[0]);
    if (!status) {
        status = get_input(api, context, 1, "cache", ORT_TENSOR_UINT8, 1, &cache, &data[1]);
    }
    if (!status) {
        status = get_input(api, context, 2, "offsets", ORT_TENSOR_INT64, 1, &offsets, &data[2]);
    }
    if (!status) {
        status = get_input(api, context, 3, "row_starts", ORT_TENSOR_INT64, 1, &row_starts, &data[3]);
    }
    if (!status) {
        status = get_input(api, context, 4, "rows", ORT_TENSOR_INT64, 1, &rows, &data[4]);
    }
    if (status) {
        return status;
    }
    if (hidden[1] != k->kind.hidden_size) {
        snprintf(message, sizeof message, "hidden is [%" PRId64 ",%" PRId64 "], expected [T,%" PRId64 "]", hidden[0],
                 hidden[1], k->kind.hidden_size);
        return error(api, message);
    }
    if (row_starts != offsets + 1) {
        snprintf(message, sizeof message, "row_starts has %" PRId64 " values, expected %" PRId64 " (offsets and one)",
                 row_starts, offsets + 1);
        return error(api, message);
    }
    const int64_t dims[3] = {hidden[0], k->slots, k->kind.hidden_size};
    OrtValue *output = NULL;
    void *out = NULL;
    status = ORT_ENTRY(api, KernelContext_GetOutput)(context, 0, dims, 3, &output);
    if (!status) {
        status = ORT_ENTRY(api, GetTensorMutableData)(output, &out);
    }
    if (status) {
        return status;
    }
    b.hidden = data[0];
    b.tokens = hidden[0];
    b.slots = k->slots;
    b.cache = data[1];
    b.cache_bytes = cache;
    b.offsets = data[2];
    b.num_experts = offsets;
    b.row_starts = data[3];
    b.rows = data[4];
    b.num_rows = rows;
    b.output = out;
    thread_host host = {api, context, NULL};
    const int code = lesonnx_experts(&k->kind, &b, parallel_for, &host, message, sizeof message);
    if (host.status) {
        return host.status;
    }
    return code ? error(api, message) : NULL;
}

static const char *LESONNX_ORT_CALL get_name(const OrtCustomOp *op) {
    (void)op;
    return "Experts";
}
static const char *LESONNX_ORT_CALL get_provider(const OrtCustomOp *op) {
    (void)op;
    return NULL; /* CPU */
}
static int LESONNX_ORT_CALL input_type(const OrtCustomOp *op, size_t index) {
    (void)op;
    return index == 0 ? ORT_TENSOR_FLOAT : index == 1 ? ORT_TENSOR_UINT8 : ORT_TENSOR_INT64;
}
static size_t LESONNX_ORT_CALL input_count(const OrtCustomOp *op) {
    (void)op;
    return 5;
}
static int LESONNX_ORT_CALL output_type(const OrtCustomOp *op, size_t index) {
    (void)op, (void)index;
    return ORT_TENSOR_FLOAT;
}
static size_t LESONNX_ORT_CALL output_count(const OrtCustomOp *op) {
    (void)op;
    return 1;
}
static int LESONNX_ORT_CALL zero(const OrtCustomOp *op, size_t index) { /* required; default memory */
    (void)op, (void)index;
    return 0;
}
static int LESONNX_ORT_CALL one(const OrtCustomOp *op) { /* arity and homogeneity, of no use here; first version */
    (void)op;
    return 1;
}

static const OrtCustomOp experts_op = {
    .version = LESONNX_ORT_API_VERSION,
    .GetName = get_name,
    .GetExecutionProviderType = get_provider,
    .GetInputType = input_type,
    .GetInputTypeCount = input_count,
    .GetOutputType = output_type,
    .GetOutputTypeCount = output_count,
    .KernelDestroy = destroy_kernel,
    .GetInputCharacteristic = zero,
    .GetOutputCharacteristic = zero,
    .GetInputMemoryType = zero,
    .GetVariadicInputMinArity = one,
    .GetVariadicInputHomogeneity = one,
    .GetVariadicOutputMinArity = one,
    .GetVariadicOutputHomogeneity = one,
    .CreateKernelV2 = create_kernel,
    .KernelComputeV2 = compute,
    .GetStartVersion = one,
    .GetEndVersion = one,
};

OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
    const OrtApi *api = base->GetApi(LESONNX_ORT_API_VERSION);
    if (!api) {
        const OrtApi *oldest = base->GetApi(1);
        char message[MESSAGE_BYTES];
        snprintf(message, sizeof message, "ONNX Runtime is %s, expected 1.%d or newer", base->GetVersionString(),
                 LESONNX_ORT_API_VERSION);
        return oldest ? error(oldest, message) : NULL;
    }
    if (!lesonnx_isa()) {
        char message[MESSAGE_BYTES];
        snprintf(message, sizeof message, "LESONNX_ISA=%s is not one of: %s", getenv("LESONNX_ISA"), lesonnx_isas());
        return error(api, message);
    }
    /* A domain must outlive every session made with it, and its runtime offers no moment to release it; there is one
     * for each runtime in the process, and it stays. */
    static _Atomic(OrtCustomOpDomain *) domain;
    static _Atomic(const OrtApi *) domain_api;
    OrtCustomOpDomain *use = atomic_load(&domain);
    if (!use || atomic_load(&domain_api) != api) {
        OrtStatus *status = ORT_ENTRY(api, CreateCustomOpDomain)("lesonnx", &use);
        if (!status) {
            status = ORT_ENTRY(api, CustomOpDomain_Add)(use, &experts_op);
        }
        if (status) {
            return status;
        }
        atomic_store(&domain, NULL);
        atomic_store(&domain_api, api);
        atomic_store(&domain, use);
    }
    return ORT_ENTRY(api, AddCustomOpDomain)(options, use);
}
