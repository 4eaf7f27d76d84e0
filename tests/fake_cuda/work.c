/* Streams and events, which are done as soon as they are asked for, modules and launches. */
#include "fake_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct stream {
    struct context *context;
};

struct event {
    int recorded;
};

struct module {
    size_t functions;
};

struct function {
    char name[256];
};

API CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    (void)flags;
    ENTRY({
        if (!current()) {
            result = CUDA_ERROR_INVALID_CONTEXT;
        } else {
            *stream = calloc(1, sizeof **stream);
            if (!*stream)
                abort();
            (*stream)->context = current();
        }
    });
}

API CUresult cuStreamDestroy_v2(CUstream stream) {
    ENTRY({ free(stream); });
}

API CUresult cuStreamSynchronize(CUstream stream) {
    (void)stream;
    ENTRY({
        if (!current())
            result = CUDA_ERROR_INVALID_CONTEXT;
    });
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    (void)stream;
    (void)event;
    (void)flags;
    ENTRY({});
}

API CUresult cuEventCreate(CUevent *event, unsigned flags) {
    (void)flags;
    ENTRY({
        *event = calloc(1, sizeof **event);
        if (!*event)
            abort();
    });
}

API CUresult cuEventRecord(CUevent event, CUstream stream) {
    (void)stream;
    ENTRY({ event->recorded = 1; });
}

API CUresult cuEventSynchronize(CUevent event) {
    (void)event;
    ENTRY({});
}

API CUresult cuEventQuery(CUevent event) {
    (void)event;
    ENTRY({});
}

API CUresult cuEventDestroy_v2(CUevent event) {
    ENTRY({ free(event); });
}

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
    ENTRY({ free(module); });
}

/* Any name will do: whether there is such a kernel shows when it is launched. */
API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ENTRY({
        if (!module) {
            result = CUDA_ERROR_INVALID_HANDLE;
        } else {
            /* It lives as long as its module, which is to say for the whole test. */
            *function = calloc(1, sizeof **function);
            if (!*function)
                abort();
            module->functions++;
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

API CUresult cuLaunchKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared, CUstream stream, void **parameters, void **extra
) {
    (void)stream;
    (void)extra;
    ENTRY({
        unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
        size_t threads = (size_t)block_x * block_y * block_z;
        if (threads == 0 || threads > 1024 || !grid_x || !grid_y || !grid_z || grid_y > 65535 || grid_z > 65535)
            result = CUDA_ERROR_INVALID_VALUE;
        else
            result = fake_cuda_launch(function->name, grid, block, shared, parameters);
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
