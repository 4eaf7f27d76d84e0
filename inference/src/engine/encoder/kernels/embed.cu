// Embeddings of packed tokens: norm(word + position). `rows` has for each token the row of the position table that it takes;
// the embeddings of token types are in that table. One block per token.

KERNEL(NORM_THREADS, embed)
(const unsigned *ids, const unsigned *rows, const element *words, const element *positions, const float *weight,
 const float *bias, float eps, unsigned hidden, unsigned aligned, element *to) {
    const unsigned token = blockIdx.x;
    norm_of_sum(to + static_cast<size_t>(token) * hidden, words + static_cast<size_t>(ids[token]) * hidden,
                positions + static_cast<size_t>(rows[token]) * hidden, weight, bias, eps, hidden, aligned);
}
