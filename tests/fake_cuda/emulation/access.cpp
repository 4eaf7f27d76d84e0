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
#include <initializer_list>

// The fake driver: the allocation that an address is in. Zero if there is none.
extern "C" int fake_cuda_allocation(const void *address, const void **start, size_t *bytes);

namespace emulation {

namespace {

constexpr unsigned LANES = 32;
constexpr size_t SHARED_MAX = 48 * 1024;
// Bytes that are looked at as one: a 16-bit element.
constexpr size_t CELL = 2;

// When a cell was touched, and by which thread, in one small number: looks at them are most of a test's time. Time goes on with each
// barrier and each __syncwarp.
using Touch = uint32_t;
constexpr unsigned THREAD_BITS = 10;
constexpr Touch TIME_END = 1u << (32 - THREAD_BITS);

constexpr Touch at_time(uint32_t time) {
    return time << THREAD_BITS;
}

unsigned thread_of(Touch touch) {
    return touch & ((1u << THREAD_BITS) - 1);
}

unsigned char *shared_start;
constexpr size_t CELLS = SHARED_MAX / CELL;
// By cell: who wrote it last, and the last two that read it and differ.
Touch writers[CELLS], readers[CELLS], earlier_readers[CELLS];
// Whether a cell is in an array, and whether something was written to it, which is only possible there.
enum State : unsigned char { NOWHERE, ALLOWED, WRITTEN };
State states[CELLS];
// Where the arrays of the block end. Behind them nothing is written: every access there fails.
size_t shared_end = SHARED_MAX;
// It goes back only when all cells are cleared, so that those of earlier blocks are old without that.
uint32_t time_now = 1;
// The first touch that may be since the block's last barrier, and since each warp's last __syncwarp.
Touch since_barrier = at_time(1), since_sync[32];

bool unordered(Touch earlier, Touch now) {
    if (earlier < since_barrier || thread_of(earlier) == thread_of(now)) return false;
    const unsigned warp = thread_of(now) / LANES;
    return thread_of(earlier) / LANES != warp || earlier >= since_sync[warp];
}

Touch now() {
    return at_time(time_now) | current_thread();
}

void time_passes() {
    if (++time_now < TIME_END) return;
    for (Touch *const touches : {writers, readers, earlier_readers}) {
        std::memset(touches, 0, sizeof writers);
    }
    std::memset(since_sync, 0, sizeof since_sync);
    time_now = 1;
    since_barrier = at_time(time_now);
}

void all_is_ordered() {
    time_passes();
    since_barrier = at_time(time_now);
}

void must_be_allowed(size_t cell) {
    if (states[cell] == NOWHERE) fail("byte %zu of shared memory is in no array", cell * CELL);
}

void look_at_read(size_t first, size_t end) {
    const Touch own = now();
    for (size_t i = first; i < end; i++) {
        must_be_allowed(i);
        if (states[i] != WRITTEN) fail("byte %zu of shared memory is read before it is written", i * CELL);
        if (unordered(writers[i], own)) {
            fail("byte %zu of shared memory: read, while thread %u writes it", i * CELL, thread_of(writers[i]));
        }
        if (thread_of(readers[i]) != thread_of(own)) earlier_readers[i] = readers[i];
        readers[i] = own;
    }
}

void look_at_write(size_t first, size_t end, bool only_begins) {
    const Touch own = now();
    for (size_t i = first; i < end; i++) {
        must_be_allowed(i);
        if (unordered(writers[i], own)) {
            fail("byte %zu of shared memory: written, while thread %u writes it", i * CELL, thread_of(writers[i]));
        }
        for (const Touch reader : {readers[i], earlier_readers[i]}) {
            if (unordered(reader, own)) {
                fail("byte %zu of shared memory: written, while thread %u reads it", i * CELL, thread_of(reader));
            }
        }
        writers[i] = own;
        if (!only_begins) states[i] = WRITTEN;
    }
}

// The same for so many cells that nobody has touched since the barrier. False, and nothing is done, where somebody has, or where anything
// is wrong.
template <size_t COUNT> bool is_plain_read(size_t first) {
    const Touch own = now();
    bool is_plain = true;
    for (size_t i = first; i < first + COUNT; i++) {
        is_plain &= states[i] == WRITTEN && writers[i] < since_barrier;
    }
    if (!is_plain) return false;
    for (size_t i = first; i < first + COUNT; i++) {
        earlier_readers[i] = thread_of(readers[i]) != thread_of(own) ? readers[i] : earlier_readers[i];
        readers[i] = own;
    }
    return true;
}

template <size_t COUNT> bool is_plain_write(size_t first) {
    const Touch own = now();
    bool is_plain = true;
    for (size_t i = first; i < first + COUNT; i++) {
        is_plain &= states[i] != NOWHERE && writers[i] < since_barrier && readers[i] < since_barrier &&
                    earlier_readers[i] < since_barrier;
    }
    if (!is_plain) return false;
    for (size_t i = first; i < first + COUNT; i++) {
        writers[i] = own;
        states[i] = WRITTEN;
    }
    return true;
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

size_t end_cell(size_t at, size_t bytes) {
    return (at + bytes - 1) / CELL + 1;
}

// `look_at` for the sizes of whole cells that the compiler calls for.
template <size_t BYTES, bool WRITES> void look_at_one(const void *address) {
    const size_t at = static_cast<const unsigned char *>(address) - shared_start;
    if (at < SHARED_MAX && at % BYTES == 0) {
        if (WRITES ? is_plain_write<BYTES / CELL>(at / CELL) : is_plain_read<BYTES / CELL>(at / CELL)) return;
    }
    look_at(address, BYTES, WRITES);
}

} // namespace

void look_at(const void *address, size_t bytes, bool writes) {
    if (on_a_stack(address)) return;
    const size_t at = static_cast<const unsigned char *>(address) - shared_start;
    if (at >= SHARED_MAX) {
        look_at_global(address, bytes);
    } else if (writes) {
        look_at_write(at / CELL, end_cell(at, bytes), false);
    } else {
        look_at_read(at / CELL, end_cell(at, bytes));
    }
}

void begin_write(const void *address, size_t bytes) {
    const size_t at = static_cast<const unsigned char *>(address) - shared_start;
    if (at >= SHARED_MAX) fail("an asynchronous copy to %p, which is not shared memory", address);
    look_at_write(at / CELL, end_cell(at, bytes), true);
}

void launch_begins() {
    for (Allocation &allocation : found) {
        allocation = {};
    }
}

void shared_fresh(unsigned char *start) {
    shared_start = start;
    std::memset(start, 0xff, shared_end);
    std::memset(states, NOWHERE, shared_end / CELL);
    shared_end = 0;
    all_is_ordered();
}

void shared_allows(size_t start, size_t bytes) {
    const size_t end = (start + bytes + CELL - 1) / CELL;
    for (size_t i = start / CELL; i < end; i++) {
        states[i] = ALLOWED;
    }
    if (end * CELL > shared_end) shared_end = end * CELL;
}

void barrier_passed() {
    all_is_ordered();
}

void warp_synced(unsigned warp) {
    time_passes();
    since_sync[warp] = at_time(time_now);
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
        emulation::look_at_one<bytes, false>(address);                                                                 \
    }                                                                                                                  \
    void __tsan_write##bytes(void *address) {                                                                          \
        emulation::look_at_one<bytes, true>(address);                                                                  \
    }
void __tsan_read1(void *address) {
    look_at(address, 1, false);
}
void __tsan_write1(void *address) {
    look_at(address, 1, true);
}
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
