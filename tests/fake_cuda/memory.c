/* Memory: pools, single allocations, copies. What is allocated is host memory, with a guard behind it. */
#include "fake_cuda.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the driver aligns allocations to, and what pools take of the device at a time. */
enum { ALIGNMENT = 512, PIECE = 2 << 20, GUARD = 64, GUARD_BYTE = 0xa5 };

enum { ATTRIBUTE_RELEASE_THRESHOLD = 4, ATTRIBUTE_RESERVED = 5, ATTRIBUTE_USED = 7 };

struct pool {
    struct device *device;
    size_t most, threshold, reserved, used;
};

struct block {
    struct block *next;
    unsigned char *start;
    size_t bytes;
    struct pool *pool; /* null: allocated by itself */
    struct device *device;
};

/* CUmemPoolProps, by the reference. */
struct pool_properties {
    int allocation_type, handle_types;
    struct {
        int type, id;
    } location;
    void *security;
    size_t most;
    unsigned short usage;
    unsigned char rest[54];
};

static struct block *blocks;
static size_t outstanding;

static size_t rounded(size_t bytes, size_t to) {
    return (bytes + to - 1) / to * to;
}

/* Bytes that are allocated and not freed. */
API size_t fake_cuda_outstanding(void) {
    return outstanding;
}

static CUresult new_block(CUdeviceptr *pointer, size_t bytes, struct pool *pool, struct device *device) {
    struct block *block = malloc(sizeof *block);
    unsigned char *start = aligned_alloc(ALIGNMENT, rounded(bytes + GUARD, ALIGNMENT));
    if (!block || !start)
        abort();
    if (setting("FAKE_CUDA_POISON", 0))
        memset(start, 0xff, bytes);
    memset(start + bytes, GUARD_BYTE, GUARD);
    *block = (struct block){blocks, start, bytes, pool, device};
    blocks = block;
    outstanding += bytes;
    *pointer = (CUdeviceptr)(uintptr_t)start;
    return CUDA_SUCCESS;
}

static CUresult take(CUdeviceptr *pointer, size_t bytes, struct pool *pool) {
    if (bytes == 0 || !current())
        return bytes ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_VALUE;
    struct device *device = pool ? pool->device : current()->device;
    size_t needs = rounded(bytes, ALIGNMENT), more;
    if (pool) {
        more = pool->used + needs > pool->reserved ? rounded(pool->used + needs - pool->reserved, PIECE) : 0;
        if (pool->most && pool->reserved + more > rounded(pool->most, PIECE))
            return CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        more = rounded(bytes, PIECE);
    }
    if (more > device_free(device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    device->reserved += more;
    if (pool) {
        pool->reserved += more;
        pool->used += needs;
    }
    return new_block(pointer, bytes, pool, device);
}

static void shrink(struct pool *pool, size_t keep) {
    size_t wanted = pool->used > keep ? pool->used : keep;
    if (wanted >= pool->reserved)
        return;
    wanted = rounded(wanted, PIECE);
    if (wanted < pool->reserved) {
        pool->device->reserved -= pool->reserved - wanted;
        pool->reserved = wanted;
    }
}

static CUresult give(CUdeviceptr pointer) {
    for (struct block **at = &blocks; *at; at = &(*at)->next) {
        struct block *block = *at;
        if ((CUdeviceptr)(uintptr_t)block->start != pointer)
            continue;
        for (int i = 0; i < GUARD; i++) {
            if (block->start[block->bytes + (size_t)i] != GUARD_BYTE) {
                fprintf(stderr, "fake_cuda: %zu bytes at %llx were written behind their end\n", block->bytes, pointer);
                abort();
            }
        }
        if (block->pool) {
            block->pool->used -= rounded(block->bytes, ALIGNMENT);
            shrink(block->pool, block->pool->threshold);
        } else {
            block->device->reserved -= rounded(block->bytes, PIECE);
        }
        outstanding -= block->bytes;
        *at = block->next;
        free(block->start);
        free(block);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemPoolCreate(CUmemoryPool *pool, const struct pool_properties *properties) {
    ENTRY({
        struct device *device = device_at(properties->location.id);
        struct pool *made = calloc(1, sizeof *made);
        /* Before 12.2 the field was one of those that had to be zero. */
        int knows_most = setting("FAKE_CUDA_VERSION", 13000) >= 12020;
        if (!made)
            abort();
        if (!device || properties->location.type != 1 || (properties->most && !knows_most)) {
            free(made);
            result = CUDA_ERROR_INVALID_VALUE;
        } else {
            made->device = device;
            made->most = properties->most;
            *pool = made;
        }
    });
}

API CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    ENTRY({
        shrink(pool, 0);
        if (pool->used == 0)
            free(pool);
    });
}

API CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value) {
    ENTRY({
        if (attribute == ATTRIBUTE_RELEASE_THRESHOLD)
            pool->threshold = *(uint64_t *)value;
        else
            result = CUDA_ERROR_NOT_SUPPORTED;
    });
}

API CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value) {
    ENTRY({
        if (attribute == ATTRIBUTE_RESERVED)
            *(uint64_t *)value = pool->reserved;
        else if (attribute == ATTRIBUTE_USED)
            *(uint64_t *)value = pool->used;
        else
            result = CUDA_ERROR_NOT_SUPPORTED;
    });
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    ENTRY({ shrink(pool, keep); });
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    (void)stream;
    ENTRY({ result = take(pointer, bytes, pool); });
}

API CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    (void)stream;
    ENTRY({ result = give(pointer); });
}

API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    ENTRY({ result = take(pointer, bytes, NULL); });
}

API CUresult cuMemFree_v2(CUdeviceptr pointer) {
    ENTRY({ result = give(pointer); });
}

API CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    ENTRY({
        *pointer = aligned_alloc(4096, rounded(bytes ? bytes : 1, 4096));
        if (!*pointer)
            result = CUDA_ERROR_OUT_OF_MEMORY;
    });
}

API CUresult cuMemFreeHost(void *pointer) {
    ENTRY({ free(pointer); });
}

/* Whether bytes lie within one allocation. */
static int is_ours(CUdeviceptr pointer, size_t bytes) {
    for (struct block *block = blocks; block; block = block->next) {
        CUdeviceptr start = (CUdeviceptr)(uintptr_t)block->start;
        if (pointer >= start && pointer + bytes <= start + block->bytes)
            return 1;
    }
    return bytes == 0;
}

/* The allocation that an address is in; zero if there is none. For kernels under way, which hold the lock already. */
int fake_cuda_allocation(const void *address, const void **start, size_t *bytes) {
    for (struct block *block = blocks; block; block = block->next) {
        const unsigned char *at = address;
        if (at >= block->start && at < block->start + block->bytes) {
            *start = block->start;
            *bytes = block->bytes;
            return 1;
        }
    }
    return 0;
}

/* For libraries beside this one: whether bytes lie within one allocation. */
API int fake_cuda_holds(const void *address, size_t bytes) {
    CUresult entered = enter(__func__);
    int holds = address && is_ours((CUdeviceptr)(uintptr_t)address, bytes);
    leave(entered);
    return holds;
}

static void *host(CUdeviceptr pointer) {
    return (void *)(uintptr_t)pointer;
}

static CUresult copy(void *to, const void *from, size_t bytes, int is_right) {
    if (!is_right)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes)
        memmove(to, from, bytes);
    return CUDA_SUCCESS;
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    (void)stream;
    ENTRY({ result = copy(host(to), from, bytes, is_ours(to, bytes)); });
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    ENTRY({ result = copy(host(to), from, bytes, is_ours(to, bytes)); });
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    (void)stream;
    ENTRY({ result = copy(to, host(from), bytes, is_ours(from, bytes)); });
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    ENTRY({ result = copy(to, host(from), bytes, is_ours(from, bytes)); });
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    (void)stream;
    ENTRY({ result = copy(host(to), host(from), bytes, is_ours(to, bytes) && is_ours(from, bytes)); });
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    (void)stream;
    ENTRY({
        if (is_ours(to, bytes))
            memset(host(to), value, bytes);
        else
            result = CUDA_ERROR_INVALID_VALUE;
    });
}
