// The machine as its instructions see it: the thread that runs, its warp, and meeting all lanes of it.
#pragma once

#include "emulation.h"
#include "fiber.h"

#include <vector>

namespace emulation {

constexpr unsigned LANES = 32;

// What a warp does together.
enum class Together { Sync, Shuffle, LoadMatrices, MultiplyAdd };

// An asynchronous copy that is under way.
struct Copy {
    void *to;
    // Null: zeros.
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
    // Factors and sums of a product, by row and column.
    float a[16][16], b[16][8], sums[16][8];
};

// All floats of 16 bits.
extern const float *const WIDENED;

unsigned this_lane();
Thread &this_thread();
Warp &this_warp();

// Begins an instruction of the whole warp. True for the last lane to come, which then does what they do together.
bool last_to_meet(Together what);

// Ends it, by the lane that was the last.
void leave_meeting();

// Waits for the end, by the others.
void wait_in_meeting();

} // namespace emulation
