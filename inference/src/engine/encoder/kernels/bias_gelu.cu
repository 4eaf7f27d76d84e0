// GELU of a matrix product that is not one of these kernels', its bias added before: x = gelu(x + bias), in place. A chunk
// per thread; rows are whole chunks.

constexpr unsigned BIAS_GELU_THREADS = 256;

KERNEL(BIAS_GELU_THREADS, bias_gelu)
(element *x, const float *bias, unsigned columns, unsigned chunks) {
    const unsigned chunk = blockIdx.x * BIAS_GELU_THREADS + threadIdx.x;
    if (chunk >= chunks) return;
    element *const at = x + static_cast<size_t>(chunk) * CHUNK;
    const float *const of_columns = bias + chunk % (columns / CHUNK) * CHUNK;
    Chunk values = read_chunk(at, CHUNK, true);
#pragma unroll
    for (unsigned i = 0; i < CHUNK; i += 4) {
        const Quad quad = read_quad(of_columns + i);
#pragma unroll
        for (unsigned j = 0; j < 4; j++) {
            narrow(gelu(widen(values.elements[i + j]) + quad.numbers[j]), values.elements[i + j]);
        }
    }
    write_chunk(at, values, CHUNK, true);
}
