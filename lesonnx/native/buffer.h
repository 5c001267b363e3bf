/* Buffers that begin on a cache line, from plain malloc. */
#ifndef LESONNX_BUFFER_H
#define LESONNX_BUFFER_H

#include <stdlib.h>

#include "kernel.h"

/* NULL without memory. */
LESONNX_INLINE void *lesonnx_new(size_t bytes) {
    /* The pointer to free lies before the buffer. */
    void *raw = malloc(bytes + 64 + sizeof(void *));
    if (!raw) {
        return NULL;
    }
    const uintptr_t at = ((uintptr_t)raw + sizeof(void *) + 63) & ~(uintptr_t)63;
    ((void **)at)[-1] = raw;
    return (void *)at;
}

LESONNX_INLINE void lesonnx_free(void *buffer) {
    if (buffer) {
        free(((void **)buffer)[-1]);
    }
}

#endif
