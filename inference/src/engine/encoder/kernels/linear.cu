// A linear map on tensor cores: to = from · weightsᵀ + bias, then GELU if asked for. `from` is rows x inner, `weights`
// columns x inner as PyTorch keeps them, so both are read along `inner`, the order in which tensor cores take them.
//
// A block makes one tile of `to`. It goes along `inner` in steps of STEP elements; while it multiplies the tiles of
// one step, those of the next ones are being copied into the other stages. The result is rounded once, put together
// in shared memory and written in whole chunks.

// Elements of `inner` per step, and chunks of that.
constexpr unsigned STEP = 32;
constexpr unsigned STEP_ROW = STEP / CHUNK;

template <unsigned TILE_ROWS, unsigned TILE_COLUMNS, unsigned WARPS_DOWN, unsigned WARPS_ACROSS, unsigned STAGES,
          bool GELU>
__device__ inline void linear_tile(const element *from, const element *weights, const float *bias, element *to,
                                   unsigned rows, unsigned inner, unsigned columns, bool aligned) {
    constexpr unsigned THREADS = WARPS_DOWN * WARPS_ACROSS * LANES;
    constexpr unsigned WARP_ROWS = TILE_ROWS / WARPS_DOWN, WARP_COLUMNS = TILE_COLUMNS / WARPS_ACROSS;
    constexpr unsigned A_CHUNKS = TILE_ROWS * STEP_ROW;
    constexpr unsigned STAGE_CHUNKS = (TILE_ROWS + TILE_COLUMNS) * STEP_ROW;
    constexpr unsigned OUT_ROW = TILE_COLUMNS / CHUNK;
    static_assert(TILE_ROWS * OUT_ROW <= STAGES * STAGE_CHUNKS, "the result has room where the stages were");
    SHARED(Chunk, stages, STAGES * STAGE_CHUNKS);

    const unsigned tiles_across = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const unsigned first_row = blockIdx.x / tiles_across * TILE_ROWS;
    const unsigned first_column = blockIdx.x % tiles_across * TILE_COLUMNS;
    const unsigned rows_left = rows - first_row, columns_left = columns - first_column;
    const element *const a = from + static_cast<size_t>(first_row) * inner;
    const element *const b = weights + static_cast<size_t>(first_column) * inner;
    const unsigned warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const unsigned warp_row = warp / WARPS_ACROSS * WARP_ROWS, warp_column = warp % WARPS_ACROSS * WARP_COLUMNS;
    const unsigned steps = (inner + STEP - 1) / STEP;

    const auto copy_step = [&](unsigned step) {
        if (step < steps) {
            Chunk *const stage = &stages[step % STAGES * STAGE_CHUNKS];
            copy_tile<TILE_ROWS, STEP_ROW, THREADS>(stage, a, inner, rows_left, step * STEP, inner, aligned);
            copy_tile<TILE_COLUMNS, STEP_ROW, THREADS>(stage + A_CHUNKS, b, inner, columns_left, step * STEP, inner,
                                                       aligned);
        }
        // An empty group too, so that the number of groups tells the step.
        copy_group();
    };

    float sums[WARP_ROWS / 16][WARP_COLUMNS / 8][4] = {};
#pragma unroll 1
    for (unsigned step = 0; step < STAGES - 1; step++) {
        copy_step(step);
    }
    for (unsigned step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        // Now all threads' copies of this step are there, and none reads any more what the next copies overwrite.
        __syncthreads();
        copy_step(step + STAGES - 1);
        const Chunk *const tile_a = &stages[step % STAGES * STAGE_CHUNKS];
        const Chunk *const tile_b = tile_a + A_CHUNKS;
#pragma unroll
        for (unsigned chunk = 0; chunk < STEP_ROW; chunk += 2) {
            unsigned fragments_a[WARP_ROWS / 16][4];
#pragma unroll
            for (unsigned i = 0; i < WARP_ROWS / 16; i++) {
                load_a<STEP_ROW>(fragments_a[i], tile_a + warp_row * STEP_ROW, i * 16, chunk);
            }
#pragma unroll
            for (unsigned j = 0; j < WARP_COLUMNS / 16; j++) {
                unsigned fragments_b[4];
                load_b_of_rows<STEP_ROW>(fragments_b, tile_b + warp_column * STEP_ROW, j * 16, chunk);
#pragma unroll
                for (unsigned i = 0; i < WARP_ROWS / 16; i++) {
                    multiply_add(sums[i][2 * j], fragments_a[i], fragments_b[0], fragments_b[1], element());
                    multiply_add(sums[i][2 * j + 1], fragments_a[i], fragments_b[2], fragments_b[3], element());
                }
            }
        }
    }

    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (unsigned j = 0; j < WARP_COLUMNS / 8; j++) {
        const unsigned column = warp_column + j * 8 + lane % 4 * 2;
        const float bias_first = column < columns_left ? bias[first_column + column] : 0.0f;
        const float bias_second = column + 1 < columns_left ? bias[first_column + column + 1] : 0.0f;
#pragma unroll
        for (unsigned i = 0; i < WARP_ROWS / 16; i++) {
#pragma unroll
            for (unsigned half = 0; half < 2; half++) {
                float first = sums[i][j][2 * half] + bias_first;
                float second = sums[i][j][2 * half + 1] + bias_second;
                if (GELU) {
                    first = gelu(first);
                    second = gelu(second);
                }
                put_pair<OUT_ROW>(stages, warp_row + i * 16 + half * 8 + lane / 4, column, first, second);
            }
        }
    }
    __syncthreads();
    element *const out = to + static_cast<size_t>(first_row) * columns;
    for (unsigned i = threadIdx.x; i < TILE_ROWS * OUT_ROW; i += THREADS) {
        const unsigned row = i / OUT_ROW, chunk = i % OUT_ROW;
        const unsigned at = first_column + chunk * CHUNK;
        if (row < rows_left) {
            write_chunk(out + static_cast<size_t>(row) * columns + at, stages[swizzled<OUT_ROW>(row, chunk)],
                        inside(at, columns), aligned);
        }
    }
}

// Tiles for many tokens, and smaller ones for so few that large tiles would leave multiprocessors without work.
// Registers and shared memory of both let two blocks or more run on a multiprocessor at a time. Where copies are done at
// once, as on Turing, more than two stages would take memory for nothing.
constexpr unsigned LARGE_STAGES = ASYNCHRONOUS ? 3 : 2, SMALL_STAGES = ASYNCHRONOUS ? 4 : 2;
#define LINEAR(name, threads, rows, columns, down, across, stages, gelu)                                              \
    KERNEL(threads, name)                                                                                              \
    (const element *from, const element *weights, const float *bias, element *to, unsigned rows_, unsigned inner,     \
     unsigned columns_, unsigned aligned) {                                                                            \
        linear_tile<rows, columns, down, across, stages, gelu>(from, weights, bias, to, rows_, inner, columns_,       \
                                                               aligned);                                              \
    }
LINEAR(linear_large, 256, 128, 128, 2, 4, LARGE_STAGES, false)
LINEAR(linear_large_gelu, 256, 128, 128, 2, 4, LARGE_STAGES, true)
LINEAR(linear_small, 128, 64, 64, 2, 2, SMALL_STAGES, false)
LINEAR(linear_small_gelu, 128, 64, 64, 2, 2, SMALL_STAGES, true)
#undef LINEAR
