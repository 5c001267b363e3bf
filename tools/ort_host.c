/* Runs one case of tools/ort_cases.py inside an ONNX Runtime library, through the real custom operator.
 *
 *   ort_host libonnxruntime.so liblesonnx.so case output threads
 *
 * A case is int64 model bytes, T, H, slots, cache bytes, n, m; then the model, hidden, cache, offsets, row_starts,
 * rows.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../lesonnx/native/ort_api.h"

typedef struct OrtEnv OrtEnv;
typedef struct OrtSession OrtSession;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef OrtStatus *(*RegisterFn)(OrtSessionOptions *, const OrtApiBase *);

static const OrtApi *api;

/* Entry `index` of the table, as a function of the given type. */
#define CALL(index, type) ((type)((void (*const *)(void))(const void *)api)[index])

static void check(OrtStatus *status, const char *what) {
    if (status) {
        fprintf(stderr, "%s: %s\n", what, CALL(2, const char *(*)(const OrtStatus *))(status));
        exit(1);
    }
}

static OrtValue *tensor(OrtMemoryInfo *memory, void *data, size_t bytes, const int64_t *shape, size_t rank, int type) {
    OrtValue *value = NULL;
    check(CALL(49, OrtStatus * (*)(const OrtMemoryInfo *, void *, size_t, const int64_t *, size_t, int, OrtValue **))(
              memory, data, bytes, shape, rank, type, &value),
          "CreateTensorWithDataAsOrtValue");
    return value;
}

static void *symbol(const char *library, const char *name) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    void *found = handle ? dlsym(handle, name) : NULL;
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return found;
}

int main(int argc, char **argv) {
    if (argc != 6) {
        return 2;
    }
    const OrtApiBase *base = ((const OrtApiBase *(*)(void))symbol(argv[1], "OrtGetApiBase"))();
    RegisterFn register_ops = (RegisterFn)symbol(argv[2], "RegisterCustomOps");
    const char *(*isa)(void) = (const char *(*)(void))symbol(argv[2], "lesonnx_isa");
    api = base->GetApi(LESONNX_ORT_API_VERSION);

    FILE *file = fopen(argv[3], "rb");
    int64_t h[7];
    if (!file || fread(h, 8, 7, file) != 7) {
        return 2;
    }
    const size_t sizes[6] = {(size_t)h[0],       (size_t)(h[1] * h[2] * 4), (size_t)h[4],
                             (size_t)(h[5] * 8), (size_t)((h[5] + 1) * 8),  (size_t)(h[6] * 8)};
    void *data[6];
    for (int i = 0; i < 6; i++) {
        data[i] = malloc(sizes[i] + 64);
        if (!data[i] || fread(data[i], 1, sizes[i], file) != sizes[i]) {
            return 2;
        }
    }
    fclose(file);

    OrtEnv *env = NULL;
    OrtSessionOptions *options = NULL;
    OrtSession *session = NULL;
    OrtMemoryInfo *memory = NULL;
    check(CALL(3, OrtStatus * (*)(int, const char *, OrtEnv **))(3, "host", &env), "CreateEnv");
    check(CALL(10, OrtStatus * (*)(OrtSessionOptions **))(&options), "CreateSessionOptions");
    check(CALL(24, OrtStatus * (*)(OrtSessionOptions *, int))(options, atoi(argv[5])), "SetIntraOpNumThreads");
    check(register_ops(options, base), "RegisterCustomOps");
    check(CALL(8, OrtStatus * (*)(const OrtEnv *, const void *, size_t, const OrtSessionOptions *, OrtSession **))(
              env, data[0], sizes[0], options, &session),
          "CreateSessionFromArray");
    check(CALL(69, OrtStatus * (*)(int, int, OrtMemoryInfo **))(0, 0, &memory), "CreateCpuMemoryInfo");

    static const char *const names[5] = {"hidden", "cache", "offsets", "row_starts", "rows"};
    static const char *const output_names[1] = {"expert_out"};
    const int64_t shapes[5][2] = {{h[1], h[2]}, {h[4], 0}, {h[5], 0}, {h[5] + 1, 0}, {h[6], 0}};
    static const int types[5] = {ORT_TENSOR_FLOAT, ORT_TENSOR_UINT8, ORT_TENSOR_INT64, ORT_TENSOR_INT64,
                                 ORT_TENSOR_INT64};
    OrtValue *inputs[5];
    for (int i = 0; i < 5; i++) {
        inputs[i] = tensor(memory, data[i + 1], sizes[i + 1], shapes[i], i == 0 ? 2 : 1, types[i]);
    }
    const int64_t output_shape[3] = {h[1], h[3], h[2]};
    const size_t output_bytes = (size_t)(h[1] * h[3] * h[2] * 4);
    void *output = calloc(output_bytes, 1);
    OrtValue *outputs[1] = {tensor(memory, output, output_bytes, output_shape, 3, ORT_TENSOR_FLOAT)};
    check(CALL(9, OrtStatus * (*)(OrtSession *, const void *, const char *const *, const OrtValue *const *, size_t,
                                  const char *const *, size_t, OrtValue **))(
              session, NULL, names, (const OrtValue *const *)inputs, 5, output_names, 1, outputs),
          "Run");
    file = fopen(argv[4], "wb");
    if (!file || fwrite(output, 1, output_bytes, file) != output_bytes || fclose(file)) {
        return 2;
    }
    printf("ONNX Runtime %s, %s, %s threads\n", base->GetVersionString(), isa(), argv[5]);
    return 0;
}
