// What of the hardware the kernels use beyond C++: 16-bit floats, tensor cores, asynchronous copies. Written as PTX, so
// that NVRTC needs no header beside itself. tests/standin/emulation.h has the same functions for a CPU.
//
// Source of all instructions and fragment layouts: PTX ISA 8.8, chapter 9.7. g = lane / 4, t = lane % 4.

struct f16 {
    unsigned short bits;
};

struct bf16 {
    unsigned short bits;
};

// An array in a block's shared memory, aligned for 128-bit access and for ldmatrix.
#define SHARED(type, name, count) __shared__ __align__(128) type name[count]

__device__ inline float widen(float x) {
    return x;
}

__device__ inline float widen(f16 x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}

// A bfloat16 is the upper half of an f32.
__device__ inline float widen(bf16 x) {
    return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

__device__ inline void narrow(float x, float &to) {
    to = x;
}

// To the nearest, ties to even.
__device__ inline void narrow(float x, f16 &to) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
}

#if __CUDA_ARCH__ >= 800
__device__ inline void narrow(float x, bf16 &to) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
}
#endif

// Two numbers in one register, the first in its lower half.
__device__ inline unsigned pack(float first, float second, f16) {
    unsigned pair;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
    f16 low, high;
    narrow(first, low);
    narrow(second, high);
    pair = low.bits | static_cast<unsigned>(high.bits) << 16;
#endif
    return pair;
}

#if __CUDA_ARCH__ >= 800
__device__ inline unsigned pack(float first, float second, bf16) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
#endif

// 2^x in one instruction, with a relative error of 2^-22; zero where a float would be subnormal.
__device__ inline float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

__device__ inline unsigned shared_address(const void *in_shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(in_shared));
}

// Four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8, 16 bytes that start at a
// multiple of 16. Of matrix i each lane gets in to[i] the elements 2t and 2t + 1 of row g.
__device__ inline void load_matrices(unsigned (&to)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, each matrix transposed on the way: a lane gets the rows 2t and 2t + 1 of column g.
__device__ inline void load_matrices_transposed(unsigned (&to)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// sum += a * b: a is 16x16, row by row; b is 16x8, column by column; sum is 16x8 in f32.
// a[0]: row g, columns 2t and 2t + 1. a[1]: row g + 8. a[2], a[3]: the same rows, columns 2t + 8 and 2t + 9.
// b0: rows 2t and 2t + 1 of column g. b1: rows 2t + 8 and 2t + 9.
// sum[0], sum[1]: row g, columns 2t and 2t + 1. sum[2], sum[3]: row g + 8.
__device__ inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, f16) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    // Turing has half of it per instruction; the halves' fragments are the same registers.
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

#if __CUDA_ARCH__ >= 800
__device__ inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Whether there are asynchronous copies.
constexpr bool ASYNCHRONOUS = __CUDA_ARCH__ >= 800;

// Begins to copy 16 bytes from global to shared memory, both at multiples of 16; or zeros, for which nothing is read.
// Where the hardware has no such copies, it is done at once.
__device__ inline void copy_begin(void *to_shared, const void *from, bool is_there) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)), "l"(from),
                 "r"(is_there ? 16 : 0)
                 : "memory");
#else
    *static_cast<uint4 *>(to_shared) = is_there ? *static_cast<const uint4 *>(from) : make_uint4(0, 0, 0, 0);
#endif
}

// Ends a group of copies: those that this thread has begun since the last group.
__device__ inline void copy_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the newest `LEFT` groups of this thread are under way. Others see what was copied after the
// next barrier.
template <int LEFT> __device__ inline void copy_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}
