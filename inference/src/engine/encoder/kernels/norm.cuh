// Norm of one row by one block. Layer norm (Ba et al. 2016): (x - mean) / sqrt(variance + eps) * weight + bias. The variance
// is the mean of squared deviations from the mean, not E[x²] - E[x]², which cancels. By root mean square (Zhang and Sennrich
// 2019): the same with a mean of zero, and biases that are zeros.
//
// Each thread has one chunk of the row in registers, so the row is read once and written once.

// Longest row. engine/encoder/cuda/mod.rs refuses models beyond it.
constexpr unsigned HIDDEN_MAX = 4096;

// The most threads of a block; a launch has as many warps as the row needs.
constexpr unsigned NORM_THREADS = HIDDEN_MAX / CHUNK;

// Sum over the block. `parts` is used once per launch.
__device__ inline float block_sum(float x, float *parts) {
    const float of_warp = warp_sum(x);
    if (threadIdx.x % LANES == 0) parts[threadIdx.x / LANES] = of_warp;
    __syncthreads();
    float sum = 0.0f;
    for (unsigned warp = 0; warp < blockDim.x / LANES; warp++) {
        sum += parts[warp];
    }
    return sum;
}

// How a row is normed. Weights and biases begin at multiples of 16 bytes.
struct Norm {
    const float *weight, *bias;
    float eps;
    unsigned of_squares;
};

// sum = a + b, to = norm(a + b). `sum` and `to` may be `a` or `b`: all of a row is read before any of it is written. Where
// both are one, the norm stays.
__device__ inline void norm_of_sum(element *to, element *sum_to, const element *a, const element *b, const Norm &norm,
                                   unsigned hidden, bool aligned) {
    SHARED(float, sums, NORM_THREADS / LANES);
    SHARED(float, squares, NORM_THREADS / LANES);
    const unsigned at = threadIdx.x * CHUNK;
    const unsigned valid = inside(at, hidden);
    const Chunk chunk_a = read_chunk(a + at, valid, aligned);
    const Chunk chunk_b = read_chunk(b + at, valid, aligned);
    float x[CHUNK];
    float sum = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < CHUNK; i++) {
        x[i] = widen(chunk_a.elements[i]) + widen(chunk_b.elements[i]);
        sum += x[i];
    }
    if (sum_to != to) {
        Chunk added;
#pragma unroll
        for (unsigned i = 0; i < CHUNK; i++) {
            narrow(x[i], added.elements[i]);
        }
        write_chunk(sum_to + at, added, valid, aligned);
    }
    // Uniform over the block, so that all its threads are at the barrier or none.
    const float mean = norm.of_squares ? 0.0f : block_sum(sum, sums) / static_cast<float>(hidden);
    float square = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < CHUNK; i++) {
        x[i] = i < valid ? x[i] - mean : 0.0f;
        square += x[i] * x[i];
    }
    const float variance = block_sum(square, squares) / static_cast<float>(hidden);
    const float scale = 1.0f / sqrtf(variance + norm.eps);
    Chunk normed;
    if (valid == CHUNK) {
#pragma unroll
        for (unsigned i = 0; i < CHUNK; i += 4) {
            const Quad weight = read_quad(norm.weight + at + i), bias = read_quad(norm.bias + at + i);
#pragma unroll
            for (unsigned j = 0; j < 4; j++) {
                narrow(x[i + j] * scale * weight.numbers[j] + bias.numbers[j], normed.elements[i + j]);
            }
        }
    } else {
        // There are no weights for what is beyond the row.
#pragma unroll
        for (unsigned i = 0; i < CHUNK; i++) {
            const float weight = i < valid ? norm.weight[at + i] : 0.0f;
            const float bias = i < valid ? norm.bias[at + i] : 0.0f;
            narrow(x[i] * scale * weight + bias, normed.elements[i]);
        }
    }
    write_chunk(to + at, normed, valid, aligned);
}
