// Rotary positions (Su et al. 2021): element i of each head of queries and keys, and element i of its second half, are a point
// that turns by the token's place times a frequency of its own. Before that come the heads' norms, where the model has
// them: by the root mean square. A block takes ROTATE_TOKENS tokens of a sequence, a warp a head at a time.

constexpr unsigned ROTATE_THREADS = 128;
constexpr unsigned ROTATE_TOKENS = 16;

// Half of the longest head, per lane. As HEAD_MAX of engine/encoder/cuda/module.rs.
constexpr unsigned ROTATE_PAIRS = 256 / 2 / LANES;

// `table` has a row for each place: cosines of all pairs, then their sines. `tiles`: blocks per sequence. `stride`: from one
// token's row to the next one's. `norm_queries` and `norm_keys` are null without norms.
KERNEL(ROTATE_THREADS, rotate)
(element *qkv, const unsigned *cu_seqlens, const float *table, const float *norm_queries, const float *norm_keys, float eps,
 unsigned tiles, unsigned stride, unsigned heads, unsigned kv_heads, unsigned head) {
    const unsigned sequence = blockIdx.x / tiles;
    const unsigned start = cu_seqlens[sequence];
    const unsigned length = cu_seqlens[sequence + 1] - start;
    const unsigned first = blockIdx.x % tiles * ROTATE_TOKENS;
    if (first >= length) return;
    const unsigned tokens = length - first < ROTATE_TOKENS ? length - first : ROTATE_TOKENS;
    const unsigned lane = threadIdx.x % LANES;
    const unsigned all = heads + kv_heads, half = head / 2;
    for (unsigned i = threadIdx.x / LANES; i < tokens * all; i += ROTATE_THREADS / LANES) {
        const unsigned place = first + i / all, number = i % all;
        element *const x = qkv + static_cast<size_t>(start + place) * stride + number * head;
        const float *const turn = table + static_cast<size_t>(place) * head;
        const float *const weight = number < heads ? norm_queries : norm_keys;
        float firsts[ROTATE_PAIRS], seconds[ROTATE_PAIRS];
        float squares = 0.0f;
#pragma unroll
        for (unsigned j = 0; j < ROTATE_PAIRS; j++) {
            const unsigned at = j * LANES + lane;
            firsts[j] = at < half ? widen(x[at]) : 0.0f;
            seconds[j] = at < half ? widen(x[half + at]) : 0.0f;
            squares += firsts[j] * firsts[j] + seconds[j] * seconds[j];
        }
        if (weight != nullptr) {
            const float scale = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(head) + eps);
#pragma unroll
            for (unsigned j = 0; j < ROTATE_PAIRS; j++) {
                const unsigned at = j * LANES + lane;
                firsts[j] *= at < half ? scale * weight[at] : 0.0f;
                seconds[j] *= at < half ? scale * weight[half + at] : 0.0f;
            }
        }
#pragma unroll
        for (unsigned j = 0; j < ROTATE_PAIRS; j++) {
            const unsigned at = j * LANES + lane;
            if (at >= half) continue;
            const float cosine = turn[at], sine = turn[half + at];
            narrow(firsts[j] * cosine - seconds[j] * sine, x[at]);
            narrow(seconds[j] * cosine + firsts[j] * sine, x[half + at]);
        }
    }
}
