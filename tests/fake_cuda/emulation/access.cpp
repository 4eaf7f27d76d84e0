// Every access of a kernel, looked at: is it inside memory that is allocated, is it aligned, has shared memory been
// written before it is read, and do two threads touch it, one of them writing, with nothing that orders them?
//
// The compiler makes the calls: kernels.cpp is built with -fsanitize=thread and -fsanitize=alignment, and what their
// run-time libraries would define is defined here. Orders are: a barrier of the block, and __syncwarp for lanes of one
// warp (CUDA C++ programming guide, "Memory fence functions"; shuffles and products order no memory).

#include "access.h"
#include "fiber.h"

#include <cstdint>
#include <cstring>

// The fake driver: the allocation that an address is in. Zero if there is none.
extern "C" int fake_cuda_allocation(const void *address, const void **start, size_t *bytes);

namespace emulation {

namespace {

constexpr unsigned LANES = 32;
constexpr size_t SHARED_MAX = 48 * 1024;
// Bytes that are looked at as one: a 16-bit element.
constexpr size_t CELL = 2;

// Who touched a cell, and when by the block's and by his warp's count of barriers. Small, as kernels touch little else than shared memory.
struct Touch {
    unsigned epoch = 0;
    // It may come round within one epoch of the block: then what is ordered would be called unordered, and never the other way.
    unsigned short warp_epoch = 0;
    unsigned short thread = 0;
};
static_assert(sizeof(Touch) == 8);

struct Cell {
    Touch writer;
    // The last two that differ.
    Touch readers[2];
};

unsigned char *shared_start;
Cell cells[SHARED_MAX / CELL];
// Whether a cell is in an array, and whether something was written to it, which is only possible there.
bool allowed[SHARED_MAX / CELL], written[SHARED_MAX / CELL];
// Where the arrays of the block end. Behind them nothing is written: every access there fails.
size_t shared_end = SHARED_MAX;
// Never goes back, so that cells of earlier blocks are old without being cleared.
unsigned epoch = 1;
unsigned short warp_epochs[32];

bool unordered(const Touch &earlier, const Touch &now) {
    if (earlier.epoch != now.epoch || earlier.thread == now.thread) return false;
    return earlier.thread / LANES != now.thread / LANES || earlier.warp_epoch == now.warp_epoch;
}

Touch now() {
    const auto thread = static_cast<unsigned short>(current_thread());
    return {epoch, warp_epochs[thread / LANES], thread};
}

void look_at_read(size_t at, size_t bytes) {
    const Touch own = now();
    for (size_t i = at / CELL; i <= (at + bytes - 1) / CELL; i++) {
        if (!allowed[i]) fail("byte %zu of shared memory is in no array", i * CELL);
        if (!written[i]) fail("byte %zu of shared memory is read before it is written", i * CELL);
        Cell &cell = cells[i];
        if (unordered(cell.writer, own)) {
            fail("byte %zu of shared memory: read, while thread %u writes it", i * CELL, unsigned{cell.writer.thread});
        }
        if (cell.readers[0].thread != own.thread) cell.readers[1] = cell.readers[0];
        cell.readers[0] = own;
    }
}

void look_at_write(size_t at, size_t bytes, bool only_begins) {
    const Touch own = now();
    for (size_t i = at / CELL; i <= (at + bytes - 1) / CELL; i++) {
        if (!allowed[i]) fail("byte %zu of shared memory is in no array", i * CELL);
        Cell &cell = cells[i];
        if (unordered(cell.writer, own)) {
            fail("byte %zu of shared memory: written, while thread %u writes it", i * CELL, unsigned{cell.writer.thread});
        }
        for (const Touch &reader : cell.readers) {
            if (unordered(reader, own)) {
                fail("byte %zu of shared memory: written, while thread %u reads it", i * CELL, unsigned{reader.thread});
            }
        }
        cell.writer = own;
        if (!only_begins) written[i] = true;
    }
}

struct Allocation {
    const unsigned char *start = nullptr;
    size_t bytes = 0;

    bool has(const void *address, size_t wanted) const {
        const size_t offset = static_cast<const unsigned char *>(address) - start;
        return offset < bytes && wanted <= bytes - offset;
    }
};

// Those of this launch that were found last: accesses go back and forth between a kernel's arguments.
Allocation found[4];
unsigned next_found;

void look_at_global(const void *address, size_t bytes) {
    for (const Allocation &allocation : found) {
        if (allocation.has(address, bytes)) return;
    }
    const void *start;
    Allocation fresh;
    if (!fake_cuda_allocation(address, &start, &fresh.bytes)) fail("%zu bytes at %p are in no allocation", bytes, address);
    fresh.start = static_cast<const unsigned char *>(start);
    if (!fresh.has(address, bytes)) fail("%zu bytes at %p reach beyond the allocation at %p", bytes, address, start);
    found[next_found++ % (sizeof found / sizeof *found)] = fresh;
}

} // namespace

void look_at(const void *address, size_t bytes, bool writes) {
    if (on_a_stack(address)) return;
    const size_t at = static_cast<const unsigned char *>(address) - shared_start;
    if (at >= SHARED_MAX) {
        look_at_global(address, bytes);
    } else if (writes) {
        look_at_write(at, bytes, false);
    } else {
        look_at_read(at, bytes);
    }
}

void begin_write(const void *address, size_t bytes) {
    const size_t at = static_cast<const unsigned char *>(address) - shared_start;
    if (at >= SHARED_MAX) fail("an asynchronous copy to %p, which is not shared memory", address);
    look_at_write(at, bytes, true);
}

void launch_begins() {
    for (Allocation &allocation : found) {
        allocation = {};
    }
}

void shared_fresh(unsigned char *start) {
    shared_start = start;
    std::memset(start, 0xff, shared_end);
    std::memset(allowed, 0, shared_end / CELL);
    std::memset(written, 0, shared_end / CELL);
    shared_end = 0;
    epoch++;
}

void shared_allows(size_t start, size_t bytes) {
    const size_t end = (start + bytes + CELL - 1) / CELL;
    for (size_t i = start / CELL; i < end; i++) {
        allowed[i] = true;
    }
    if (end * CELL > shared_end) shared_end = end * CELL;
}

void barrier_passed() {
    epoch++;
}

void warp_synced(unsigned warp) {
    warp_epochs[warp]++;
}

} // namespace emulation

// What -fsanitize=thread calls. Outside of a launch kernels.cpp runs on the caller's stack and touches its own tables,
// but in functions that are not instrumented.
using emulation::look_at;

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
#define ACCESS(bytes)                                                                                                  \
    void __tsan_read##bytes(void *address) {                                                                           \
        look_at(address, bytes, false);                                                                                \
    }                                                                                                                  \
    void __tsan_write##bytes(void *address) {                                                                          \
        look_at(address, bytes, true);                                                                                 \
    }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
#undef ACCESS
void __tsan_read_range(void *address, size_t bytes) {
    look_at(address, bytes, false);
}
void __tsan_write_range(void *address, size_t bytes) {
    look_at(address, bytes, true);
}

// What -fsanitize=alignment calls: a device refuses what it complains of.
struct TypeMismatch {
    const char *file;
    unsigned line, column;
};
void __ubsan_handle_type_mismatch_v1(TypeMismatch *what, uintptr_t address) {
    emulation::fail("%s:%u: a misaligned access at %p", what->file, what->line, reinterpret_cast<void *>(address));
}
}
