// What lanes of a warp do together, and asynchronous copies.

#include "access.h"
#include "machine.h"

#include <cstring>

namespace emulation {

void copy_wait(unsigned left) {
    Thread &own = this_thread();
    size_t kept = 0;
    for (const Copy &copy : own.copies) {
        if (copy.group + left < own.groups) {
            if (copy.from) look_at(copy.from, 16, false);
            look_at(copy.to, 16, true);
            if (copy.from) {
                std::memcpy(copy.to, copy.from, 16);
            } else {
                std::memset(copy.to, 0, 16);
            }
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
    Warp &own = this_warp();
    const unsigned mine = this_lane();
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

// PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type". Each lane brings its elements to their places, and takes its sums
// from theirs, which no other lane touches.
void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool bfloat) {
    Warp &own = this_warp();
    const unsigned g = this_lane() / 4, t = this_lane() % 4;
    for (unsigned i = 0; i < 2; i++) {
        const auto wide = [bfloat, i](unsigned pair) {
            const auto bits = static_cast<unsigned short>(i == 0 ? pair : pair >> 16);
            return bfloat ? __uint_as_float(static_cast<unsigned>(bits) << 16) : WIDENED[bits];
        };
        const unsigned k = 2 * t + i;
        own.a[g][k] = wide(a[0]);
        own.a[g + 8][k] = wide(a[1]);
        own.a[g][k + 8] = wide(a[2]);
        own.a[g + 8][k + 8] = wide(a[3]);
        own.b[k][g] = wide(b0);
        own.b[k + 8][g] = wide(b1);
        own.sums[g][k] = sum[i];
        own.sums[g + 8][k] = sum[2 + i];
    }
    if (last_to_meet(Together::MultiplyAdd)) {
        for (unsigned m = 0; m < 16; m++) {
            float row[8];
            std::memcpy(row, own.sums[m], sizeof row);
            for (unsigned k = 0; k < 16; k++) {
                for (unsigned n = 0; n < 8; n++) {
                    row[n] += own.a[m][k] * own.b[k][n];
                }
            }
            std::memcpy(own.sums[m], row, sizeof row);
        }
        leave_meeting();
    } else {
        wait_in_meeting();
    }
    for (unsigned i = 0; i < 2; i++) {
        sum[i] = own.sums[g][2 * t + i];
        sum[2 + i] = own.sums[g + 8][2 * t + i];
    }
}

} // namespace emulation

using namespace emulation;

void __syncwarp() {
    if (last_to_meet(Together::Sync)) {
        warp_synced(current_thread() / LANES);
        leave_meeting();
    } else {
        wait_in_meeting();
    }
}

float __shfl_xor_sync(unsigned mask, float x, unsigned apart) {
    if (mask != 0xffffffff) fail("a shuffle of lanes %08x only", mask);
    Warp &own = this_warp();
    const unsigned mine = this_lane();
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

void copy_begin(void *to_shared, const void *from, bool is_there) {
    if (reinterpret_cast<uintptr_t>(to_shared) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
        fail("an asynchronous copy of 16 bytes from %p to %p", from, to_shared);
    }
    if (!is_there) from = nullptr;
    if (from) look_at(from, 16, false);
    // From now until it is waited for, nobody may touch what is copied to.
    begin_write(to_shared, 16);
    Thread &own = this_thread();
    own.copies.push_back({to_shared, from, own.groups});
}

void copy_group() {
    this_thread().groups++;
}
