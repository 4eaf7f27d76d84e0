// The type that a module keeps weights and activations in, and access to it in chunks of 128 bits. All arithmetic is in
// f32. One module is compiled per type: -DELEMENT_F32, -DELEMENT_F16 or -DELEMENT_BF16.

#undef KERNEL
#if defined(ELEMENT_F32)
typedef float element;
#define KERNEL(threads, name) extern "C" __global__ void __launch_bounds__(threads) name##_f32
#elif defined(ELEMENT_F16)
typedef f16 element;
#define KERNEL(threads, name) extern "C" __global__ void __launch_bounds__(threads) name##_f16
#elif defined(ELEMENT_BF16)
typedef bf16 element;
#define KERNEL(threads, name) extern "C" __global__ void __launch_bounds__(threads) name##_bf16
#else
#error "define ELEMENT_F32, ELEMENT_F16 or ELEMENT_BF16"
#endif

// Elements of a chunk.
constexpr unsigned CHUNK = 16 / sizeof(element);

constexpr unsigned LANES = 32;

// Smaller than any score.
__device__ inline float minus_infinity() {
    return __uint_as_float(0xff800000);
}

// A chunk as it lies in memory.
union Chunk {
    uint4 bits;
    element elements[CHUNK];
};

// Four floats as they lie in memory.
union Quad {
    uint4 bits;
    float numbers[4];
};

// Reads four floats, which begin at a multiple of 16 bytes.
__device__ inline Quad read_quad(const float *from) {
    Quad quad;
    quad.bits = *reinterpret_cast<const uint4 *>(from);
    return quad;
}

// How much of the chunk that begins at element `at` is inside a row of `len` elements: 0 to CHUNK elements.
__device__ inline unsigned inside(unsigned at, unsigned len) {
    return at >= len ? 0 : (len - at < CHUNK ? len - at : CHUNK);
}

// Reads `valid` elements, with zeros after them. `aligned`: every row begins at a multiple of 16 bytes.
__device__ inline Chunk read_chunk(const element *from, unsigned valid, bool aligned) {
    Chunk chunk;
    if (aligned && valid == CHUNK) {
        chunk.bits = *reinterpret_cast<const uint4 *>(from);
        return chunk;
    }
    chunk.bits = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (unsigned i = 0; i < CHUNK; i++) {
        if (i < valid) chunk.elements[i] = from[i];
    }
    return chunk;
}

// Writes the first `valid` elements.
__device__ inline void write_chunk(element *to, const Chunk &chunk, unsigned valid, bool aligned) {
    if (aligned && valid == CHUNK) {
        *reinterpret_cast<uint4 *>(to) = chunk.bits;
        return;
    }
#pragma unroll
    for (unsigned i = 0; i < CHUNK; i++) {
        if (i < valid) to[i] = chunk.elements[i];
    }
}

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (unsigned apart = LANES / 2; apart > 0; apart /= 2) {
        x += __shfl_xor_sync(0xffffffff, x, apart);
    }
    return x;
}
