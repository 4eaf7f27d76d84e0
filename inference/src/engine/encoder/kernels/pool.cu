// The tokens of a sequence into its vector, and that to length 1: mean, first or last token, or maximum, as the model's files
// say. One block per sequence. Warps take tokens in turn, lanes take chunks of the row; then the warps' parts are
// joined. No tokens give zeros, as on the CPU.

constexpr unsigned POOL_THREADS = 256;
constexpr unsigned POOL_WARPS = POOL_THREADS / LANES;

// Rows that a warp reads at a time.
constexpr unsigned POOL_READS = 8;

// As engine/encoder/cuda/ops.rs numbers them.
constexpr unsigned POOL_MEAN = 0;
constexpr unsigned POOL_CLS = 1;
constexpr unsigned POOL_MAX = 2;
constexpr unsigned POOL_LAST = 3;

// The larger of two, and NaN if one is: fmaxf would hide it.
__device__ inline float larger(float a, float b) {
    return a > b || a != a ? a : b;
}

KERNEL(POOL_THREADS, pool)
(const element *x, const unsigned *cu_seqlens, unsigned hidden, unsigned pooling, unsigned normalize, unsigned aligned,
 float *vectors) {
    SHARED(float, parts, POOL_WARPS * LANES * CHUNK);
    SHARED(float, squares_of, POOL_WARPS);
    const unsigned warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const unsigned start = cu_seqlens[blockIdx.x];
    const unsigned tokens = cu_seqlens[blockIdx.x + 1] - start;
    const unsigned rows = (pooling == POOL_CLS || pooling == POOL_LAST) && tokens > 1 ? 1 : tokens;
    const unsigned first = pooling == POOL_LAST && tokens > 1 ? start + tokens - 1 : start;
    const float share = pooling == POOL_MEAN && rows > 0 ? 1.0f / static_cast<float>(rows) : 1.0f;
    float *const vector = vectors + static_cast<size_t>(blockIdx.x) * hidden;
    // Of the elements that this thread has written.
    float squares = 0.0f;

    for (unsigned stripe = 0; stripe < hidden; stripe += LANES * CHUNK) {
        const unsigned at = stripe + lane * CHUNK;
        const unsigned valid = inside(at, hidden);
        float part[CHUNK];
#pragma unroll
        for (unsigned j = 0; j < CHUNK; j++) {
            part[j] = 0.0f;
        }
        // Several rows are read before the first is added: one read at a time would wait for memory each time.
        for (unsigned row = warp; row < rows && valid > 0; row += POOL_WARPS * POOL_READS) {
            Chunk chunks[POOL_READS];
#pragma unroll
            for (unsigned i = 0; i < POOL_READS; i++) {
                const unsigned own = row + i * POOL_WARPS;
                if (own < rows) {
                    chunks[i] = read_chunk(x + static_cast<size_t>(first + own) * hidden + at, valid, aligned);
                }
            }
#pragma unroll
            for (unsigned i = 0; i < POOL_READS; i++) {
                const unsigned own = row + i * POOL_WARPS;
                if (own >= rows) break;
#pragma unroll
                for (unsigned j = 0; j < CHUNK; j++) {
                    const float value = widen(chunks[i].elements[j]);
                    if (own == warp) {
                        part[j] = value;
                    } else {
                        part[j] = pooling == POOL_MAX ? larger(part[j], value) : part[j] + value;
                    }
                }
            }
        }
#pragma unroll
        for (unsigned j = 0; j < CHUNK; j++) {
            // Element j of all lanes lies together: no two lanes share a bank.
            parts[(warp * CHUNK + j) * LANES + lane] = part[j];
        }
        __syncthreads();
        const unsigned warps = rows < POOL_WARPS ? rows : POOL_WARPS;
        for (unsigned i = threadIdx.x; i < LANES * CHUNK; i += POOL_THREADS) {
            const unsigned column = stripe + (i % LANES) * CHUNK + i / LANES;
            if (column < hidden) {
                float pooled = warps > 0 ? parts[i] : 0.0f;
                for (unsigned w = 1; w < warps; w++) {
                    const float value = parts[w * CHUNK * LANES + i];
                    pooled = pooling == POOL_MAX ? larger(pooled, value) : pooled + value;
                }
                pooled *= share;
                squares += pooled * pooled;
                vector[column] = pooled;
            }
        }
        __syncthreads();
    }
    if (!normalize) return;

    squares = warp_sum(squares);
    if (lane == 0) squares_of[warp] = squares;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (unsigned w = 0; w < POOL_WARPS; w++) {
        sum += squares_of[w];
    }
    // The floor is that of torch.nn.functional.normalize. fmaxf would hide a NaN.
    const float norm = sqrtf(sum);
    const float scale = 1.0f / (norm < 1e-12f ? 1e-12f : norm);
    // Each thread the elements that it has written itself, so no barrier is needed in between.
    for (unsigned stripe = 0; stripe < hidden; stripe += LANES * CHUNK) {
        for (unsigned i = threadIdx.x; i < LANES * CHUNK; i += POOL_THREADS) {
            const unsigned column = stripe + (i % LANES) * CHUNK + i / LANES;
            if (column < hidden) vector[column] *= scale;
        }
    }
}
