// Tiles of 16-bit elements in shared memory, and the fragments that tensor cores take from them.
//
// A row of a tile is a power of two of chunks (16 bytes). Within its row a chunk is stored at an exclusive or of its
// number with the row's, so that the eight rows that ldmatrix reads at a time lie in eight different groups of four
// banks, whatever the width of a row, and so do the chunks of one row when they are filled in.

template <unsigned ROW> __device__ inline unsigned swizzled(unsigned row, unsigned chunk) {
    static_assert(ROW == 2 || ROW == 4 || ROW >= 8, "rows of 32 bytes or more");
    constexpr unsigned ROWS_PER_128_BYTES = ROW < 8 ? 8 / ROW : 1;
    constexpr unsigned MASK = ROW < 8 ? ROW - 1 : 7;
    return row * ROW + (chunk ^ ((row / ROWS_PER_128_BYTES) & MASK));
}

// Copies `ROWS` rows of a matrix into a tile, from column `column` on; zeros where `rows` or `columns` end. By all
// `THREADS` of the block; asynchronous where `aligned`: rows are whole chunks and begin at multiples of them.
template <unsigned ROWS, unsigned ROW, unsigned THREADS>
__device__ inline void copy_tile(Chunk *tile, const element *from, size_t stride, unsigned rows, unsigned column,
                                 unsigned columns, bool aligned) {
    if (aligned) {
        // A thread copies the same chunk of several rows.
        constexpr unsigned APART = THREADS / ROW;
        static_assert(ROWS % APART == 0 && APART % 8 == 0, "as many chunks for each thread, swizzled alike");
        const unsigned row = threadIdx.x / ROW, chunk = threadIdx.x % ROW;
        const unsigned at = column + chunk * CHUNK;
        const unsigned rows_there = at < columns ? rows : 0;
        Chunk *const to = tile + swizzled<ROW>(row, chunk);
        from += row * stride + at;
#pragma unroll
        for (unsigned i = 0; i < ROWS / APART; i++) {
            copy_begin(to + i * APART * ROW, from + i * APART * stride, row + i * APART < rows_there);
        }
    } else {
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < ROWS * ROW; i += THREADS) {
            const unsigned row = i / ROW, chunk = i % ROW;
            const unsigned at = column + chunk * CHUNK;
            const unsigned valid = row < rows ? inside(at, columns) : 0;
            const element *const elements = from + row * stride + at;
            Chunk &to = tile[swizzled<ROW>(row, chunk)];
#pragma unroll 1
            for (unsigned j = 0; j < CHUNK; j++) {
                to.elements[j] = j < valid ? elements[j] : element();
            }
        }
    }
}

// The 16x16 matrix `a` of `multiply_add`: rows from `row` on, a multiple of 8; columns from chunk `chunk` on. A tile is
// swizzled alike every eight rows; so what depends on the lane is apart from `row`, which is then part of the instruction.
template <unsigned ROW>
__device__ inline void load_a(unsigned (&a)[4], const Chunk *tile, unsigned row, unsigned chunk) {
    const unsigned lane = threadIdx.x % LANES;
    load_matrices(a, tile + swizzled<ROW>(lane % 16, chunk + lane / 16) + row * ROW);
}

// Two 16x8 matrices `b` of `multiply_add`, each column of which is a row of the tile: columns from tile row `row` on in
// b[0] and b[1], the eight after it in b[2] and b[3].
template <unsigned ROW>
__device__ inline void load_b_of_rows(unsigned (&b)[4], const Chunk *tile, unsigned row, unsigned chunk) {
    const unsigned lane = threadIdx.x % LANES;
    load_matrices(b, tile + swizzled<ROW>(lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2) + row * ROW);
}

// The same where the tile has `b` as it is: 16 rows from `row` on, eight columns of chunk `chunk` in b[0] and b[1], those
// of the next chunk in b[2] and b[3].
template <unsigned ROW>
__device__ inline void load_b_of_columns(unsigned (&b)[4], const Chunk *tile, unsigned row, unsigned chunk) {
    const unsigned lane = threadIdx.x % LANES;
    load_matrices_transposed(b, tile + swizzled<ROW>(lane % 16, chunk + lane / 16) + row * ROW);
}

// Puts two neighbouring elements of a row into a tile.
template <unsigned ROW>
__device__ inline void put_pair(Chunk *tile, unsigned row, unsigned column, float first, float second) {
    Chunk *const chunk = &tile[swizzled<ROW>(row, column / CHUNK)];
    reinterpret_cast<unsigned *>(chunk)[column % CHUNK / 2] = pack(first, second, element());
}
