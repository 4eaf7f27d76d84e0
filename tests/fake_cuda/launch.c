/* A fake driver without kernels. Linked with sources that have some, their `fake_cuda_launch` is the one. */
#include "fake_cuda.h"

__attribute__((weak)) int fake_cuda_launch(
    const char *kernel, const unsigned grid[3], const unsigned block[3], unsigned shared, void **parameters
) {
    (void)kernel;
    (void)grid;
    (void)block;
    (void)shared;
    (void)parameters;
    return CUDA_ERROR_NOT_SUPPORTED;
}
