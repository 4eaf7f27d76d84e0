// Attention within each sequence on the ordinary multipliers: the algorithm of attention.cu in f32, for elements of any type. A
// block takes some queries, a warp a share of them; for scores a lane is a key, for sums of values it is an element of
// the head.

constexpr unsigned LANES_THREADS = 128;

// Copies rows of a head into a tile whose rows are `STRIDE` apart, zeros beyond both ends.
template <unsigned ROWS, unsigned HEAD, unsigned STRIDE>
__device__ inline void copy_head(float *tile, const element *from, size_t stride, unsigned rows, unsigned head) {
    for (unsigned i = threadIdx.x; i < ROWS * HEAD; i += LANES_THREADS) {
        const unsigned row = i / HEAD, column = i % HEAD;
        tile[row * STRIDE + column] = row < rows && column < head ? widen(from[row * stride + column]) : 0.0f;
    }
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (unsigned apart = LANES / 2; apart > 0; apart /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, apart));
    }
    return x;
}

// As in attention.cu; `aligned` is not needed, since a warp reads neighbouring elements anyway. `QUERIES`: of a block.
// `ONE_TILE`: values come where the keys were, since there is no room for both.
template <unsigned HEAD, unsigned QUERIES, bool ONE_TILE>
__device__ inline void attention_of_lanes(const element *qkv, const unsigned *cu_seqlens, element *to, unsigned tiles,
                                          unsigned heads, unsigned kv_heads, unsigned head, float scale,
                                          const float *bias, unsigned positions, const Sees &sees) {
    constexpr unsigned KEYS = LANES;
    constexpr unsigned QUERIES_OF_WARP = QUERIES / (LANES_THREADS / LANES);
    // One more than the head, so that the lanes' keys lie in different banks.
    constexpr unsigned K_STRIDE = HEAD + 1;
    constexpr unsigned PER_LANE = (HEAD + LANES - 1) / LANES;
    SHARED(float, tile_q, QUERIES * HEAD);
    SHARED(float, tile_k, KEYS * K_STRIDE);
    SHARED(float, own_tile_v, ONE_TILE ? 1 : KEYS * HEAD);
    float *const tile_v = ONE_TILE ? tile_k : own_tile_v;
    SHARED(float, weights, QUERIES * KEYS);

    const unsigned sequence = blockIdx.x / tiles;
    const unsigned start = cu_seqlens[sequence];
    const unsigned length = cu_seqlens[sequence + 1] - start;
    const unsigned first = blockIdx.x % tiles * QUERIES;
    if (first >= length) return;
    const unsigned queries = length - first < QUERIES ? length - first : QUERIES;
    const unsigned warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const unsigned own = warp * QUERIES_OF_WARP;
    const size_t stride = (heads + 2 * kv_heads) * static_cast<size_t>(head);
    const element *const q = qkv + (start + first) * stride + blockIdx.y * head;
    const element *const k = qkv + start * stride + (heads + blockIdx.y / (heads / kv_heads)) * head;
    const element *const v = k + kv_heads * head;
    // Tiles that some of the queries see a key of.
    const unsigned begin = sees.begin(first) / KEYS * KEYS, end = sees.end(first + queries - 1, length);
    // Of the head's row of biases: the one of this lane's first key and this warp's first query.
    const float *const bias_of =
        bias == nullptr ? nullptr
                        : bias + (blockIdx.y * (2 * positions - 1) + positions - 1 + lane - (first + own));

    copy_head<QUERIES, HEAD, HEAD>(tile_q, q, stride, queries, head);
    float largest[QUERIES_OF_WARP], total[QUERIES_OF_WARP] = {}, sums[QUERIES_OF_WARP][PER_LANE] = {};
#pragma unroll
    for (unsigned i = 0; i < QUERIES_OF_WARP; i++) {
        largest[i] = minus_infinity();
    }
    for (unsigned at = begin; at < end; at += KEYS) {
        __syncthreads();
        copy_head<KEYS, HEAD, K_STRIDE>(tile_k, k + at * stride, stride, length - at, head);
        if (!ONE_TILE) copy_head<KEYS, HEAD, HEAD>(tile_v, v + at * stride, stride, length - at, head);
        __syncthreads();
#pragma unroll
        for (unsigned i = 0; i < QUERIES_OF_WARP; i++) {
            float score = 0.0f;
            // More at a time takes more registers than there are.
#pragma unroll 128
            for (unsigned d = 0; d < HEAD; d++) {
                score = fmaf(tile_q[(own + i) * HEAD + d], tile_k[lane * K_STRIDE + d], score);
            }
            if (bias_of != nullptr && at + lane < length && own + i < queries) score += bias_of[static_cast<int>(at - i)];
            const bool is_seen = at + lane < length && sees.key(first + own + i, at + lane);
            score = is_seen ? score * scale : minus_infinity();
            const float most = fmaxf(largest[i], warp_max(score));
            // As long as a query has seen no key, there is no largest score to subtract.
            const float base = most == minus_infinity() ? 0.0f : most;
            const float shrink = exp2f(largest[i] - base);
            const float weight = exp2f(score - base);
            largest[i] = most;
            total[i] = total[i] * shrink + weight;
#pragma unroll
            for (unsigned d = 0; d < PER_LANE; d++) {
                sums[i][d] *= shrink;
            }
            weights[(own + i) * KEYS + lane] = weight;
        }
        if (ONE_TILE) {
            __syncthreads();
            copy_head<KEYS, HEAD, HEAD>(tile_v, v + at * stride, stride, length - at, head);
            __syncthreads();
        } else {
            __syncwarp();
        }
        for (unsigned key = 0; key < KEYS; key++) {
#pragma unroll
            for (unsigned d = 0; d < PER_LANE; d++) {
                const unsigned column = d * LANES + lane;
                const float value = column < HEAD ? tile_v[key * HEAD + column] : 0.0f;
#pragma unroll
                for (unsigned i = 0; i < QUERIES_OF_WARP; i++) {
                    sums[i][d] = fmaf(weights[(own + i) * KEYS + key], value, sums[i][d]);
                }
            }
        }
    }
#pragma unroll
    for (unsigned i = 0; i < QUERIES_OF_WARP; i++) {
        const float share = 1.0f / warp_sum(total[i]);
#pragma unroll
        for (unsigned d = 0; d < PER_LANE; d++) {
            const unsigned column = d * LANES + lane;
            if (own + i < queries && column < head) {
                const size_t row = static_cast<size_t>(start + first + own + i) * heads + blockIdx.y;
                narrow(sums[i][d] * share, to[row * head + column]);
            }
        }
    }
}
