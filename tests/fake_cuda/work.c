/* Modules and launches. */
#include "fake_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Lives as long as the process, so that work of one that is unloaded shows. */
struct module {
    int is_unloaded;
};

struct function {
    struct module *module;
    char name[256];
};

API CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    ENTRY({
        if (!image || !current()) {
            result = image ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_VALUE;
        } else {
            *module = calloc(1, sizeof **module);
            if (!*module)
                abort();
        }
    });
}

API CUresult cuModuleUnload(CUmodule module) {
    ENTRY({ module->is_unloaded = 1; });
}

/* Any name will do: whether there is such a kernel shows when it is launched. */
API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ENTRY({
        if (!module) {
            result = CUDA_ERROR_INVALID_HANDLE;
        } else {
            *function = calloc(1, sizeof **function);
            if (!*function)
                abort();
            (*function)->module = module;
            snprintf((*function)->name, sizeof (*function)->name, "%s", name);
        }
    });
}

API CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
    (void)function;
    (void)attribute;
    (void)value;
    ENTRY({});
}

API CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction function) {
    (void)attribute;
    (void)function;
    ENTRY({ *value = 0; });
}

API CUresult cuFuncSetCacheConfig(CUfunction function, int config) {
    (void)function;
    (void)config;
    ENTRY({});
}

struct launched {
    const struct function *function;
    struct launch *launch;
};

static CUresult run_launch(void *data) {
    const struct launched *launched = data;
    CUresult told = told_to_fail("kernel");
    if (told != CUDA_SUCCESS)
        return told;
    if (launched->function->module->is_unloaded) {
        fprintf(stderr, "fake_cuda: %s runs after its module was unloaded\n", launched->function->name);
        return CUDA_ERROR_LAUNCH_FAILED;
    }
    return fake_cuda_run(launched->launch);
}

API CUresult cuLaunchKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared, CUstream stream, void **parameters, void **extra
) {
    (void)extra;
    struct host_range none = {0, 0};
    ENTRY({
        unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
        size_t threads = (size_t)block_x * block_y * block_z;
        struct launched launched = {function, NULL};
        if (threads == 0 || threads > 1024 || !grid_x || !grid_y || !grid_z || grid_y > 65535 || grid_z > 65535)
            result = CUDA_ERROR_INVALID_VALUE;
        else
            launched.launch = fake_cuda_prepare(function->name, grid, block, shared, parameters, &result);
        if (launched.launch)
            result = give_work(stream, run_launch, &launched, sizeof launched, none);
    });
}

API CUresult cuGetErrorString(CUresult code, const char **text) {
    (void)code;
    *text = "an error of the fake";
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult code, const char **text) {
    return cuGetErrorString(code, text);
}
