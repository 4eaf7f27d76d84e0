/* A fake of the NVIDIA Management Library, beside that for the driver: it tells of the same memory, and makes up the
 * rest. Written from the public reference of NVML.
 *
 *   FAKE_CUDA_THROTTLES  bits of nvmlDeviceGetCurrentClocksThrottleReasons, 0 unless set
 *   FAKE_CUDA_NO_POWER   1: a card that does not measure its power
 *   FAKE_CUDA_PIDS_FROM  added to the ids of processes: those of another namespace, as some containers see them
 *   FAKE_CUDA_NO_HELD    1: a driver that tells which processes there are, and not what they hold
 *   FAKE_CUDA_HANGS      a file: while it is there, a reading of the temperature does not come back
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

enum { PROCESSES_MAX = 64 };

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

/* nvmlProcessInfo_t, by the reference. */
struct process_info {
    unsigned pid;
    unsigned long long held;
    unsigned gpu_instance, compute_instance;
};

struct utilization {
    unsigned gpu, memory;
};

static long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? atol(value) : otherwise;
}

API int nvmlInit_v2(void) {
    return SUCCESS;
}

API int nvmlShutdown(void) {
    return SUCCESS;
}

API const char *nvmlErrorString(int code) {
    (void)code;
    return "an error of the fake";
}

API int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    snprintf(version, length, "580.00");
    return SUCCESS;
}

/* The place is the last byte of the UUID, as the fake driver makes them. */
API int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    size_t length = strlen(uuid);
    if (length < 4 || strncmp(uuid, setting("FAKE_CUDA_MIG", 0) ? "MIG-" : "GPU-", 4))
        return NOT_FOUND;
    *device = (void *)(strtoul(uuid + length - 2, NULL, 16) + 1);
    return SUCCESS;
}

API int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *memory) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    size_t (*free_of)(int) = driver ? (size_t(*)(int))dlsym(driver, "fake_cuda_free") : NULL;
    if (!free_of)
        return NOT_SUPPORTED;
    memory->total = (unsigned long long)setting("FAKE_CUDA_MEMORY_MIB", 1024) << 20;
    memory->free = free_of((int)(size_t)device - 1);
    memory->used = memory->total - memory->free;
    memory->reserved = 0;
    dlclose(driver);
    return SUCCESS;
}

/* The fake driver has one list for all devices of a process. */
API int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process_info *infos) {
    (void)device;
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    int (*list)(long *, size_t *, int) = driver ? (int (*)(long *, size_t *, int))dlsym(driver, "fake_cuda_processes") : NULL;
    if (!list)
        return NOT_SUPPORTED;
    long pids[PROCESSES_MAX];
    size_t held[PROCESSES_MAX];
    unsigned found = (unsigned)list(pids, held, PROCESSES_MAX), room = *count;
    dlclose(driver);
    *count = found;
    if (found > room || (found && !infos))
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < found; i++) {
        struct process_info info = {(unsigned)(pids[i] + setting("FAKE_CUDA_PIDS_FROM", 0)), held[i], ~0U, ~0U};
        /* NVML_VALUE_NOT_AVAILABLE */
        if (setting("FAKE_CUDA_NO_HELD", 0))
            info.held = ~0ULL;
        infos[i] = info;
    }
    return SUCCESS;
}

API int nvmlDeviceGetUtilizationRates(void *device, struct utilization *rates) {
    (void)device;
    rates->gpu = 42;
    rates->memory = 17;
    return SUCCESS;
}

API int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    (void)device;
    (void)sensor;
    for (const char *file = getenv("FAKE_CUDA_HANGS"); file && !access(file, F_OK);)
        usleep(10000);
    *celsius = 61;
    return SUCCESS;
}

API int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatt) {
    (void)device;
    *milliwatt = 123456;
    return setting("FAKE_CUDA_NO_POWER", 0) ? NOT_SUPPORTED : SUCCESS;
}

API int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *milliwatt) {
    (void)device;
    *milliwatt = 700000;
    return setting("FAKE_CUDA_NO_POWER", 0) ? NOT_SUPPORTED : SUCCESS;
}

API int nvmlDeviceGetClockInfo(void *device, int clock, unsigned *mhz) {
    (void)device;
    *mhz = clock == 1 ? 1980 : 2619;
    return SUCCESS;
}

API int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits) {
    (void)device;
    *bits = (unsigned long long)setting("FAKE_CUDA_THROTTLES", 0);
    return SUCCESS;
}
