/* A fake of the NVIDIA driver's library, for tests on machines without a GPU.
 *
 * Written from the public reference of the CUDA driver API: names, signatures and codes as documented there. "Device" memory
 * is host memory, of a size that the environment sets; work on streams is done as late as the reference allows (stream.c).
 * What it cannot show is anything about a real device's arithmetic or speed.
 *
 *   FAKE_CUDA_DEVICES     devices, 1 unless set; none makes cuInit say so, as the driver does
 *   FAKE_CUDA_MEMORY_MIB  memory of each, 1024
 *   FAKE_CUDA_CONTEXT_MIB what a context takes of it, 300
 *   FAKE_CUDA_MIG         1: the devices are instances of MIG, of which a process sees one: the first, or the one that is named
 *   FAKE_CUDA_MACHINE     a number that UUIDs have in them, so that devices are not those of other tests
 *   FAKE_CUDA_SM          compute capability, 90
 *   FAKE_CUDA_VERSION     of CUDA, 13000
 *   FAKE_CUDA_POOLS       0: a driver without memory pools
 *   FAKE_CUDA_POOL_MIB    what a pool takes of the device at a time, 32
 *   FAKE_CUDA_PAGEABLE    "staged": copies from and to host memory that is not page-locked are done in the call, which the
 *                         reference allows. Unless set, they are done as late as those of page-locked memory
 *   FAKE_CUDA_FOREIGN     a file with the bytes that other processes hold; read again at every look at the memory
 *   FAKE_CUDA_SHARED      a file that processes share which are on the same device: each sees what the others hold
 *   FAKE_CUDA_POISON      1: new memory is filled with 0xff, which is a NaN in f32, f16 and bf16
 *   FAKE_CUDA_FAIL        FUNCTION:CALL:CODE[:TIMES] and more of them after commas: from its CALL-th call, counted from 1, a
 *                       function fails with CODE, once or TIMES times (0: for ever). Codes that end a context do so. The
 *                       FUNCTION `kernel` is the run of a kernel, long after its launch: whoever waits for it is told.
 *   FAKE_CUDA_FAIL_PLACE  of several devices, the one that fails like that; unless set, whichever is in use does
 *   FAKE_CUDA_EXIT_HANGS  1: the library never ends its part of the process's end
 *   CUDA_VISIBLE_DEVICES  as the driver takes it: indices or UUIDs, ending at the first that is neither
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stddef.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct module *CUmodule;
typedef struct function *CUfunction;
typedef struct pool *CUmemoryPool;

typedef struct {
    unsigned char bytes[16];
} CUuuid;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_SUPPORTED = 801,
};

#define API __attribute__((visibility("default")))

/* A device: of its memory, contexts, pools and single allocations take their parts. */
struct device {
    int place; /* among all of the machine, visible or not */
    CUuuid uuid;
    size_t contexts;
    size_t reserved;
};

struct context {
    struct device *device;
    int references;
};

/* The lock of everything, taken by `enter` and given back by `leave`. In between, `pause_entry` lets others in. */
CUresult enter(const char *function);
CUresult leave(CUresult result);
void pause_entry(void);

/* What FAKE_CUDA_FAIL says of a function, for those that are no entry points. */
CUresult told_to_fail(const char *function);

/* A number of the environment. */
long setting(const char *name, long otherwise);

struct device *device_at(CUdevice ordinal);
int device_count(void);
struct context *current(void);

/* Something to do for a stream, with data of its own; a code of the driver's. The lock of everything is held. */
typedef CUresult (*work)(void *data);

/* Host memory that work reads or writes; nothing if there are no bytes. */
struct host_range {
    const unsigned char *start;
    size_t bytes;
};

/* Gives work to a stream, with a copy of its data. */
CUresult give_work(CUstream stream, work run, const void *data, size_t bytes, struct host_range host);

/* Does what a stream was given, or what a blocking call has to wait for. */
CUresult wait_for_stream(CUstream stream);
CUresult wait_for_default_stream(void);

/* Whether work that is not done yet reads or writes some of it. */
int is_under_way(struct host_range range);

/* What all devices of this process hold, and what other processes do. The file of FAKE_CUDA_SHARED is locked in between. */
size_t devices_held(void);
void shared_lock(void);
void shared_unlock(void);
size_t shared_foreign(void);

/* Bytes of a device that nobody holds. */
size_t device_total(void);
size_t device_free(const struct device *device);

/* The body of an entry point: a locked region whose value is its result. */
#define ENTRY(...)                                                                                                            \
    CUresult entered = enter(__func__);                                                                                       \
    if (entered != CUDA_SUCCESS)                                                                                              \
        return leave(entered);                                                                                                \
    CUresult result = CUDA_SUCCESS;                                                                                           \
    __VA_ARGS__ return leave(result)

/* Whether bytes lie within one allocation; work that was given before it was freed may still use it. */
int is_allocated(CUdeviceptr pointer, size_t bytes, int or_ending);

/* For kernels that look at what they touch. */
int fake_cuda_allocation(const void *address, const void **start, size_t *bytes);

/* A launch of a kernel by its name, with its arguments copied, as the driver copies them; or null and a code, if the driver
 * would refuse it. Running it ends it. Weak in launch.c, where there are no kernels. */
struct launch *fake_cuda_prepare(
    const char *kernel, const unsigned grid[3], const unsigned block[3], unsigned shared, void **parameters, int *code
);
int fake_cuda_run(struct launch *launch);

#endif
