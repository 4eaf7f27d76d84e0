//! Matrix fragments: which lane of a warp holds which element, and their products.
//!
//! Source: PTX ISA 8.8, chapter 9.7.14, "Matrix Fragments for mma.m16n8k8", "Matrix Fragments for mma.m16n8k16 with floating point
//! type", "mma" and "ldmatrix". There `groupID` is lane / 4 and `threadID_in_group` is lane % 4; `i` counts the elements that a
//! lane holds, two to a register of 16-bit elements, the first in the lower half.

/// Lanes of a warp.
pub const LANES: usize = 32;

/// Rows of `a` and of the sum; columns of `b` and of the sum.
pub const ROWS: usize = 16;
pub const COLUMNS: usize = 8;

/// Row and column of element `i` of `a`, which is 16 x 16 or 16 x 8.
pub fn a(inner: usize, lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    if inner == 8 {
        // a0, a1: row groupID; a2, a3: row groupID + 8.
        return (if i < 2 { group } else { group + 8 }, thread * 2 + (i & 1));
    }
    let row = if i < 2 || (4..6).contains(&i) { group } else { group + 8 };
    let column = thread * 2 + (i & 1) + if i < 4 { 0 } else { 8 };
    (row, column)
}

/// Row and column of element `i` of `b`, which is 16 x 8 or 8 x 8.
pub fn b(lane: usize, i: usize) -> (usize, usize) {
    let row = (lane % 4) * 2 + (i & 1) + if i < 2 { 0 } else { 8 };
    (row, lane >> 2)
}

/// Row and column of number `i` of the sum, which is 16 x 8.
pub fn sum(lane: usize, i: usize) -> (usize, usize) {
    let row = if i < 2 { lane >> 2 } else { (lane >> 2) + 8 };
    (row, (lane % 4) * 2 + (i & 1))
}

/// Row and column of half `i` of the register that a lane gets of an 8 x 8 matrix by ldmatrix.
pub fn loaded(transposed: bool, lane: usize, i: usize) -> (usize, usize) {
    let (row, column) = (lane / 4, (lane % 4) * 2 + i);
    if transposed { (column, row) } else { (row, column) }
}

/// `sum + a · b` of one warp. Each lane's elements are in the order of its registers. Products are exact and added in f64, and the
/// sum is rounded to f32 once. NVIDIA does not document the order and the intermediate precision of a tensor core's sum.
pub fn multiply(inner: usize, a_of: &[Vec<f32>], b_of: &[Vec<f32>], sum_of: &[[f32; 4]]) -> Vec<[f32; 4]> {
    let mut left = vec![[0.0_f64; ROWS]; inner];
    let mut right = vec![[0.0_f64; COLUMNS]; inner];
    for lane in 0..LANES {
        for (i, value) in a_of[lane].iter().enumerate() {
            let (row, column) = a(inner, lane, i);
            left[column][row] = f64::from(*value);
        }
        for (i, value) in b_of[lane].iter().enumerate() {
            let (row, column) = b(lane, i);
            right[row][column] = f64::from(*value);
        }
    }
    let mut product = [[0.0_f64; COLUMNS]; ROWS];
    for (left, right) in left.iter().zip(&right) {
        for (row, factor) in product.iter_mut().zip(left) {
            for (to, other) in row.iter_mut().zip(right) {
                *to += factor * other;
            }
        }
    }
    let one = |lane: usize| {
        std::array::from_fn(|i| {
            let (row, column) = sum(lane, i);
            (f64::from(sum_of[lane][i]) + product[row][column]) as f32
        })
    };
    (0..LANES).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element of a matrix is in one place of one lane.
    fn is_a_bijection(
        rows: usize,
        columns: usize,
        count: usize,
        map: impl Fn(usize, usize) -> (usize, usize),
    ) {
        let mut held = vec![vec![0; columns]; rows];
        for lane in 0..LANES {
            for i in 0..count {
                let (row, column) = map(lane, i);
                held[row][column] += 1;
            }
        }
        assert!(held.iter().flatten().all(|count| *count == 1), "{held:?}");
    }

    #[test]
    fn every_element_is_held_once() {
        for inner in [8, 16] {
            is_a_bijection(ROWS, inner, inner / 2, |lane, i| a(inner, lane, i));
            is_a_bijection(inner, COLUMNS, inner / 4, b);
        }
        is_a_bijection(ROWS, COLUMNS, 4, sum);
        for transposed in [false, true] {
            is_a_bijection(8, 8, 2, |lane, i| loaded(transposed, lane, i));
        }
    }

    /// The figures of the ISA, copied as drawn: with which lane and element a row begins, and where its columns continue. A second
    /// derivation, from the pictures instead of the formulas.
    #[test]
    fn fragments_are_those_of_the_figures() {
        // Row 0 of `a`: T0 {a0, a1}, T1 {a0, a1}, T2, T3, then T0 {a4, a5}, …; row 8 has {a2, a3} and {a6, a7}.
        for (row, first) in [(0, 0), (7, 28)] {
            for column in 0..16 {
                let (lane, i) = (first + column % 8 / 2, column % 2 + if column < 8 { 0 } else { 4 });
                assert_eq!(a(16, lane, i), (row, column));
                assert_eq!(a(16, lane, i + 2), (row + 8, column));
            }
        }
        // Column 0 of `b` from the top: T0 {b0, b1}, T1, T2, T3, then T0 {b2, b3}, …; column 7 begins with T28.
        for (column, first) in [(0, 0), (7, 28)] {
            for row in 0..16 {
                let (lane, i) = (first + row % 8 / 2, row % 2 + if row < 8 { 0 } else { 2 });
                assert_eq!(b(lane, i), (row, column));
            }
        }
        // Row 0 of the sum: T0 {c0, c1} … T3 {c0, c1}; row 8: T0 {c2, c3} …; row 15 ends with T31 {c2, c3}.
        assert_eq!([sum(0, 0), sum(3, 1), sum(0, 2), sum(31, 3)], [(0, 0), (0, 7), (8, 0), (15, 7)]);
        // m16n8k8 is the left half of m16n8k16.
        for lane in 0..LANES {
            for i in 0..4 {
                assert_eq!(a(8, lane, i), a(16, lane, i));
            }
        }
    }

    /// The kernels rely on this: the fragment of a sum, rounded in place, is half of the fragment `a` of the next product.
    #[test]
    fn two_sums_side_by_side_are_a_factor() {
        for lane in 0..LANES {
            for i in 0..4 {
                let (row, column) = sum(lane, i);
                assert_eq!(a(16, lane, i), (row, column));
                assert_eq!(a(16, lane, i + 4), (row, column + 8));
            }
        }
    }

    #[test]
    fn a_product_is_that_of_the_matrices() {
        for inner in [8, 16] {
            let left = |row: usize, k: usize| (row * 3 + k * 5) as f32 % 7.0 - 3.0;
            let right = |k: usize, column: usize| (k * 11 + column * 2) as f32 % 5.0 - 2.0;
            let of_a = |lane: usize| {
                (0..inner / 2).map(|i| a(inner, lane, i)).map(|(row, k)| left(row, k)).collect()
            };
            let of_b = |lane: usize| {
                (0..inner / 4).map(|i| b(lane, i)).map(|(k, column)| right(k, column)).collect()
            };
            let (a_of, b_of): (Vec<_>, Vec<_>) = (0..LANES).map(|lane| (of_a(lane), of_b(lane))).unzip();
            let sums = multiply(inner, &a_of, &b_of, &[[1.0; 4]; LANES]);
            for (lane, of_lane) in sums.iter().enumerate() {
                for (i, got) in of_lane.iter().enumerate() {
                    let (row, column) = sum(lane, i);
                    let want: f32 = (0..inner).map(|k| left(row, k) * right(k, column)).sum();
                    assert_eq!(*got, want + 1.0);
                }
            }
        }
    }
}
