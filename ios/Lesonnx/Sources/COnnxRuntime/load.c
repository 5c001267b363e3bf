#include "COnnxRuntime.h"

#include <stdio.h>

#if defined(__APPLE__)

const OrtApiBase *lesonnx_ort_base(const char *path, char *message, size_t message_bytes) {
    (void)path;
    (void)message;
    (void)message_bytes;
    return OrtGetApiBase();
}

#else

#include <dlfcn.h>
#include <malloc.h>

/* Buffers of so many bytes are the system's own, to which they go back when they are freed. glibc's threshold would adapt to what
 * a program frees: the weights and activations of eyes would stay in the heap after they are closed. */
#define LARGE_BUFFER_BYTES (1 << 17)

const OrtApiBase *lesonnx_ort_base(const char *path, char *message, size_t message_bytes) {
    /* Not linked: a program that is would be tied to the version of the library that it was built with. */
    void *library = dlopen(path ? path : "libonnxruntime.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library && !path) {
        library = dlopen("libonnxruntime.so", RTLD_NOW | RTLD_LOCAL);
    }
    if (!library) {
        snprintf(message, message_bytes, "ONNX Runtime cannot be loaded: %s", dlerror());
        return NULL;
    }
    const OrtApiBase *(*entry)(void) = (const OrtApiBase *(*)(void))dlsym(library, "OrtGetApiBase");
    if (!entry) {
        snprintf(message, message_bytes, "%s is no ONNX Runtime: it has no OrtGetApiBase", path ? path : "libonnxruntime");
        return NULL;
    }
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, LARGE_BUFFER_BYTES);
#endif
    return entry();
}

#endif
