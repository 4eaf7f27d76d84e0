/* Memory: pools, single allocations. What is allocated is host memory, with a guard behind it. */
#include "fake_cuda.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the driver aligns allocations to, and what a single one takes of the device at a time; a pool takes more. */
enum { ALIGNMENT = 512, PIECE = 2 << 20, POOL_MIB = 32, GUARD = 64, GUARD_BYTE = 0xa5 };

enum { ATTRIBUTE_RELEASE_THRESHOLD = 4, ATTRIBUTE_RESERVED = 5, ATTRIBUTE_USED = 7 };

struct pool {
    struct device *device;
    size_t most, threshold, reserved, used;
    /* Of blocks whose end is in a stream and not reached: later work of that stream may have them. */
    size_t ending;
    int is_destroyed;
};

struct block {
    struct block *next;
    unsigned char *start;
    size_t bytes;
    struct pool *pool; /* null: allocated by itself */
    struct device *device;
    int is_ending;
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
static size_t outstanding, allocated;

static size_t rounded(size_t bytes, size_t to) {
    return (bytes + to - 1) / to * to;
}

static size_t pool_piece(void) {
    return (size_t)setting("FAKE_CUDA_POOL_MIB", POOL_MIB) << 20;
}

/* Bytes that are allocated, and that nobody has asked to free. */
API size_t fake_cuda_outstanding(void) {
    return outstanding;
}

/* Bytes of all allocations so far, freed or not. */
API size_t fake_cuda_allocated(void) {
    return allocated;
}

static CUresult new_block(CUdeviceptr *pointer, size_t bytes, struct pool *pool, struct device *device) {
    struct block *block = malloc(sizeof *block);
    unsigned char *start = aligned_alloc(ALIGNMENT, rounded(bytes + GUARD, ALIGNMENT));
    if (!block || !start)
        abort();
    if (setting("FAKE_CUDA_POISON", 0))
        memset(start, 0xff, bytes);
    memset(start + bytes, GUARD_BYTE, GUARD);
    *block = (struct block){blocks, start, bytes, pool, device, 0};
    blocks = block;
    outstanding += bytes;
    allocated += bytes;
    *pointer = (CUdeviceptr)(uintptr_t)start;
    return CUDA_SUCCESS;
}

static CUresult take(CUdeviceptr *pointer, size_t bytes, struct pool *pool) {
    if (bytes == 0 || !current())
        return bytes ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_VALUE;
    struct device *device = pool ? pool->device : current()->device;
    size_t needs = rounded(bytes, ALIGNMENT), more;
    if (pool) {
        more = pool->used + needs > pool->reserved ? rounded(pool->used + needs - pool->reserved, pool_piece()) : 0;
        if (pool->most && pool->reserved + more > pool->most)
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

/* What is used, and what may still be, stays. */
static void shrink(struct pool *pool, size_t keep) {
    size_t wanted = pool->used + pool->ending > keep ? pool->used + pool->ending : keep;
    if (wanted >= pool->reserved)
        return;
    wanted = rounded(wanted, pool_piece());
    if (wanted < pool->reserved) {
        pool->device->reserved -= pool->reserved - wanted;
        pool->reserved = wanted;
    }
}

/* The reference: a pool with memory in use ends when that has been freed. */
static void end_pool(struct pool *pool) {
    shrink(pool, 0);
    if (pool->is_destroyed && pool->used + pool->ending == 0)
        free(pool);
}

static struct block **find(CUdeviceptr pointer) {
    for (struct block **at = &blocks; *at; at = &(*at)->next)
        if ((CUdeviceptr)(uintptr_t)(*at)->start == pointer)
            return at;
    return NULL;
}

/* From here on nobody may name the block to the driver; what it takes is counted as if it were free already. */
static struct block *begin_end(CUdeviceptr pointer) {
    struct block **at = find(pointer);
    if (!at || (*at)->is_ending)
        return NULL;
    (*at)->is_ending = 1;
    outstanding -= (*at)->bytes;
    if ((*at)->pool) {
        (*at)->pool->used -= rounded((*at)->bytes, ALIGNMENT);
        (*at)->pool->ending += rounded((*at)->bytes, ALIGNMENT);
    }
    return *at;
}

/* The block's end. What touches it from here on touches nothing. */
static CUresult end(void *data) {
    struct block **at = find((CUdeviceptr)(uintptr_t)(*(struct block **)data)->start), *block = *at;
    for (int i = 0; i < GUARD; i++) {
        if (block->start[block->bytes + (size_t)i] != GUARD_BYTE) {
            fprintf(stderr, "fake_cuda: %zu bytes at %p were written behind their end\n", block->bytes, (void *)block->start);
            abort();
        }
    }
    *at = block->next;
    if (block->pool) {
        block->pool->ending -= rounded(block->bytes, ALIGNMENT);
        if (block->pool->is_destroyed)
            end_pool(block->pool);
    } else {
        block->device->reserved -= rounded(block->bytes, PIECE);
    }
    free(block->start);
    free(block);
    return CUDA_SUCCESS;
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
        pool->is_destroyed = 1;
        end_pool(pool);
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
    struct host_range none = {0, 0};
    ENTRY({
        struct block *block = begin_end(pointer);
        result = block ? give_work(stream, end, &block, sizeof block, none) : CUDA_ERROR_INVALID_VALUE;
    });
}

API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    ENTRY({ result = take(pointer, bytes, NULL); });
}

/* At once, whatever work there is: the reference promises no wait. */
API CUresult cuMemFree_v2(CUdeviceptr pointer) {
    ENTRY({
        struct block *block = begin_end(pointer);
        result = block ? end(&block) : CUDA_ERROR_INVALID_VALUE;
    });
}

int is_allocated(CUdeviceptr pointer, size_t bytes, int or_ending) {
    for (struct block *block = blocks; block; block = block->next) {
        CUdeviceptr start = (CUdeviceptr)(uintptr_t)block->start;
        if (pointer >= start && pointer + bytes <= start + block->bytes)
            return or_ending || !block->is_ending;
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

/* For libraries beside this one: whether bytes lie within one allocation, at a call. */
API int fake_cuda_holds(const void *address, size_t bytes) {
    CUresult entered = enter(__func__);
    int holds = address && is_allocated((CUdeviceptr)(uintptr_t)address, bytes, 0);
    leave(entered);
    return holds;
}

/* The same for their work while it runs, when the lock is held. */
API int fake_cuda_still_holds(const void *address, size_t bytes) {
    return is_allocated((CUdeviceptr)(uintptr_t)address, bytes, 1);
}
