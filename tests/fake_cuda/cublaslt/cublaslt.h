/* What the parts of the fake cuBLASLt share: names and numbers of the public reference. */
#ifndef CUBLASLT_H
#define CUBLASLT_H

#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_16F = 2, R_16BF = 14 };
enum { COMPUTE_32F = 68, OP_N = 0, OP_T = 1, EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4 };

struct desc {
    int compute, scale;
    int32_t transposed[2];
    uint32_t epilogue;
    const void *bias;
};

/* A matrix in columns. */
struct layout {
    int data;
    uint64_t rows, columns;
    int64_t leading;
};

struct preference {
    uint64_t workspace;
    uint32_t reductions, alignment[4];
};

/* What an algorithm keeps in its 64 opaque bytes. */
struct algorithm {
    uint64_t mark, rows, inner, workspace, alignment;
    int32_t data;
    uint32_t epilogue;
    /* Among those that the library has for a product. */
    uint64_t number, rest;
};

/* cublasLtMatmulHeuristicResult_t */
struct result {
    struct algorithm algorithm;
    size_t workspace;
    uint32_t state;
    float waves;
    int32_t reserved[4];
};

_Static_assert(sizeof(struct algorithm) == 64, "as in the header");

/* D = A' B (+ bias), A' being A or its transpose; sums in f32, one after the other. */
void multiply(
    const struct desc *desc, const struct layout *a, const void *a_at, const struct layout *b, const void *b_at,
    const struct layout *d, void *d_at
);

#endif
