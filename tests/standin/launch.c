/* A stand-in without kernels. Linked with sources that have some, their `standin_launch` is the one. */
#include "standin.h"

__attribute__((weak)) int standin_launch(
    const char *kernel, const unsigned grid[3], const unsigned block[3], unsigned shared, void **parameters
) {
    (void)kernel;
    (void)grid;
    (void)block;
    (void)shared;
    (void)parameters;
    return CUDA_ERROR_NOT_SUPPORTED;
}
