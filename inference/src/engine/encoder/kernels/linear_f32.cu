// A linear map in f32 on the ordinary multipliers: as linear.cu, with all products and sums in f32. Tensor cores would
// round the factors to 11 bits (TF32); three products of split factors would come near f32, but only since sm_80, and
// f32 is here to be compared with, not to be fast.
//
// A block of 256 threads makes a tile of 64 x 64, each thread 4 x 4 of it (Volkov and Demmel 2008).

constexpr unsigned TILE = 64;
constexpr unsigned STEP = 16;
constexpr unsigned LINEAR_THREADS = 256;
// Elements from one row of a tile to the next: an odd number of chunks spreads the columns that are filled in over
// the banks.
constexpr unsigned TILE_STRIDE = TILE + CHUNK;

// Copies STEP columns of 64 rows, transposed: tile[k * TILE_STRIDE + row].
__device__ inline void copy_transposed(float *tile, const float *from, unsigned rows, unsigned inner, unsigned at,
                                       bool aligned) {
    const unsigned row = threadIdx.x / (STEP / CHUNK), chunk = threadIdx.x % (STEP / CHUNK);
    const unsigned column = at + chunk * CHUNK;
    const unsigned valid = row < rows ? inside(column, inner) : 0;
    const Chunk read = read_chunk(from + static_cast<size_t>(row) * inner + column, valid, aligned);
#pragma unroll
    for (unsigned j = 0; j < CHUNK; j++) {
        tile[(chunk * CHUNK + j) * TILE_STRIDE + row] = read.elements[j];
    }
}

template <bool GELU>
__device__ inline void linear_tile(const float *from, const float *weights, const float *bias, float *to,
                                   unsigned rows, unsigned inner, unsigned columns, bool aligned) {
    static_assert(TILE * STEP == LINEAR_THREADS * CHUNK, "each thread copies one chunk of each tile");
    SHARED(float, tile_a, STEP * TILE_STRIDE);
    SHARED(float, tile_b, STEP * TILE_STRIDE);
    const unsigned tiles_across = (columns + TILE - 1) / TILE;
    const unsigned first_row = blockIdx.x / tiles_across * TILE;
    const unsigned first_column = blockIdx.x % tiles_across * TILE;
    const unsigned rows_left = rows - first_row, columns_left = columns - first_column;
    const unsigned row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    float sums[4][4] = {};
    for (unsigned at = 0; at < inner; at += STEP) {
        copy_transposed(tile_a, from + static_cast<size_t>(first_row) * inner, rows_left, inner, at, aligned);
        copy_transposed(tile_b, weights + static_cast<size_t>(first_column) * inner, columns_left, inner, at, aligned);
        __syncthreads();
#pragma unroll
        for (unsigned k = 0; k < STEP; k++) {
            Chunk a, b;
            a.bits = *reinterpret_cast<const uint4 *>(&tile_a[k * TILE_STRIDE + row]);
            b.bits = *reinterpret_cast<const uint4 *>(&tile_b[k * TILE_STRIDE + column]);
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
#pragma unroll
                for (unsigned j = 0; j < 4; j++) {
                    sums[i][j] = fmaf(a.elements[i], b.elements[j], sums[i][j]);
                }
            }
        }
        __syncthreads();
    }
    const unsigned valid = inside(column, columns_left);
    for (unsigned i = 0; i < 4 && row + i < rows_left; i++) {
        Chunk out;
#pragma unroll
        for (unsigned j = 0; j < CHUNK; j++) {
            const float sum = sums[i][j] + (j < valid ? bias[first_column + column + j] : 0.0f);
            out.elements[j] = GELU ? gelu(sum) : sum;
        }
        write_chunk(to + static_cast<size_t>(first_row + row + i) * columns + first_column + column, out, valid,
                    aligned);
    }
}

#define LINEAR(name, gelu)                                                                                             \
    KERNEL(LINEAR_THREADS, name)                                                                                       \
    (const float *from, const float *weights, const float *bias, float *to, unsigned rows, unsigned inner,            \
     unsigned columns, unsigned aligned) {                                                                             \
        linear_tile<gelu>(from, weights, bias, to, rows, inner, columns, aligned);                                    \
    }
LINEAR(linear_small, false)
LINEAR(linear_small_gelu, true)
#undef LINEAR
