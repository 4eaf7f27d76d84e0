/* Host memory for copies, and copies.
 *
 * An asynchronous copy reads and writes host memory when it is done, not when it is asked for ("API synchronization behavior"
 * of the driver API). Of memory that is not page-locked the driver may stage the bytes in the call, and may as well not:
 * FAKE_CUDA_PAGEABLE chooses. Whoever changes or frees host memory that a copy is still to read ends the context, with a
 * word on standard error: on a device wrong numbers would be all that shows. */
#include "fake_cuda.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096 };

struct locked {
    struct locked *next;
    unsigned char *start;
    size_t bytes;
};

static struct locked *locked;

API CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    ENTRY({
        struct locked *made = malloc(sizeof *made);
        size_t pages = (bytes + PAGE - 1) / PAGE;
        if (!made)
            abort();
        *made = (struct locked){locked, aligned_alloc(PAGE, (pages ? pages : 1) * PAGE), bytes};
        if (made->start) {
            locked = made;
            *pointer = made->start;
        } else {
            free(made);
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    });
}

API CUresult cuMemFreeHost(void *pointer) {
    ENTRY({
        struct locked **at = &locked;
        while (*at && (*at)->start != pointer)
            at = &(*at)->next;
        struct locked *found = *at;
        if (!found) {
            result = CUDA_ERROR_INVALID_VALUE;
        } else if (is_under_way((struct host_range){found->start, found->bytes})) {
            fprintf(stderr, "fake_cuda: page-locked memory at %p is freed while a copy of it is under way\n", pointer);
            result = CUDA_ERROR_LAUNCH_FAILED;
        } else {
            *at = found->next;
            free(found->start);
            free(found);
        }
    });
}

/* Whether a copy of host memory is done in the call. */
static int is_staged(const unsigned char *start) {
    const char *pageable = getenv("FAKE_CUDA_PAGEABLE");
    for (struct locked *each = locked; each; each = each->next)
        if (start >= each->start && start < each->start + each->bytes)
            return 0;
    return pageable && !strcmp(pageable, "staged");
}

/* Between device memory, and from or to host memory, which is null for none. */
struct copy {
    CUdeviceptr to, from;
    unsigned char *host;
    size_t bytes;
    /* What the host memory looked like when the copy was asked for. */
    uint64_t looks;
};

static void *memory(CUdeviceptr pointer) {
    return (void *)(uintptr_t)pointer;
}

/* FNV-1a, by words. */
static uint64_t looks_of(const unsigned char *at, size_t bytes) {
    uint64_t looks = 0xcbf29ce484222325, word = 0;
    for (size_t i = 0; i < bytes; i += sizeof word) {
        memcpy(&word, at + i, bytes - i < sizeof word ? bytes - i : sizeof word);
        looks = (looks ^ word) * 0x100000001b3;
        looks ^= looks >> 32;
    }
    return looks;
}

static int is_mapped(const unsigned char *start, size_t bytes) {
    uintptr_t page = (uintptr_t)start / PAGE * PAGE;
    size_t length = (uintptr_t)start + bytes - page;
    return !bytes || !msync((void *)page, length, MS_ASYNC);
}

static CUresult complain(const char *what, const void *host) {
    fprintf(stderr, "fake_cuda: host memory at %p %s\n", host, what);
    return CUDA_ERROR_LAUNCH_FAILED;
}

static CUresult copy_in(void *data) {
    const struct copy *copy = data;
    if (!is_allocated(copy->to, copy->bytes, 1))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (!is_mapped(copy->host, copy->bytes))
        return complain("is gone before a copy has read it", copy->host);
    if (looks_of(copy->host, copy->bytes) != copy->looks)
        return complain("has changed before a copy has read it", copy->host);
    if (copy->bytes)
        memcpy(memory(copy->to), copy->host, copy->bytes);
    return CUDA_SUCCESS;
}

static CUresult copy_out(void *data) {
    const struct copy *copy = data;
    if (!is_allocated(copy->from, copy->bytes, 1))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (!is_mapped(copy->host, copy->bytes))
        return complain("is gone before a copy has written it", copy->host);
    if (copy->bytes)
        memcpy(copy->host, memory(copy->from), copy->bytes);
    return CUDA_SUCCESS;
}

static CUresult copy_within(void *data) {
    const struct copy *copy = data;
    if (!is_allocated(copy->to, copy->bytes, 1) || !is_allocated(copy->from, copy->bytes, 1))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (copy->bytes)
        memmove(memory(copy->to), memory(copy->from), copy->bytes);
    return CUDA_SUCCESS;
}

/* What was staged, behind the copy. */
static CUresult copy_staged(void *data) {
    const struct copy *copy = data;
    if (!is_allocated(copy->to, copy->bytes, 1))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    memcpy(memory(copy->to), copy + 1, copy->bytes);
    return CUDA_SUCCESS;
}

static CUresult stage(CUstream stream, const struct copy *copy) {
    struct host_range none = {0, 0};
    struct copy *staged = malloc(sizeof *copy + copy->bytes);
    if (!staged)
        abort();
    *staged = *copy;
    memcpy(staged + 1, copy->host, copy->bytes);
    CUresult result = give_work(stream, copy_staged, staged, sizeof *copy + copy->bytes, none);
    free(staged);
    return result;
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    ENTRY({
        struct copy copy = {to, 0, (unsigned char *)from, bytes, 0};
        if (!is_allocated(to, bytes, 0)) {
            result = CUDA_ERROR_INVALID_VALUE;
        } else if (is_staged(from)) {
            result = stage(stream, &copy);
        } else {
            copy.looks = looks_of(from, bytes);
            result = give_work(stream, copy_in, &copy, sizeof copy, (struct host_range){from, bytes});
        }
    });
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTRY({
        struct copy copy = {0, from, to, bytes, 0};
        if (!is_allocated(from, bytes, 0))
            result = CUDA_ERROR_INVALID_VALUE;
        else
            result = give_work(stream, copy_out, &copy, sizeof copy, (struct host_range){to, bytes});
        if (result == CUDA_SUCCESS && is_staged(to))
            result = wait_for_stream(stream);
    });
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    struct host_range none = {0, 0};
    ENTRY({
        struct copy copy = {to, from, NULL, bytes, 0};
        if (is_allocated(to, bytes, 0) && is_allocated(from, bytes, 0))
            result = give_work(stream, copy_within, &copy, sizeof copy, none);
        else
            result = CUDA_ERROR_INVALID_VALUE;
    });
}

/* A blocking copy is work of the default stream: it waits for blocking streams, and for no other. */
static CUresult at_once(const struct copy *copy, work run) {
    CUresult waited = wait_for_default_stream();
    struct copy now = *copy;
    return waited != CUDA_SUCCESS ? waited : run(&now);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    ENTRY({
        struct copy copy = {to, 0, (unsigned char *)from, bytes, looks_of(from, bytes)};
        result = is_allocated(to, bytes, 0) ? at_once(&copy, copy_in) : CUDA_ERROR_INVALID_VALUE;
    });
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    ENTRY({
        struct copy copy = {0, from, to, bytes, 0};
        result = is_allocated(from, bytes, 0) ? at_once(&copy, copy_out) : CUDA_ERROR_INVALID_VALUE;
    });
}

struct fill {
    CUdeviceptr to;
    size_t bytes;
    unsigned char value;
};

static CUresult fill(void *data) {
    const struct fill *wanted = data;
    if (!is_allocated(wanted->to, wanted->bytes, 1))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    memset(memory(wanted->to), wanted->value, wanted->bytes);
    return CUDA_SUCCESS;
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    struct host_range none = {0, 0};
    ENTRY({
        struct fill wanted = {to, bytes, value};
        if (is_allocated(to, bytes, 0))
            result = give_work(stream, fill, &wanted, sizeof wanted, none);
        else
            result = CUDA_ERROR_INVALID_VALUE;
    });
}
