// Kernels with one mistake each, and the same without: a program of its own, which runs the one that it is told to.

#include "emulation.h"

#include <cstdio>
#include <cstring>

#define KERNEL static __global__ void

constexpr unsigned THREADS = 64;

alignas(16) static float numbers[THREADS];

extern "C" __attribute__((no_sanitize("thread"))) int fake_cuda_allocation(const void *address, const void **start,
                                                                        size_t *bytes) {
    *start = numbers;
    *bytes = sizeof numbers;
    return static_cast<size_t>(static_cast<const char *>(address) - reinterpret_cast<char *>(numbers)) < sizeof numbers;
}

namespace {

// Every thread takes its neighbour's number, through shared memory.
KERNEL right(float *to) {
    SHARED(float, row, THREADS);
    row[threadIdx.x] = to[threadIdx.x];
    __syncthreads();
    to[threadIdx.x] = row[(threadIdx.x + 1) % THREADS];
}

KERNEL no_barrier(float *to) {
    SHARED(float, row, THREADS);
    row[threadIdx.x] = to[threadIdx.x];
    to[threadIdx.x] = row[threadIdx.x / 2];
}

KERNEL read_while_written(float *to) {
    SHARED(float, row, THREADS);
    row[threadIdx.x] = to[threadIdx.x];
    __syncthreads();
    to[threadIdx.x] = row[(threadIdx.x + 1) % THREADS];
    row[threadIdx.x] = 0.0f;
}

// A shuffle brings lanes together, and orders no memory.
KERNEL no_syncwarp(float *to) {
    SHARED(float, row, THREADS);
    row[threadIdx.x] = to[threadIdx.x];
    const float other = __shfl_xor_sync(0xffffffff, to[threadIdx.x], 1);
    to[threadIdx.x] = row[threadIdx.x ^ 1] + other;
}

KERNEL never_written(float *to) {
    SHARED(float, row, THREADS);
    if (threadIdx.x > 0) row[threadIdx.x] = 1.0f;
    __syncthreads();
    to[threadIdx.x] = row[threadIdx.x];
}

// What a block finds in shared memory, others may have left there.
KERNEL written_by_another_block(float *to) {
    SHARED(float, row, THREADS);
    if (blockIdx.x == 0) row[threadIdx.x] = 1.0f;
    __syncthreads();
    to[threadIdx.x] = row[threadIdx.x];
}

KERNEL beyond_the_allocation(float *to) {
    to[threadIdx.x + 1] = 1.0f;
}

KERNEL in_no_allocation(float *to) {
    to[threadIdx.x] = to[threadIdx.x + (1u << 20)];
}

KERNEL beyond_the_array(float *to) {
    SHARED(float, row, THREADS);
    row[threadIdx.x + 1] = to[threadIdx.x];
}

KERNEL misaligned(float *to) {
    *reinterpret_cast<uint4 *>(to + 1) = make_uint4(0, 0, 0, 0);
}

KERNEL not_all_at_the_barrier(float *to) {
    if (threadIdx.x < THREADS / 2) __syncthreads();
    to[threadIdx.x] = 1.0f;
}

KERNEL not_all_lanes(float *to) {
    if (threadIdx.x % 2 == 0) to[threadIdx.x] = __shfl_xor_sync(0xffffffff, 1.0f, 2);
}

KERNEL copy_not_waited_for(float *to) {
    SHARED(float, row, THREADS);
    if (threadIdx.x % 4 == 0) copy_begin(row + threadIdx.x, to + threadIdx.x, true);
    copy_group();
    copy_wait<1>();
    __syncthreads();
    to[threadIdx.x] = row[threadIdx.x];
}

KERNEL copy_left_behind(float *to) {
    SHARED(float, row, THREADS);
    copy_begin(row + threadIdx.x / 4 * 4, to, true);
}

KERNEL copied_over_what_is_read(float *to) {
    SHARED(float, row, THREADS);
    row[threadIdx.x] = 1.0f;
    __syncthreads();
    const float read = row[THREADS - 1 - threadIdx.x];
    if (threadIdx.x % 4 == 0) copy_begin(row + threadIdx.x, to + threadIdx.x, true);
    copy_group();
    copy_wait<0>();
    __syncthreads();
    to[threadIdx.x] = row[threadIdx.x] + read;
}

template <void (*kernel)(float *)>
__attribute__((no_sanitize("thread", "alignment"), noinline)) void call(void **) {
    kernel(numbers);
}

struct Named {
    const char *name;
    emulation::Kernel kernel;
};

#define NAMED(kernel)                                                                                                  \
    { #kernel, call<kernel> }
const Named KERNELS[] = {
    NAMED(right),
    NAMED(no_barrier),
    NAMED(read_while_written),
    NAMED(no_syncwarp),
    NAMED(never_written),
    NAMED(written_by_another_block),
    NAMED(beyond_the_allocation),
    NAMED(in_no_allocation),
    NAMED(beyond_the_array),
    NAMED(misaligned),
    NAMED(not_all_at_the_barrier),
    NAMED(not_all_lanes),
    NAMED(copy_not_waited_for),
    NAMED(copy_left_behind),
    NAMED(copied_over_what_is_read),
};

} // namespace

__attribute__((no_sanitize("thread"))) int main(int count, char **arguments) {
    for (const Named &named : KERNELS) {
        if (count == 2 && std::strcmp(named.name, arguments[1]) == 0) {
            const unsigned blocks[3] = {2, 1, 1}, threads[3] = {THREADS, 1, 1};
            return emulation::launch(named.name, named.kernel, blocks, threads, nullptr) == 0 ? 0 : 1;
        }
    }
    std::fputs("usage: mistakes KERNEL\n", stderr);
    return 2;
}
