// Embeddings of packed tokens: norm(word + position). Token types are in the positions: a lone text has only type 0.
// One block per token.

// The sequence that a token belongs to: the last one that starts at or before it. Empty ones that start there too come
// before it, since their own end is no later. Binary search, because the sequences lie in order.
__device__ inline unsigned sequence_of(unsigned token, const unsigned *cu_seqlens, unsigned sequences) {
    unsigned low = 0, high = sequences;
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        if (cu_seqlens[middle] <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

KERNEL(NORM_THREADS, embed)
(const unsigned *ids, const unsigned *cu_seqlens, unsigned sequences, const element *words, const element *positions,
 const float *weight, const float *bias, float eps, unsigned hidden, unsigned aligned, element *to) {
    const unsigned token = blockIdx.x;
    const unsigned position = token - cu_seqlens[sequence_of(token, cu_seqlens, sequences)];
    norm_of_sum(to + static_cast<size_t>(token) * hidden, words + static_cast<size_t>(ids[token]) * hidden,
                positions + static_cast<size_t>(position) * hidden, weight, bias, eps, hidden, aligned);
}
