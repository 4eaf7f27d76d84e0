//! Rounds numbers of rows up to those that matrix products are planned for. A pass may have any number of tokens, and asking cuBLASLt for
//! an algorithm takes longer than a small product.

/// Smaller numbers are planned for as this one; all buckets are multiples of it.
pub(super) const ROWS_MIN: usize = 64;

/// Buckets between a power of two and the next. With one bucket the algorithm for twice as many rows could leave almost half of the
/// device idle in the last round of tiles.
const STEPS: usize = 4;

/// The number that so many rows are planned for: at most a quarter more, beyond the first few hundred.
pub(super) fn bucket(rows: usize) -> usize {
    let step = (rows.next_power_of_two() / (2 * STEPS)).max(ROWS_MIN);
    rows.max(1).next_multiple_of(step)
}

/// All of them, up to `most`.
pub(super) fn buckets(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(ROWS_MIN), |rows| Some(bucket(rows + 1))).take_while(move |rows| *rows <= most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_at_most_a_quarter_larger_than_its_rows() {
        for rows in 1..40_000 {
            let found = bucket(rows);
            assert!(found >= rows && found.is_multiple_of(ROWS_MIN), "{rows}: {found}");
            assert!(found - rows < ROWS_MIN || found - rows <= rows / 4, "{rows}: {found}");
            assert_eq!(bucket(found), found, "{rows}");
        }
    }

    #[test]
    fn every_pass_finds_its_bucket_among_those_up_to_the_largest() {
        let all: Vec<usize> = buckets(8192).collect();
        assert_eq!(all[..9], [64, 128, 192, 256, 320, 384, 448, 512, 640]);
        assert_eq!(all[all.len() - 5..], [4096, 5120, 6144, 7168, 8192]);
        assert!((1..=8192).all(|rows| all.contains(&bucket(rows))));
        // These numbers decide how long a start takes: each bucket has four maps.
        assert_eq!([8192, 32_768].map(|most| buckets(most).count()), [24, 32]);
        assert_eq!(buckets(63).count(), 0);
    }
}
