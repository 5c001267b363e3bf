/* ONNX Runtime's C interface as Swift sees it, and how it is found: linked on Apple systems, loaded elsewhere.
 *
 * Both places of the header are called the same: a framework named onnxruntime in the official Swift package, and the
 * include folder of Debian's libonnxruntime-dev.
 */
#ifndef LESONNX_CONNXRUNTIME_H
#define LESONNX_CONNXRUNTIME_H

#include <onnxruntime/onnxruntime_c_api.h>
#include <stddef.h>

/* The version of the interface that this package uses: the oldest runtime that serves it is 1.21. */
#define LESONNX_ORT_API 21

/* The runtime's entry: the one this program is linked with (`path` is not looked at), or on other systems that of the
 * library at `path`, NULL for the system's. It is loaded once and stays, and glibc is told to give large freed buffers
 * back at once. NULL where there is none; one line of why is in `message` then. Thread-safe. */
const OrtApiBase *lesonnx_ort_base(const char *path, char *message, size_t message_bytes);

/* Registers the operator lesonnx::Experts, which CLesonnx links under this name: the runtime's own extensions bring
 * another function called RegisterCustomOps, and one program may hold both. NULL, or a status. */
OrtStatus *lesonnx_register_experts(OrtSessionOptions *options, const OrtApiBase *base);

#endif
