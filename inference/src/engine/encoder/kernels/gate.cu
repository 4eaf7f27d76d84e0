// The gate of a feed-forward (Shazeer 2020): the function of one half of each row, times the other half. A block per row and
// stripe of it, a chunk per thread.

constexpr unsigned GATE_THREADS = 128;

// x / (1 + e^-x).
__device__ inline float silu(float x) {
    return x / (1.0f + expf(-x));
}

// Rows of `halves` are of twice `columns` elements. `is_silu`: else GELU. `of_second`: which half the function is of.
KERNEL(GATE_THREADS, gate)
(const element *halves, element *to, unsigned columns, unsigned is_silu, unsigned of_second, unsigned aligned) {
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
        narrow((is_silu ? silu(gate) : gelu(gate)) * other, product.elements[i]);
    }
    write_chunk(to + static_cast<size_t>(blockIdx.x) * columns + at, product, valid, aligned);
}
