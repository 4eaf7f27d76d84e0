// CUDA's language on a CPU, as far as the kernels use it: what inference/src/engine/encoder/kernels/ptx.cuh is on a device.
// The kernels' own source is compiled with it, and run thread by thread, with what a device leaves to the programmer
// checked: see emulation.cpp.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

// Not inlined, so that it is instrumented while what gives it its arguments is not.
#define __global__ __attribute__((noinline))
#define __device__
#define __launch_bounds__(threads)
#define __align__(bytes) alignas(bytes)

struct f16 {
    unsigned short bits;
};

struct bf16 {
    unsigned short bits;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}

namespace emulation {

struct Index {
    unsigned x = 0, y = 0, z = 0;
};

// Where the thread of the device is that runs now. Constant for each: functions, so that reading it is no access.
__attribute__((const)) Index thread_index();
__attribute__((const)) Index block_index();
__attribute__((const)) Index block_size();

// Memory of the block, the same for all threads that name the same key.
void *shared(const void *key, size_t bytes);

void copy_wait(unsigned left);

float widen_f16(unsigned short bits);
unsigned short narrow_f16(float x);
unsigned short narrow_bf16(float x);
void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool bfloat);
void load_matrices(unsigned (&to)[4], const void *row, bool transposed);

// Calls a kernel with arguments as the driver gets them: pointers to each.
using Kernel = void (*)(void **arguments);

// Runs a launch. Zero, or a code of the driver's if it did what a device would not have stood; what that was is then on
// standard error.
int launch(const char *name, Kernel kernel, const unsigned grid[3], const unsigned block[3], void **arguments);

} // namespace emulation

#define threadIdx (emulation::thread_index())
#define blockIdx (emulation::block_index())
#define blockDim (emulation::block_size())

#define SHARED(type, name, count)                                                                                      \
    static const char name##_key = 0;                                                                                  \
    type *const name = static_cast<type *>(emulation::shared(&name##_key, sizeof(type) * (count)))

void __syncthreads();
void __syncwarp();
float __shfl_xor_sync(unsigned mask, float x, unsigned apart);

inline float __uint_as_float(unsigned bits) {
    return __builtin_bit_cast(float, bits);
}

inline float widen(float x) {
    return x;
}

inline float widen(f16 x) {
    return emulation::widen_f16(x.bits);
}

inline float widen(bf16 x) {
    return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

inline void narrow(float x, float &to) {
    to = x;
}

inline void narrow(float x, f16 &to) {
    to.bits = emulation::narrow_f16(x);
}

inline void narrow(float x, bf16 &to) {
    to.bits = emulation::narrow_bf16(x);
}

inline unsigned pack(float first, float second, f16) {
    return emulation::narrow_f16(first) | static_cast<unsigned>(emulation::narrow_f16(second)) << 16;
}

inline unsigned pack(float first, float second, bf16) {
    return emulation::narrow_bf16(first) | static_cast<unsigned>(emulation::narrow_bf16(second)) << 16;
}

// Zero where a float would be subnormal.
inline float power_of_two(float x) {
    const float power = std::exp2(x);
    return power < 0x1p-126f ? 0.0f : power;
}

inline void load_matrices(unsigned (&to)[4], const void *row) {
    emulation::load_matrices(to, row, false);
}

inline void load_matrices_transposed(unsigned (&to)[4], const void *row) {
    emulation::load_matrices(to, row, true);
}

inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, f16) {
    emulation::multiply_add(sum, a, b0, b1, false);
}

inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bf16) {
    emulation::multiply_add(sum, a, b0, b1, true);
}

constexpr bool ASYNCHRONOUS = true;

void copy_begin(void *to_shared, const void *from, bool is_there);
void copy_group();

template <int LEFT> inline void copy_wait() {
    emulation::copy_wait(LEFT);
}
