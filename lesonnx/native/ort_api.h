/* The few entries of ONNX Runtime's C interface that the operator uses, declared here since no package carries its
 * header.
 *
 * The interface is append-only: an entry keeps its place in the table for ever, so this header at version 21 serves
 * runtimes 1.21 and newer. tests/test_ort_header.py compares every declaration with the real header where it is
 * installed.
 */
#ifndef LESONNX_ORT_API_H
#define LESONNX_ORT_API_H

#include <stddef.h>
#include <stdint.h>

#define LESONNX_ORT_API_VERSION 21

#if defined(_WIN32)
#define LESONNX_ORT_CALL __stdcall
#else
#define LESONNX_ORT_CALL
#endif

typedef struct OrtStatus OrtStatus;
typedef struct OrtValue OrtValue;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtShapeInferContext OrtShapeInferContext;
typedef struct OrtApi OrtApi;
typedef struct OrtCustomOp OrtCustomOp;

enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };

/* ONNXTensorElementDataType */
enum { ORT_TENSOR_FLOAT = 1, ORT_TENSOR_UINT8 = 2, ORT_TENSOR_INT64 = 7 };

typedef struct OrtApiBase {
    const OrtApi *(LESONNX_ORT_CALL *GetApi)(uint32_t version);
    const char *(LESONNX_ORT_CALL *GetVersionString)(void);
} OrtApiBase;

/* OrtApi is a table of function pointers; entry `i` of it is found at index ORT_<name>. */
typedef OrtStatus *(LESONNX_ORT_CALL *OrtCreateStatus)(int code, const char *message);
typedef OrtStatus *(LESONNX_ORT_CALL *OrtGetTensorMutableData)(OrtValue *value, void **out);
typedef OrtStatus *(LESONNX_ORT_CALL *OrtGetTensorElementType)(const OrtTensorTypeAndShapeInfo *info, int *out);
typedef OrtStatus *(LESONNX_ORT_CALL *OrtGetDimensionsCount)(const OrtTensorTypeAndShapeInfo *info, size_t *out);
typedef OrtStatus *(LESONNX_ORT_CALL *OrtGetDimensions)(const OrtTensorTypeAndShapeInfo *info, int64_t *out,
                                                        size_t count);
typedef OrtStatus *(LESONNX_ORT_CALL *OrtGetTensorTypeAndShape)(const OrtValue *value, OrtTensorTypeAndShapeInfo **out);
typedef OrtStatus *(LESONNX_ORT_CALL *OrtCreateCustomOpDomain)(const char *domain, OrtCustomOpDomain **out);
typedef OrtStatus *(LESONNX_ORT_CALL *OrtCustomOpDomain_Add)(OrtCustomOpDomain *domain, const OrtCustomOp *op);
typedef OrtStatus *(LESONNX_ORT_CALL *OrtAddCustomOpDomain)(OrtSessionOptions *options, OrtCustomOpDomain *domain);
typedef OrtStatus *(LESONNX_ORT_CALL *OrtKernelInfoGetAttribute_float)(const OrtKernelInfo *info, const char *name,
                                                                       float *out);
typedef OrtStatus *(LESONNX_ORT_CALL *OrtKernelInfoGetAttribute_int64)(const OrtKernelInfo *info, const char *name,
                                                                       int64_t *out);
typedef OrtStatus *(LESONNX_ORT_CALL *OrtKernelInfoGetAttribute_string)(const OrtKernelInfo *info, const char *name,
                                                                        char *out, size_t *size);
typedef OrtStatus *(LESONNX_ORT_CALL *OrtKernelContext_GetInput)(const OrtKernelContext *context, size_t index,
                                                                 const OrtValue **out);
typedef OrtStatus *(LESONNX_ORT_CALL *OrtKernelContext_GetOutput)(OrtKernelContext *context, size_t index,
                                                                  const int64_t *dims, size_t count, OrtValue **out);
typedef void(LESONNX_ORT_CALL *OrtReleaseStatus)(OrtStatus *status);
typedef void(LESONNX_ORT_CALL *OrtReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo *info);
typedef OrtStatus *(LESONNX_ORT_CALL *OrtKernelContext_ParallelFor)(const OrtKernelContext *context,
                                                                    void (*task)(void *, size_t), size_t total,
                                                                    size_t num_batch, void *data);

enum {
    ORT_CreateStatus = 0,
    ORT_CreateCustomOpDomain = 26,
    ORT_CustomOpDomain_Add = 27,
    ORT_AddCustomOpDomain = 28,
    ORT_GetTensorMutableData = 51,
    ORT_GetTensorElementType = 60,
    ORT_GetDimensionsCount = 61,
    ORT_GetDimensions = 62,
    ORT_GetTensorTypeAndShape = 65,
    ORT_KernelInfoGetAttribute_float = 85,
    ORT_KernelInfoGetAttribute_int64 = 86,
    ORT_KernelInfoGetAttribute_string = 87,
    ORT_KernelContext_GetInput = 90,
    ORT_KernelContext_GetOutput = 91,
    ORT_ReleaseStatus = 93,
    ORT_ReleaseTensorTypeAndShapeInfo = 99,
    ORT_KernelContext_ParallelFor = 274
};

/* ORT_ENTRY(api, GetDimensions)(info, dims, 3) calls that entry with its own type. */
#define ORT_ENTRY(api, name) ((Ort##name)((void (*const *)(void))(const void *)(api))[ORT_##name])

struct OrtCustomOp {
    uint32_t version;
    void *(LESONNX_ORT_CALL *CreateKernel)(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info);
    const char *(LESONNX_ORT_CALL *GetName)(const OrtCustomOp *op);
    const char *(LESONNX_ORT_CALL *GetExecutionProviderType)(const OrtCustomOp *op);
    int(LESONNX_ORT_CALL *GetInputType)(const OrtCustomOp *op, size_t index);
    size_t(LESONNX_ORT_CALL *GetInputTypeCount)(const OrtCustomOp *op);
    int(LESONNX_ORT_CALL *GetOutputType)(const OrtCustomOp *op, size_t index);
    size_t(LESONNX_ORT_CALL *GetOutputTypeCount)(const OrtCustomOp *op);
    void(LESONNX_ORT_CALL *KernelCompute)(void *kernel, OrtKernelContext *context);
    void(LESONNX_ORT_CALL *KernelDestroy)(void *kernel);
    int(LESONNX_ORT_CALL *GetInputCharacteristic)(const OrtCustomOp *op, size_t index);
    int(LESONNX_ORT_CALL *GetOutputCharacteristic)(const OrtCustomOp *op, size_t index);
    int(LESONNX_ORT_CALL *GetInputMemoryType)(const OrtCustomOp *op, size_t index);
    int(LESONNX_ORT_CALL *GetVariadicInputMinArity)(const OrtCustomOp *op);
    int(LESONNX_ORT_CALL *GetVariadicInputHomogeneity)(const OrtCustomOp *op);
    int(LESONNX_ORT_CALL *GetVariadicOutputMinArity)(const OrtCustomOp *op);
    int(LESONNX_ORT_CALL *GetVariadicOutputHomogeneity)(const OrtCustomOp *op);
    OrtStatus *(LESONNX_ORT_CALL *CreateKernelV2)(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info,
                                                  void **kernel);
    OrtStatus *(LESONNX_ORT_CALL *KernelComputeV2)(void *kernel, OrtKernelContext *context);
    OrtStatus *(LESONNX_ORT_CALL *InferOutputShapeFn)(const OrtCustomOp *op, OrtShapeInferContext *context);
    int(LESONNX_ORT_CALL *GetStartVersion)(const OrtCustomOp *op);
    int(LESONNX_ORT_CALL *GetEndVersion)(const OrtCustomOp *op);
    size_t(LESONNX_ORT_CALL *GetMayInplace)(int **input_index, int **output_index);
    void(LESONNX_ORT_CALL *ReleaseMayInplace)(int *input_index, int *output_index);
    size_t(LESONNX_ORT_CALL *GetAliasMap)(int **input_index, int **output_index);
    void(LESONNX_ORT_CALL *ReleaseAliasMap)(int *input_index, int *output_index);
};

#endif
