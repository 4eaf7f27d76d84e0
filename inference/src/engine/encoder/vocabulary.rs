//! The head of a masked language model on the CPU: the scores that a text's tokens give those of the vocabulary.

use super::barrier::Broken;
use super::cpu::CpuOps;
use super::math::{load_at, store_at};
use super::plan::{Layout, Matrix};
use super::simd::{Kernel, Simd};

/// Columns that a thread's share begins at a multiple of: a cache line of f32.
const GRAIN_COLUMNS: usize = 16;

impl CpuOps<'_> {
    /// For each sequence the largest score that any of its tokens gives each token of the vocabulary, and zero where none is above
    /// zero. All special tokens count, as in sentence-transformers. The layers have left their result in `at.x`: the families that
    /// have such a head have their norms behind the blocks.
    ///
    /// The scores of all tokens would take many times the memory of the layers. So one chunk of the vocabulary is computed at a
    /// time, as wide as fits into memory that the layers no longer need.
    pub fn pool_vocabulary(&mut self, at: &Layout) -> Result<(), Broken> {
        let Some(head) = self.model.weights.mlm() else { return Ok(()) };
        self.product(head.dense, at.x, at.y, true)?;
        self.norm(head.norm, at.y)?;
        let (units, vocabulary) = (self.model.units, head.words.columns);
        // At least one: `plan` has room for a panel of any unit.
        let panels = (at.scores.columns / units.panel_columns()).max(1);
        let chunk = panels * units.panel_columns();
        for first in (0..vocabulary).step_by(chunk) {
            let columns = chunk.min(vocabulary - first);
            let scores = Matrix { columns, ..at.scores };
            self.product(head.words.part(units, first, columns), at.y, scores, false)?;
            self.keep_largest(scores, first, vocabulary)?;
        }
        Ok(())
    }

    /// Scores of a chunk of the vocabulary, which begins at `first`, into the sequences' vectors.
    fn keep_largest(&self, scores: Matrix, first: usize, vocabulary: usize) -> Result<(), Broken> {
        let columns = self.share(scores.columns, GRAIN_COLUMNS);
        for (sequence, (start, tokens)) in self.sequences().enumerate() {
            let vector = self.vectors.wrapping_add((self.shard.first + sequence) * vocabulary);
            self.run(&KeepLargest {
                scores: self.at(scores, start).wrapping_add(columns.start),
                stride: scores.columns,
                tokens,
                columns: columns.len(),
                to: vector.wrapping_add(first + columns.start),
            });
        }
        self.thread.wait()
    }
}

/// The largest of each column's scores, or zero.
struct KeepLargest {
    /// A row for each token, `stride` elements apart.
    scores: *const f32,
    stride: usize,
    tokens: usize,
    columns: usize,
    to: *mut f32,
}

impl Kernel for KeepLargest {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        // SAFETY: by this function's contract: `tokens` rows of `columns` elements, and room for one row in `to`.
        unsafe {
            let zero = S::splat(0.0);
            for at in (0..self.columns).step_by(S::LANES) {
                store_at::<S>(self.to, at, self.columns, zero);
            }
            for row in 0..self.tokens {
                let scores = self.scores.add(row * self.stride);
                for at in (0..self.columns).step_by(S::LANES) {
                    let score = load_at::<S>(scores, at, self.columns);
                    let largest = S::max(score, load_at::<S>(self.to, at, self.columns));
                    // A score that is not finite, times zero, is NaN. Added to the result it stays and is found at the end; `max`
                    // alone would hide it.
                    store_at::<S>(self.to, at, self.columns, S::mul_add(score, zero, largest));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::Level;
    use super::*;

    fn largest(level: Level, rows: &[Vec<f32>]) -> Vec<f32> {
        let columns = rows.first().map_or(5, Vec::len);
        let scores = rows.concat();
        let mut to = vec![7.0; columns + 1];
        let kernel = KeepLargest {
            scores: scores.as_ptr(),
            stride: columns,
            tokens: rows.len(),
            columns,
            to: to.as_mut_ptr(),
        };
        // SAFETY: there are as many rows as it says, and one element more than a row in `to`.
        unsafe { level.run(&kernel) };
        assert_eq!(to.pop(), Some(7.0), "wrote past the row");
        to
    }

    #[test]
    fn the_largest_score_is_kept_on_every_unit() {
        for level in Level::available() {
            for columns in [1, 15, 16, 17, 40] {
                let row = |seed: usize| -> Vec<f32> {
                    (0..columns).map(|at| ((at * 7 + seed * 5) % 11) as f32 - 6.0).collect()
                };
                let rows: Vec<Vec<f32>> = (0..4).map(row).collect();
                let expected: Vec<f32> =
                    (0..columns).map(|at| rows.iter().map(|row| row[at]).fold(0.0, f32::max)).collect();
                assert_eq!(largest(level, &rows), expected, "{level:?}");
            }
            assert_eq!(largest(level, &[]), [0.0; 5]);
        }
    }

    #[test]
    fn a_score_that_is_not_finite_makes_its_element_nan() {
        for level in Level::available() {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for place in 0..3 {
                    let mut rows = vec![vec![1.0, -1.0, 2.0]; 3];
                    rows[place][1] = bad;
                    let found = largest(level, &rows);
                    assert!(found[1].is_nan() && found[0] == 1.0 && found[2] == 2.0, "{level:?}: {found:?}");
                }
            }
        }
    }
}
