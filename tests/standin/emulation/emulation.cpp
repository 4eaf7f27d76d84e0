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

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <vector>

namespace emulation {

namespace {

constexpr unsigned LANES = 32;
constexpr unsigned THREADS_MAX = 1024;
// What a kernel may have without asking the driver for more (CUDA C++ programming guide, table of technical
// specifications).
constexpr size_t SHARED_MAX = 48 * 1024;
// Codes of the driver's.
constexpr int INVALID_VALUE = 1;
constexpr int LAUNCH_FAILED = 719;

// What a warp does together.
enum class Together { Sync, Shuffle, LoadMatrices, MultiplyAdd };

struct Copy {
    void *to;
    const void *from;
    // How many groups had been ended before it.
    unsigned group;
};

struct Thread {
    Fiber fiber;
    Index index;
    std::vector<Copy> copies;
    unsigned groups = 0;
};

// Lanes of a warp as bits, and what they have brought to an instruction.
struct Warp {
    unsigned alive, ready, arrived;
    Together what;
    float shuffled[LANES];
    unsigned apart[LANES];
    const void *rows[LANES];
    bool variant[LANES];
    unsigned matrices[LANES][4];
    float sums[LANES][4];
    unsigned a[LANES][4];
    unsigned b[LANES][2];
};

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

unsigned lane() {
    return block.current % LANES;
}

Warp &warp() {
    return warps[block.current / LANES];
}

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
            go_to(at * LANES + next_lane(warps[at].ready, step == 0 ? lane() : (block.backwards ? 0 : LANES - 1)));
            return;
        }
    }
    if (block.done == block.threads) switch_to(threads[block.current].fiber.context, scheduler);
    fail("all wait: %u threads at a barrier, %u have ended, of %u", block.at_barrier, block.done, block.threads);
}

// Returns when all lanes are here; true for the last to come, which then does what they do together.
bool last_to_meet(Together what) {
    Warp &own = warp();
    if (own.alive != 0xffffffff) fail("an instruction of the whole warp, but lanes %08x only", own.alive);
    if (own.arrived != 0 && own.what != what) fail("lanes of a warp are at different instructions");
    own.what = what;
    own.arrived |= 1u << lane();
    return own.arrived == own.alive;
}

void leave_meeting() {
    Warp &own = warp();
    own.arrived = 0;
    own.ready = own.alive;
}

void wait_in_meeting() {
    warp().ready &= ~(1u << lane());
    yield();
}

void thread_main() {
    block.kernel(block.arguments);
    Thread &own = threads[block.current];
    for (const Copy &copy : own.copies) {
        (void)copy;
        fail("ends with asynchronous copies under way");
    }
    Warp &of = warp();
    of.alive &= ~(1u << lane());
    of.ready &= of.alive;
    if (of.arrived != 0 || block.at_barrier != 0) fail("ends while others wait for it");
    block.done++;
    yield();
}

} // namespace

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

void copy_wait(unsigned left) {
    Thread &own = threads[block.current];
    size_t kept = 0;
    for (const Copy &copy : own.copies) {
        if (copy.group + left < own.groups) {
            look_at(copy.from, 16, false);
            look_at(copy.to, 16, true);
            std::memcpy(copy.to, copy.from, 16);
        } else {
            own.copies[kept++] = copy;
        }
    }
    own.copies.resize(kept);
}

// PTX ISA, "Warp-level matrix load instruction: ldmatrix".
void load_matrices(unsigned (&to)[4], const void *row, bool transposed) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail("ldmatrix of a row at %p", row);
    look_at(row, 16, false);
    Warp &own = warp();
    const unsigned mine = lane();
    own.rows[mine] = row;
    own.variant[mine] = transposed;
    if (last_to_meet(Together::LoadMatrices)) {
        for (unsigned matrix = 0; matrix < 4; matrix++) {
            unsigned short elements[8][8];
            for (unsigned r = 0; r < 8; r++) {
                std::memcpy(elements[r], own.rows[matrix * 8 + r], 16);
            }
            for (unsigned l = 0; l < LANES; l++) {
                const unsigned g = l / 4, t = l % 4;
                const unsigned first = own.variant[l] ? elements[2 * t][g] : elements[g][2 * t];
                const unsigned second = own.variant[l] ? elements[2 * t + 1][g] : elements[g][2 * t + 1];
                own.matrices[l][matrix] = first | second << 16;
            }
        }
        leave_meeting();
    } else {
        wait_in_meeting();
    }
    std::memcpy(to, own.matrices[mine], sizeof to);
}

// PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type".
void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool bfloat) {
    Warp &own = warp();
    const unsigned mine = lane();
    std::memcpy(own.sums[mine], sum, sizeof sum);
    std::memcpy(own.a[mine], a, sizeof a);
    own.b[mine][0] = b0;
    own.b[mine][1] = b1;
    if (last_to_meet(Together::MultiplyAdd)) {
        float wide_a[16][16], wide_b[16][8], sums[16][8];
        const auto wide = [bfloat](unsigned pair, unsigned which) {
            const unsigned short bits = static_cast<unsigned short>(which == 0 ? pair : pair >> 16);
            return bfloat ? __uint_as_float(static_cast<unsigned>(bits) << 16) : widen_f16(bits);
        };
        for (unsigned l = 0; l < LANES; l++) {
            const unsigned g = l / 4, t = l % 4;
            for (unsigned i = 0; i < 2; i++) {
                wide_a[g][2 * t + i] = wide(own.a[l][0], i);
                wide_a[g + 8][2 * t + i] = wide(own.a[l][1], i);
                wide_a[g][2 * t + 8 + i] = wide(own.a[l][2], i);
                wide_a[g + 8][2 * t + 8 + i] = wide(own.a[l][3], i);
                wide_b[2 * t + i][g] = wide(own.b[l][0], i);
                wide_b[2 * t + 8 + i][g] = wide(own.b[l][1], i);
                sums[g][2 * t + i] = own.sums[l][i];
                sums[g + 8][2 * t + i] = own.sums[l][2 + i];
            }
        }
        for (unsigned m = 0; m < 16; m++) {
            for (unsigned k = 0; k < 16; k++) {
                for (unsigned n = 0; n < 8; n++) {
                    sums[m][n] += wide_a[m][k] * wide_b[k][n];
                }
            }
        }
        for (unsigned l = 0; l < LANES; l++) {
            const unsigned g = l / 4, t = l % 4;
            for (unsigned i = 0; i < 2; i++) {
                own.sums[l][i] = sums[g][2 * t + i];
                own.sums[l][2 + i] = sums[g + 8][2 * t + i];
            }
        }
        leave_meeting();
    } else {
        wait_in_meeting();
    }
    std::memcpy(sum, own.sums[mine], sizeof sum);
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
    shared_fresh(shared_memory, SHARED_MAX);
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
    warp().ready &= ~(1u << lane());
    yield();
}

void __syncwarp() {
    if (last_to_meet(Together::Sync)) {
        warp_synced(block.current / LANES);
        leave_meeting();
    } else {
        wait_in_meeting();
    }
}

float __shfl_xor_sync(unsigned mask, float x, unsigned apart) {
    if (mask != 0xffffffff) fail("a shuffle of lanes %08x only", mask);
    Warp &own = warp();
    const unsigned mine = lane();
    own.shuffled[mine] = x;
    if (last_to_meet(Together::Shuffle)) {
        float before[LANES];
        std::memcpy(before, own.shuffled, sizeof before);
        own.apart[mine] = apart;
        for (unsigned l = 0; l < LANES; l++) {
            own.shuffled[l] = before[l ^ own.apart[l]];
        }
        leave_meeting();
    } else {
        own.apart[mine] = apart;
        wait_in_meeting();
    }
    return own.shuffled[mine];
}

void copy_begin(void *to_shared, const void *from) {
    if (reinterpret_cast<uintptr_t>(to_shared) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
        fail("an asynchronous copy of 16 bytes from %p to %p", from, to_shared);
    }
    // From now until it is waited for, nobody may touch what is copied to.
    look_at(from, 16, false);
    begin_write(to_shared, 16);
    Thread &own = threads[block.current];
    own.copies.push_back({to_shared, from, own.groups});
}

void copy_group() {
    threads[block.current].groups++;
}
