// The gate of a feed-forward (Shazeer 2020): the function of one half of each row, times the other half. A block per row and
// stripe of it, a chunk per thread.

constexpr unsigned GATE_THREADS = 128;

// x / (1 + e^-x).
__device__ inline float silu(float x) {
    return x / (1.0f + expf(-x));
}

// x/2 (1 + tanh u) with u = √(2/π) (x + 0.044715 x³), the approximation of GELU (Hendrycks and Gimpel 2016): x / (1 + e^-2u).
__device__ inline float gelu_tanh(float x) {
    return x / (1.0f + expf(-x * (1.59576912f + 0.0713548163f * x * x)));
}

// As engine/encoder/cuda/ops.rs numbers them.
constexpr unsigned GATE_GELU = 0;
constexpr unsigned GATE_SILU = 1;

__device__ inline float function_of_gate(unsigned function, float x) {
    return function == GATE_GELU ? gelu(x) : function == GATE_SILU ? silu(x) : gelu_tanh(x);
}

// Rows of `halves` are of twice `columns` elements. `of_second`: which half the function is of.
KERNEL(GATE_THREADS, gate)
(const element *halves, element *to, unsigned columns, unsigned function, unsigned of_second, unsigned aligned) {
    const unsigned at = (blockIdx.y * GATE_THREADS + threadIdx.x) * CHUNK;
    const unsigned valid = inside(at, columns);
    if (valid == 0) return;
    const element *const from = halves + static_cast<size_t>(blockIdx.x) * 2 * columns + at;
    const Chunk first = read_chunk(from, valid, aligned);
    const Chunk second = read_chunk(from + columns, valid, aligned);
    Chunk product;
#pragma unroll
    for (unsigned i = 0; i < CHUNK; i++) {
        const float gate = widen(of_second ? second.elements[i] : first.elements[i]);
        const float other = widen(of_second ? first.elements[i] : second.elements[i]);
        narrow(function_of_gate(function, gate) * other, product.elements[i]);
    }
    write_chunk(to + static_cast<size_t>(blockIdx.x) * columns + at, product, valid, aligned);
}
