// Residual and layer norm in one: x = norm(x + add), in place. One block per token.

KERNEL(NORM_THREADS, add_norm)
(element *x, const element *add, const float *weight, const float *bias, float eps, unsigned hidden,
 unsigned aligned) {
    const size_t row = static_cast<size_t>(blockIdx.x) * hidden;
    norm_of_sum(x + row, x + row, add + row, weight, bias, eps, hidden, aligned);
}
