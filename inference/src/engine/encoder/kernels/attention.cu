// Attention within each sequence, on tensor cores, without a matrix of scores in memory: FlashAttention-2 (Dao 2023)
// with the online softmax of Milakov and Gimelshein (2018), forward only.
//
// A block takes QUERIES tokens of one head of one sequence, a warp 16 of them. It goes over the sequence's keys and
// values KEYS at a time; while one pair of tiles is used, the next is copied. Of each query only the largest score so
// far, the sum of exponentials and the weighted sum of values are kept; when a larger score comes, both sums shrink
// by the same factor. Tiles that all queries see all of, which is most of a long sequence, have a loop of their own
// without masks (`plain`). Scores become the first factor of the second product in the registers where they are: the
// fragment of a sum has the layout of half a fragment `a`.

constexpr unsigned QUERIES = 64;
constexpr unsigned ATTENTION_THREADS = 128;

// `HEAD`: elements of a head, rounded up to a power of two; the ones beyond `head` are zeros. `KEYS`: of a tile, so many
// that two of them and the queries fit. `heads` of queries share `kv_heads` of keys and values. `tiles`: blocks per
// sequence, as many as the longest needs. `bias`, where it is not null, has for each head a row of 2 `positions` - 1 numbers:
// what is added to the scores of keys, the middle one for a query's own token, those behind it for keys behind it.
template <unsigned HEAD, unsigned KEYS>
__device__ inline void attention_tile(const element *qkv, const unsigned *cu_seqlens, element *to, unsigned tiles,
                                      unsigned heads, unsigned kv_heads, unsigned head, float scale, bool aligned,
                                      const float *bias, unsigned positions, const Sees &sees) {
    constexpr unsigned ROW = HEAD / CHUNK;
    constexpr unsigned TILE = KEYS * ROW;
    SHARED(Chunk, tile_q, QUERIES * ROW);
    SHARED(Chunk, tiles_k, 2 * TILE);
    SHARED(Chunk, tiles_v, 2 * TILE);

    const unsigned sequence = blockIdx.x / tiles;
    const unsigned start = cu_seqlens[sequence];
    const unsigned length = cu_seqlens[sequence + 1] - start;
    const unsigned first = blockIdx.x % tiles * QUERIES;
    if (first >= length) return;
    const unsigned queries = length - first < QUERIES ? length - first : QUERIES;
    const unsigned warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const size_t stride = (heads + 2 * kv_heads) * static_cast<size_t>(head);
    const element *const q = qkv + (start + first) * stride + blockIdx.y * head;
    const element *const k = qkv + start * stride + (heads + blockIdx.y / (heads / kv_heads)) * head;
    // From a key to its value.
    const size_t to_values = kv_heads * head;
    // Tiles that some of the queries see a key of.
    const unsigned begin = sees.begin(first) / KEYS;
    const unsigned steps = (sees.end(first + queries - 1, length) + KEYS - 1) / KEYS;

    // The keys that are copied next, how many there are, and where: the first or the second tile.
    const element *next = k + begin * KEYS * stride;
    unsigned next_keys = length - begin * KEYS, next_tile = begin % 2 * TILE;
    const auto copy_next = [&](bool aligned) {
        copy_tile<KEYS, ROW, ATTENTION_THREADS>(tiles_k + next_tile, next, stride, next_keys, 0, head, aligned);
        copy_tile<KEYS, ROW, ATTENTION_THREADS>(tiles_v + next_tile, next + to_values, stride, next_keys, 0, head,
                                                aligned);
        copy_group();
        next += KEYS * stride;
        next_keys -= KEYS;
        next_tile ^= TILE;
    };
    copy_tile<QUERIES, ROW, ATTENTION_THREADS>(tile_q, q, stride, queries, 0, head, aligned);
    copy_next(aligned);
    copy_wait<0>();
    __syncthreads();
    unsigned fragments_q[HEAD / 16][4];
#pragma unroll
    for (unsigned i = 0; i < HEAD / 16; i++) {
        load_a<ROW>(fragments_q[i], tile_q + warp * 16 * ROW, 0, 2 * i);
    }

    // Adds biases to a tile's scores, and hides keys that a query does not see, or that are none.
    const auto adjust = [&](float (&scores)[KEYS / 8][4], unsigned step) {
        const unsigned keys = length - step * KEYS;
        if (bias != nullptr) {
#pragma unroll
            for (unsigned half = 0; half < 2; half++) {
                const unsigned query = warp * 16 + half * 8 + lane / 4;
                const float *const row = bias + blockIdx.y * (2 * static_cast<size_t>(positions) - 1) + positions - 1 +
                                         step * KEYS - (query < queries ? first + query : 0);
#pragma unroll
                for (unsigned j = 0; j < KEYS / 8; j++) {
#pragma unroll
                    for (unsigned i = 0; i < 2; i++) {
                        const unsigned key = j * 8 + lane % 4 * 2 + i;
                        if (key < keys) scores[j][2 * half + i] += row[key];
                    }
                }
            }
        }
        if (sees.only_some()) {
#pragma unroll
            for (unsigned half = 0; half < 2; half++) {
                const unsigned query = first + warp * 16 + half * 8 + lane / 4;
#pragma unroll
                for (unsigned j = 0; j < KEYS / 8; j++) {
#pragma unroll
                    for (unsigned i = 0; i < 2; i++) {
                        const unsigned key = step * KEYS + j * 8 + lane % 4 * 2 + i;
                        if (!sees.key(query, key)) scores[j][2 * half + i] = minus_infinity();
                    }
                }
            }
        }
        if (keys < KEYS) {
#pragma unroll
            for (unsigned j = 0; j < KEYS / 8; j++) {
#pragma unroll
                for (unsigned i = 0; i < 4; i++) {
                    if (j * 8 + lane % 4 * 2 + i % 2 >= keys) scores[j][i] = minus_infinity();
                }
            }
        }
    };

    // Index 0 is the query of row g, 1 that of row g + 8. The largest scores are not scaled.
    float largest[2] = {minus_infinity(), minus_infinity()};
    float total[2] = {};
    float sums[HEAD / 8][4] = {};
    // `plain`, a constant of each call: rows are aligned, and the tile's scores need no adjusting.
    const auto attend = [&](unsigned step, bool plain) {
        copy_wait<0>();
        // All copies of this step are there, and none reads any more the tiles of the step before.
        __syncthreads();
        if (step + 1 < steps) copy_next(plain || aligned);
        const Chunk *const tile_k = &tiles_k[step % 2 * TILE];
        const Chunk *const tile_v = &tiles_v[step % 2 * TILE];
        float scores[KEYS / 8][4] = {};
#pragma unroll
        for (unsigned i = 0; i < HEAD / 16; i++) {
#pragma unroll
            for (unsigned j = 0; j < KEYS / 16; j++) {
                unsigned fragments_k[4];
                load_b_of_rows<ROW>(fragments_k, tile_k, j * 16, 2 * i);
                multiply_add(scores[2 * j], fragments_q[i], fragments_k[0], fragments_k[1], element());
                multiply_add(scores[2 * j + 1], fragments_q[i], fragments_k[2], fragments_k[3], element());
            }
        }
        if (!plain) adjust(scores, step);
        float shrink[2];
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            float most = largest[half];
#pragma unroll
            for (unsigned j = 0; j < KEYS / 8; j++) {
                most = fmaxf(most, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
            }
            // The four lanes of a row.
            most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
            // As long as a query has seen no key, there is no largest score to subtract.
            const float base = !plain && most == minus_infinity() ? 0.0f : most * scale;
            shrink[half] = power_of_two(fmaf(largest[half], scale, -base));
            largest[half] = most;
            float part = 0.0f;
#pragma unroll
            for (unsigned j = 0; j < KEYS / 8; j++) {
#pragma unroll
                for (unsigned i = 0; i < 2; i++) {
                    float &score = scores[j][2 * half + i];
                    // `scale` has the factor log2 e, so that the exponential is one of 2.
                    score = power_of_two(fmaf(score, scale, -base));
                    part += score;
                }
            }
            // Of this lane's keys only; the lanes are joined at the end.
            total[half] = total[half] * shrink[half] + part;
        }
#pragma unroll
        for (unsigned i = 0; i < HEAD / 8; i++) {
            sums[i][0] *= shrink[0];
            sums[i][1] *= shrink[0];
            sums[i][2] *= shrink[1];
            sums[i][3] *= shrink[1];
        }
#pragma unroll
        for (unsigned j = 0; j < KEYS / 16; j++) {
            const unsigned weights[4] = {
                pack(scores[2 * j][0], scores[2 * j][1], element()),
                pack(scores[2 * j][2], scores[2 * j][3], element()),
                pack(scores[2 * j + 1][0], scores[2 * j + 1][1], element()),
                pack(scores[2 * j + 1][2], scores[2 * j + 1][3], element()),
            };
#pragma unroll
            for (unsigned i = 0; i < HEAD / 16; i++) {
                unsigned fragments_v[4];
                load_b_of_columns<ROW>(fragments_v, tile_v, j * 16, 2 * i);
                multiply_add(sums[2 * i], weights, fragments_v[0], fragments_v[1], element());
                multiply_add(sums[2 * i + 1], weights, fragments_v[2], fragments_v[3], element());
            }
        }
    };
    // The tiles whose keys all of the queries see.
    const unsigned plain_begin = (sees.begin(first + queries - 1) + KEYS - 1) / KEYS;
    const unsigned plain_end = aligned && bias == nullptr ? sees.end(first, length) / KEYS : 0;
    for (unsigned step = begin; step < steps; step++) {
        for (; plain_begin <= step && step < plain_end; step++) attend(step, true);
        if (step < steps) attend(step, false);
    }

    // The results go where the warp's queries were: it took them into registers before the barriers of the loop.
#pragma unroll
    for (unsigned half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(0xffffffff, total[half], 1);
        total[half] += __shfl_xor_sync(0xffffffff, total[half], 2);
        const float share = 1.0f / total[half];
#pragma unroll
        for (unsigned i = 0; i < HEAD / 8; i++) {
            put_pair<ROW>(tile_q, warp * 16 + half * 8 + lane / 4, i * 8 + lane % 4 * 2, sums[i][2 * half] * share,
                          sums[i][2 * half + 1] * share);
        }
    }
    __syncwarp();
    const size_t to_stride = heads * static_cast<size_t>(head);
    element *const out = to + (start + first) * to_stride + blockIdx.y * head;
    for (unsigned i = lane; i < 16 * ROW; i += LANES) {
        const unsigned row = warp * 16 + i / ROW, chunk = i % ROW;
        if (row < queries) {
            write_chunk(out + row * to_stride + chunk * CHUNK, tile_q[swizzled<ROW>(row, chunk)],
                        inside(chunk * CHUNK, head), aligned);
        }
    }
}

#define ATTENTION(name, size, keys)                                                                                    \
    KERNEL(ATTENTION_THREADS, name)                                                                                    \
    (const element *qkv, const unsigned *cu_seqlens, element *to, unsigned tiles, unsigned heads, unsigned kv_heads,  \
     unsigned head, float scale, unsigned aligned, const float *bias, unsigned positions, unsigned before,            \
     unsigned behind) {                                                                                                \
        attention_tile<size, keys>(qkv, cu_seqlens, to, tiles, heads, kv_heads, head, scale, aligned, bias, positions, \
                                   {before, behind});                                                                  \
    }
ATTENTION(attention_16, 16, 64)
ATTENTION(attention_32, 32, 64)
ATTENTION(attention_64, 64, 64)
ATTENTION(attention_128, 128, 32)
#undef ATTENTION
