/* The arithmetic: elements become f32, and the sum is rounded to an element once. */
#include "cublaslt.h"

#include <stdlib.h>
#include <string.h>

static float widen(int data, const void *from, size_t at) {
    if (data == R_32F)
        return ((const float *)from)[at];
    if (data == R_16F)
        return (float)((const _Float16 *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void narrow(int data, void *to, size_t at, float x) {
    if (data == R_32F) {
        ((float *)to)[at] = x;
    } else if (data == R_16F) {
        ((_Float16 *)to)[at] = (_Float16)x;
    } else {
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        /* To the nearest, to even if there are two; a NaN stays one. */
        uint32_t rounded = x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
        ((uint16_t *)to)[at] = (uint16_t)(rounded >> 16);
    }
}

/* Columns of a matrix as f32, each without a gap; rows, if it is transposed. */
static float *widened(const struct layout *layout, const void *from, int transposed) {
    size_t outer = transposed ? layout->rows : layout->columns, inner = transposed ? layout->columns : layout->rows;
    float *to = malloc(outer * inner * sizeof *to + 1);
    if (!to)
        abort();
    for (size_t i = 0; i < outer; i++)
        for (size_t j = 0; j < inner; j++) {
            size_t row = transposed ? i : j, column = transposed ? j : i;
            to[i * inner + j] = widen(layout->data, from, column * (size_t)layout->leading + row);
        }
    return to;
}

static float dot(const float *a, const float *b, size_t count) {
    float sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += a[i] * b[i];
    return sum;
}

void multiply(
    const struct desc *desc, const struct layout *a, const void *a_at, const struct layout *b, const void *b_at,
    const struct layout *d, void *d_at
) {
    /* A' in rows, B' in columns: both along what is summed over. */
    float *rows = widened(a, a_at, desc->transposed[0] == OP_N), *columns = widened(b, b_at, desc->transposed[1] == OP_T);
    size_t inner = desc->transposed[0] == OP_T ? a->rows : a->columns;
    for (size_t column = 0; column < d->columns; column++)
        for (size_t row = 0; row < d->rows; row++) {
            float sum = dot(rows + row * inner, columns + column * inner, inner);
            if (desc->epilogue == EPILOGUE_BIAS)
                sum += widen(d->data, desc->bias, row);
            narrow(d->data, d_at, column * (size_t)d->leading + row, sum);
        }
    free(rows);
    free(columns);
}
