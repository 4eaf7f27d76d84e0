/* Devices and contexts. */
#include "fake_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICES_MAX = 16, MIB = 1 << 20 };

static struct device devices[DEVICES_MAX];
static int visible = -1;
static struct context contexts[DEVICES_MAX];
static _Thread_local struct context *bound;

/* The last byte is the place. The four before it are the machine's, if it has a number. */
static CUuuid uuid_of(int place) {
    CUuuid uuid;
    unsigned long machine = (unsigned long)setting("FAKE_CUDA_MACHINE", 0);
    for (int i = 0; i < 16; i++)
        uuid.bytes[i] = (unsigned char)(i == 15 ? place : 0xa0 + i);
    for (int i = 0; machine && i < 4; i++)
        uuid.bytes[14 - i] = (unsigned char)(machine >> (8 * i));
    return uuid;
}

static int is_mig(void) {
    return setting("FAKE_CUDA_MIG", 0) != 0;
}

static void in_words(CUuuid uuid, char text[48]) {
    const unsigned char *b = uuid.bytes;
    snprintf(
        text, 48, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", is_mig() ? "MIG" : "GPU", b[0],
        b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]
    );
}

/* The device that an entry of CUDA_VISIBLE_DEVICES names, or -1. */
static int named(const char *name, size_t length, int all) {
    char *end;
    long place = strtol(name, &end, 10);
    if (length > 0 && end == name + length)
        return place >= 0 && place < all ? (int)place : -1;
    for (int i = 0; i < all; i++) {
        char text[48];
        in_words(uuid_of(i), text);
        if (length > 4 && !strncmp(text, name, length))
            return i;
    }
    return -1;
}

static void show(int place) {
    struct device device = {place, uuid_of(place), 0, 0};
    devices[visible] = device;
    contexts[visible].device = &devices[visible];
    visible++;
}

static void look(void) {
    int all = (int)setting("FAKE_CUDA_DEVICES", 1), most = is_mig() ? 1 : DEVICES_MAX;
    const char *at = getenv("CUDA_VISIBLE_DEVICES");
    visible = 0;
    for (int i = 0; !at && i < all && i < most; i++)
        show(i);
    while (at && *at && visible < most) {
        size_t length = strcspn(at, ",");
        int place = named(at, length, all);
        if (place < 0)
            return;
        show(place);
        at += length + (at[length] == ',');
    }
}

struct device *device_at(CUdevice ordinal) {
    return ordinal >= 0 && ordinal < visible ? &devices[ordinal] : NULL;
}

int device_count(void) {
    return visible;
}

struct context *current(void) {
    return bound;
}

size_t device_total(void) {
    return (size_t)setting("FAKE_CUDA_MEMORY_MIB", 1024) * MIB;
}

static size_t foreign(void) {
    const char *name = getenv("FAKE_CUDA_FOREIGN");
    FILE *file = name ? fopen(name, "r") : NULL;
    unsigned long long bytes = 0;
    if (!file)
        return 0;
    if (fscanf(file, "%llu", &bytes) != 1)
        bytes = 0;
    fclose(file);
    return bytes;
}

size_t devices_held(void) {
    size_t held = 0;
    for (int i = 0; i < visible; i++)
        held += devices[i].contexts + devices[i].reserved;
    return held;
}

size_t device_free(const struct device *device) {
    size_t held = foreign() + shared_foreign() + device->contexts + device->reserved, total = device_total();
    return held < total ? total - held : 0;
}

/* For the fake libnvidia-ml: what is free, also before there is a context. */
API size_t fake_cuda_free(int place) {
    size_t bytes = 0;
    struct device untouched = {0};
    const struct device *device = &untouched;
    CUresult entered = enter(__func__);
    for (int i = 0; i < visible; i++)
        if (devices[i].place == place)
            device = &devices[i];
    bytes = device_free(device);
    leave(entered);
    return bytes;
}

API CUresult cuInit(unsigned flags) {
    (void)flags;
    ENTRY({
        if (visible < 0)
            look();
        if (visible == 0)
            result = CUDA_ERROR_NO_DEVICE;
    });
}

API CUresult cuDriverGetVersion(int *version) {
    ENTRY({ *version = (int)setting("FAKE_CUDA_VERSION", 13000); });
}

/* There is no profiler. */
API CUresult cuProfilerStart(void) {
    ENTRY();
}

API CUresult cuProfilerStop(void) {
    ENTRY();
}

API CUresult cuDeviceGetCount(int *count) {
    ENTRY({
        if (visible < 0)
            result = CUDA_ERROR_NOT_INITIALIZED;
        else
            *count = visible;
    });
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTRY({
        if (device_at(ordinal))
            *device = ordinal;
        else
            result = CUDA_ERROR_INVALID_DEVICE;
    });
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTRY({
        if (device_at(device))
            snprintf(name, (size_t)length, "Fake GPU %d", device_at(device)->place);
        else
            result = CUDA_ERROR_INVALID_DEVICE;
    });
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTRY({
        if (device_at(device))
            *uuid = device_at(device)->uuid;
        else
            result = CUDA_ERROR_INVALID_DEVICE;
    });
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    ENTRY({
        if (device_at(device))
            *bytes = device_total();
        else
            result = CUDA_ERROR_INVALID_DEVICE;
    });
}

/* CU_DEVICE_ATTRIBUTE_... by number; 0 for what nobody asked for yet. */
static int attribute(int which) {
    int capability = (int)setting("FAKE_CUDA_SM", 90);
    switch (which) {
    case 1: /* MAX_THREADS_PER_BLOCK */
        return 1024;
    case 8: /* MAX_SHARED_MEMORY_PER_BLOCK */
        return 48 << 10;
    case 10: /* WARP_SIZE */
        return 32;
    case 16: /* MULTIPROCESSOR_COUNT */
        return 4;
    case 75: /* COMPUTE_CAPABILITY_MAJOR */
        return capability / 10;
    case 76: /* COMPUTE_CAPABILITY_MINOR */
        return capability % 10;
    case 97: /* MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
        return 227 << 10;
    case 115: /* MEMORY_POOLS_SUPPORTED */
        return setting("FAKE_CUDA_POOLS", 1) != 0;
    default:
        return 0;
    }
}

API CUresult cuDeviceGetAttribute(int *value, int which, CUdevice device) {
    ENTRY({
        if (device_at(device))
            *value = attribute(which);
        else
            result = CUDA_ERROR_INVALID_DEVICE;
    });
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice ordinal) {
    ENTRY({
        struct device *device = device_at(ordinal);
        size_t cost = (size_t)setting("FAKE_CUDA_CONTEXT_MIB", 300) * MIB;
        if (!device) {
            result = CUDA_ERROR_INVALID_DEVICE;
        } else if (contexts[ordinal].references == 0 && device_free(device) < cost) {
            result = CUDA_ERROR_OUT_OF_MEMORY;
        } else {
            if (contexts[ordinal].references++ == 0)
                device->contexts += cost;
            *context = &contexts[ordinal];
        }
    });
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
    ENTRY({
        struct context *context = device_at(ordinal) ? &contexts[ordinal] : NULL;
        if (!context || context->references == 0)
            result = CUDA_ERROR_INVALID_CONTEXT;
        else if (--context->references == 0)
            context->device->contexts = 0;
    });
}

API CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTRY({ *context = bound; });
}

API CUresult cuCtxSetCurrent(CUcontext context) {
    ENTRY({ bound = context; });
}

API CUresult cuCtxSetFlags(unsigned flags) {
    (void)flags;
    ENTRY({
        if (!bound)
            result = CUDA_ERROR_INVALID_CONTEXT;
    });
}

/* For libraries beside this one: code of theirs comes to the device with its first use, and stays. */
API CUresult fake_cuda_load_code(size_t bytes) {
    ENTRY({
        if (!bound)
            result = CUDA_ERROR_INVALID_CONTEXT;
        else if (device_free(bound->device) < bytes)
            result = CUDA_ERROR_OUT_OF_MEMORY;
        else
            bound->device->contexts += bytes;
    });
}

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    ENTRY({
        if (!bound) {
            result = CUDA_ERROR_INVALID_CONTEXT;
        } else {
            *free_bytes = device_free(bound->device);
            *total_bytes = device_total();
        }
    });
}
