/* A fake driver without kernels. Linked with sources that have some, their functions are the ones. */
#include "fake_cuda.h"

__attribute__((weak)) struct launch *fake_cuda_prepare(
    const char *kernel, const unsigned grid[3], const unsigned block[3], unsigned shared, void **parameters, int *code
) {
    (void)kernel;
    (void)grid;
    (void)block;
    (void)shared;
    (void)parameters;
    *code = CUDA_ERROR_NOT_SUPPORTED;
    return NULL;
}

__attribute__((weak)) int fake_cuda_run(struct launch *launch) {
    (void)launch;
    return CUDA_ERROR_NOT_SUPPORTED;
}
