// Attention in f32, for which there are no tensor cores: attention_lanes.cuh.

// Queries of a block.
constexpr unsigned QUERIES = 16;

#define ATTENTION(name, size)                                                                                          \
    KERNEL(LANES_THREADS, name)                                                                                        \
    (const element *qkv, const unsigned *cu_seqlens, element *to, unsigned tiles, unsigned heads, unsigned kv_heads,  \
     unsigned head, float scale, unsigned, const float *bias, unsigned positions, unsigned before, unsigned behind) {  \
        attention_of_lanes<size, QUERIES, false>(qkv, cu_seqlens, to, tiles, heads, kv_heads, head, scale, bias,       \
                                                 positions, {before, behind});                                         \
    }
ATTENTION(attention_16, 16)
ATTENTION(attention_32, 32)
ATTENTION(attention_64, 64)
ATTENTION(attention_128, 128)
#undef ATTENTION
