// Attention within each sequence in f32: the algorithm of attention.cu on the ordinary multipliers. A block takes 16
// queries, a warp four of them; for scores a lane is a key, for sums of values it is an element of the head.

constexpr unsigned QUERIES = 16;
constexpr unsigned KEYS = LANES;
constexpr unsigned ATTENTION_THREADS = 128;
constexpr unsigned QUERIES_OF_WARP = QUERIES / (ATTENTION_THREADS / LANES);

// Copies rows of a head into a tile whose rows are `STRIDE` apart, zeros beyond both ends.
template <unsigned ROWS, unsigned HEAD, unsigned STRIDE>
__device__ inline void copy_head(float *tile, const float *from, size_t stride, unsigned rows, unsigned head) {
    for (unsigned i = threadIdx.x; i < ROWS * HEAD; i += ATTENTION_THREADS) {
        const unsigned row = i / HEAD, column = i % HEAD;
        tile[row * STRIDE + column] = row < rows && column < head ? from[row * stride + column] : 0.0f;
    }
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (unsigned apart = LANES / 2; apart > 0; apart /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, apart));
    }
    return x;
}

// As in attention.cu; `aligned` is not needed, since a warp reads neighbouring elements anyway.
template <unsigned HEAD>
__device__ inline void attention_tile(const float *qkv, const unsigned *cu_seqlens, float *to, unsigned tiles,
                                      unsigned heads, unsigned kv_heads, unsigned head, float scale,
                                      const float *bias, unsigned positions, const Sees &sees) {
    // One more than the head, so that the lanes' keys lie in different banks.
    constexpr unsigned K_STRIDE = HEAD + 1;
    constexpr unsigned PER_LANE = (HEAD + LANES - 1) / LANES;
    SHARED(float, tile_q, QUERIES * HEAD);
    SHARED(float, tile_k, KEYS * K_STRIDE);
    SHARED(float, tile_v, KEYS * HEAD);
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
    const float *const q = qkv + (start + first) * stride + blockIdx.y * head;
    const float *const k = qkv + start * stride + (heads + blockIdx.y / (heads / kv_heads)) * head;
    const float *const v = k + kv_heads * head;
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
        copy_head<KEYS, HEAD, HEAD>(tile_v, v + at * stride, stride, length - at, head);
        __syncthreads();
#pragma unroll
        for (unsigned i = 0; i < QUERIES_OF_WARP; i++) {
            float score = 0.0f;
#pragma unroll
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
        __syncwarp();
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
                to[static_cast<size_t>(start + first + own + i) * heads * head + blockIdx.y * head + column] =
                    sums[i][d] * share;
            }
        }
    }
}

#define ATTENTION(name, size)                                                                                          \
    KERNEL(ATTENTION_THREADS, name)                                                                                    \
    (const float *qkv, const unsigned *cu_seqlens, float *to, unsigned tiles, unsigned heads, unsigned kv_heads,      \
     unsigned head, float scale, unsigned, const float *bias, unsigned positions, unsigned before, unsigned behind) {  \
        attention_tile<size>(qkv, cu_seqlens, to, tiles, heads, kv_heads, head, scale, bias, positions,               \
                             {before, behind});                                                                        \
    }
ATTENTION(attention_16, 16)
ATTENTION(attention_32, 32)
ATTENTION(attention_64, 64)
ATTENTION(attention_128, 128)
#undef ATTENTION
