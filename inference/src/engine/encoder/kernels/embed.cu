// Embeddings of packed tokens: sum = word + position, to = norm(sum). `rows` has for each token the row of the position table
// that it takes; the embeddings of token types are in that table. Where `sum` is `to`, the norm stays. One block per token.

KERNEL(NORM_THREADS, embed)
(const unsigned *ids, const unsigned *rows, const element *words, const element *positions, const float *weight,
 const float *bias, float eps, unsigned of_squares, unsigned hidden, unsigned aligned, element *sum, element *to) {
    const unsigned token = blockIdx.x;
    const size_t row = static_cast<size_t>(token) * hidden;
    norm_of_sum(to + row, sum + row, words + static_cast<size_t>(ids[token]) * hidden,
                positions + static_cast<size_t>(rows[token]) * hidden, {weight, bias, eps, of_squares}, hidden, aligned);
}
