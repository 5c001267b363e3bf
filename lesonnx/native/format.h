/* Checks that the operator, the batch and the single product share. */
#ifndef LESONNX_FORMAT_H
#define LESONNX_FORMAT_H

#include <stdarg.h>

#include "kernel.h"

/* Writes one line into `message` (if any) and returns LESONNX_BAD_INPUT. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
int lesonnx_fail(char *message, size_t bytes, const char *format, ...);

/* Shape, bits, and that weight, scales and bias lie inside `total_bytes`. */
int lesonnx_check_matrix(const char *name, const lesonnx_matrix *matrix, int64_t total_bytes, char *message,
                         size_t bytes);

#endif
