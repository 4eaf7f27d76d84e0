// Residual and norm in one: x = x + add, to = norm(x), in place. One block per token. `to` is `x`, where the norm stays, or
// `add`.

KERNEL(NORM_THREADS, add_norm)
(element *x, element *add, element *to, const float *weight, const float *bias, float eps, unsigned of_squares,
 unsigned hidden, unsigned aligned) {
    const size_t row = static_cast<size_t>(blockIdx.x) * hidden;
    norm_of_sum(to + row, x + row, x + row, add + row, {weight, bias, eps, of_squares}, hidden, aligned);
}
