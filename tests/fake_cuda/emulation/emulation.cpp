// Runs a kernel's threads on one thread of the CPU, block after block: each is a fiber that goes on until it has to wait
// for others, at a barrier or at an instruction of its whole warp.
//
// What a device leaves to the programmer is checked here, as far as it can be:
//   - A barrier is reached by all threads of the block, a warp's instruction by all of its lanes, and by all the same one.
//   - In odd blocks threads run in the opposite order, and in odd launches blocks do: what depends on the order shows.
//   - Asynchronous copies happen as late as they may, when they are waited for.
//   - Every access of a kernel is looked at (access.cpp).

#include "emulation.h"
#include "access.h"
#include "fiber.h"
#include "machine.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <vector>

namespace emulation {

namespace {

constexpr unsigned THREADS_MAX = 1024;
// What a kernel may have without asking the driver for more (CUDA C++ programming guide, table of technical
// specifications).
constexpr size_t SHARED_MAX = 48 * 1024;
// Codes of the driver's.
constexpr int INVALID_VALUE = 1;
constexpr int LAUNCH_FAILED = 719;

struct Block {
    unsigned threads = 0, warps = 0;
    unsigned at_barrier = 0, done = 0;
    // Lanes from the last to the first, warps as well.
    bool backwards = false;
    unsigned current = 0;
    Kernel kernel = nullptr;
    void **arguments = nullptr;
};

struct Here {
    Index thread, block, block_size;
};

Here here;
Block block;
std::vector<Thread> threads;
std::vector<Warp> warps;
Context scheduler;
bool failed;
const char *kernel_name;

struct SharedArray {
    const void *key;
    size_t start, bytes;
};
std::vector<SharedArray> shared_arrays;
alignas(128) unsigned char shared_memory[SHARED_MAX];
size_t shared_used;

} // namespace

void fail(const char *format, ...) {
    std::fprintf(stderr, "emulation: %s, block (%u, %u, %u), thread %u: ", kernel_name, here.block.x, here.block.y,
                 here.block.z, block.current);
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fputc('\n', stderr);
    failed = true;
    // The launch ends here; its fibers are never gone back to.
    switch_to(threads[block.current].fiber.context, scheduler);
    __builtin_unreachable();
}

namespace {

// The lane that comes after one in the order of this block, among those of a set.
unsigned next_lane(unsigned set, unsigned after) {
    for (unsigned step = 1; step <= LANES; step++) {
        const unsigned lane = (block.backwards ? after + LANES - step : after + step) % LANES;
        if (set >> lane & 1) return lane;
    }
    return after;
}

void go_to(unsigned thread) {
    const unsigned from = block.current;
    if (thread == from) return;
    block.current = thread;
    here.thread = threads[thread].index;
    switch_to(threads[from].fiber.context, threads[thread].fiber.context);
}

// Lets another thread run, one of this warp if it can be. Returns when this thread's turn has come again.
void yield() {
    const unsigned own = block.current / LANES;
    for (unsigned step = 0; step < block.warps; step++) {
        const unsigned at = (block.backwards ? own + block.warps - step : own + step) % block.warps;
        if (warps[at].ready) {
            go_to(at * LANES + next_lane(warps[at].ready, step == 0 ? this_lane() : (block.backwards ? 0 : LANES - 1)));
            return;
        }
    }
    if (block.done == block.threads) switch_to(threads[block.current].fiber.context, scheduler);
    fail("all wait: %u threads at a barrier, %u have ended, of %u", block.at_barrier, block.done, block.threads);
}

void thread_main() {
    block.kernel(block.arguments);
    if (!this_thread().copies.empty()) fail("ends with asynchronous copies under way");
    Warp &of = this_warp();
    of.alive &= ~(1u << this_lane());
    of.ready &= of.alive;
    if (of.arrived != 0 || block.at_barrier != 0) fail("ends while others wait for it");
    block.done++;
    yield();
}

} // namespace

unsigned this_lane() {
    return block.current % LANES;
}

Thread &this_thread() {
    return threads[block.current];
}

Warp &this_warp() {
    return warps[block.current / LANES];
}

bool last_to_meet(Together what) {
    Warp &own = this_warp();
    if (own.alive != 0xffffffff) fail("an instruction of the whole warp, but lanes %08x only", own.alive);
    if (own.arrived != 0 && own.what != what) fail("lanes of a warp are at different instructions");
    own.what = what;
    own.arrived |= 1u << this_lane();
    return own.arrived == own.alive;
}

void leave_meeting() {
    Warp &own = this_warp();
    own.arrived = 0;
    own.ready = own.alive;
}

void wait_in_meeting() {
    this_warp().ready &= ~(1u << this_lane());
    yield();
}

void *shared(const void *key, size_t bytes) {
    for (const SharedArray &array : shared_arrays) {
        if (array.key == key) return shared_memory + array.start;
    }
    const size_t start = (shared_used + 127) / 128 * 128;
    if (start + bytes > SHARED_MAX) fail("%zu bytes of shared memory", start + bytes);
    shared_arrays.push_back({key, start, bytes});
    shared_used = start + bytes;
    shared_allows(start, bytes);
    return shared_memory + start;
}

namespace {

void run_block(const unsigned size[3], bool backwards) {
    block.at_barrier = block.done = 0;
    block.backwards = backwards;
    for (unsigned i = 0; i < block.threads; i++) {
        threads[i].index = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
        threads[i].copies.clear();
        threads[i].groups = 0;
        threads[i].fiber.start(thread_main);
    }
    for (unsigned i = 0; i < block.warps; i++) {
        const unsigned lanes = block.threads - i * LANES;
        warps[i].alive = warps[i].ready = lanes >= LANES ? 0xffffffff : (1u << lanes) - 1;
        warps[i].arrived = 0;
    }
    shared_arrays.clear();
    shared_used = 0;
    shared_fresh(shared_memory);
    block.current = backwards ? block.threads - 1 : 0;
    here.thread = threads[block.current].index;
    switch_to(scheduler, threads[block.current].fiber.context);
}

} // namespace

int launch(const char *name, Kernel kernel, const unsigned grid[3], const unsigned size[3], void **arguments) {
    static std::mutex one_at_a_time;
    static unsigned launches;
    const std::lock_guard<std::mutex> alone(one_at_a_time);
    const unsigned long long wanted = static_cast<unsigned long long>(size[0]) * size[1] * size[2];
    if (wanted == 0 || wanted > THREADS_MAX || grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[1] > 65535 ||
        grid[2] > 65535) {
        std::fprintf(stderr, "emulation: %s is launched with %llu threads a block, %u x %u x %u blocks\n", name, wanted,
                     grid[0], grid[1], grid[2]);
        return INVALID_VALUE;
    }
    kernel_name = name;
    block.kernel = kernel;
    block.arguments = arguments;
    block.threads = static_cast<unsigned>(wanted);
    block.warps = (block.threads + LANES - 1) / LANES;
    failed = false;
    while (threads.size() < block.threads) {
        threads.emplace_back();
    }
    warps.resize(block.warps);
    here.block_size = {size[0], size[1], size[2]};
    launch_begins();
    const bool backwards = launches++ % 2 == 1;
    const unsigned long long blocks = static_cast<unsigned long long>(grid[0]) * grid[1] * grid[2];
    for (unsigned long long step = 0; step < blocks && !failed; step++) {
        const unsigned long long at = backwards ? blocks - 1 - step : step;
        here.block.x = static_cast<unsigned>(at % grid[0]);
        here.block.y = static_cast<unsigned>(at / grid[0] % grid[1]);
        here.block.z = static_cast<unsigned>(at / grid[0] / grid[1]);
        run_block(size, step % 2 == 1);
    }
    return failed ? LAUNCH_FAILED : 0;
}

unsigned current_thread() {
    return block.current;
}

Index thread_index() {
    return here.thread;
}

Index block_index() {
    return here.block;
}

Index block_size() {
    return here.block_size;
}

} // namespace emulation

using namespace emulation;

void __syncthreads() {
    if (++block.at_barrier == block.threads) {
        block.at_barrier = 0;
        for (Warp &each : warps) {
            each.ready = each.alive;
        }
        barrier_passed();
        return;
    }
    this_warp().ready &= ~(1u << this_lane());
    yield();
}
