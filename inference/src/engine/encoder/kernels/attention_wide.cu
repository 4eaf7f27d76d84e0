// Attention for heads of 129 to 256 elements, of EmbeddingGemma: neither the registers nor the shared memory that attention.cu
// keeps a head in have room for them. attention_lanes.cuh has; it is slower.

// Queries of a block.
constexpr unsigned WIDE_QUERIES = 8;

KERNEL(LANES_THREADS, attention_256)
(const element *qkv, const unsigned *cu_seqlens, element *to, unsigned tiles, unsigned heads, unsigned kv_heads, unsigned head,
 float scale, unsigned, const float *bias, unsigned positions, unsigned before, unsigned behind) {
    attention_of_lanes<256, WIDE_QUERIES, true>(qkv, cu_seqlens, to, tiles, heads, kv_heads, head, scale, bias, positions,
                                                {before, behind});
}
