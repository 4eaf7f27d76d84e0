//! How a family encodes positions: by a row of a table, or by a bias that depends on distance.

/// Which row of the position embeddings a token takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::encoder) enum Positions {
    /// The token's place in its text.
    Place,
    /// As RoBERTa counts: rows before that of the padding token's id are not for texts. The n-th token that is not padding takes
    /// the n-th row after that row. A padding token inside a text takes that row itself.
    SkipPadding { padding: u32 },
    /// There are none: attention rotates queries and keys by their places. All tokens take the only row, which holds
    /// the embedding of the first token type, or zeros.
    Rotary,
}

impl Positions {
    /// The first row of the checkpoint's table that any token takes. Rows count from here.
    pub fn first_row(self) -> usize {
        match self {
            Self::Place | Self::Rotary => 0,
            Self::SkipPadding { padding } => padding as usize,
        }
    }

    /// Rows that texts of up to `positions` tokens take.
    pub fn rows(self, positions: usize) -> usize {
        match self {
            Self::Place => positions,
            Self::SkipPadding { .. } => positions + 1,
            Self::Rotary => 1,
        }
    }

    /// The row of each token of one item, in order.
    pub(super) fn of(self, ids: &[u32]) -> impl Iterator<Item = u32> {
        let mut counted = 0;
        ids.iter().zip(0..).map(move |(id, place)| match self {
            Self::Place => place,
            Self::Rotary => 0,
            Self::SkipPadding { padding } if *id == padding => 0,
            Self::SkipPadding { .. } => {
                counted += 1;
                counted
            }
        })
    }
}

/// A bias on attention's scores by the distance between two tokens, the same in all layers (Raffel et al. 2020).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::encoder) struct RelativeBias {
    /// Half of them for keys after the query, half for the others.
    pub buckets: usize,
    /// From this distance on all keys share a bucket.
    pub distance_max: usize,
}

impl RelativeBias {
    /// The bucket of a key that stands `distance` tokens after the query. Near keys have a bucket for each distance,
    /// farther ones share, in logarithmic steps. In f32, as the reference computes it.
    pub fn bucket(&self, distance: isize) -> usize {
        let half = self.buckets / 2;
        let side = if distance > 0 { half } else { 0 };
        let (apart, exact) = (distance.unsigned_abs(), half / 2);
        if apart < exact {
            return side + apart;
        }
        let steps = (apart as f32 / exact as f32).ln() / (self.distance_max as f32 / exact as f32).ln();
        side + (exact + (steps * (half - exact) as f32) as usize).min(half - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of `MPNetEncoder.relative_position_bucket` in transformers 5.23.
    #[test]
    fn distances_share_buckets_as_in_transformers() {
        let by_32 = [
            (-511, 15),
            (-128, 15),
            (-90, 14),
            (-64, 14),
            (-63, 13),
            (-32, 12),
            (-31, 11),
            (-16, 10),
            (-9, 8),
            (-8, 8),
            (-7, 7),
            (-1, 1),
            (0, 0),
            (1, 17),
            (7, 23),
            (8, 24),
            (15, 25),
            (16, 26),
            (22, 26),
            (23, 27),
            (32, 28),
            (63, 29),
            (64, 30),
            (90, 30),
            (91, 31),
            (128, 31),
            (511, 31),
        ];
        let by_10 = [
            (-511, 4),
            (-32, 4),
            (-31, 3),
            (-8, 3),
            (-7, 2),
            (-1, 1),
            (0, 0),
            (1, 6),
            (7, 7),
            (8, 8),
            (33, 9),
        ];
        let cases: [(usize, &[(isize, usize)]); 2] = [(32, &by_32), (10, &by_10)];
        for (buckets, expected) in cases {
            let bias = RelativeBias { buckets, distance_max: 128 };
            for (distance, bucket) in expected {
                assert_eq!(bias.bucket(*distance), *bucket, "{distance} in {buckets}");
            }
        }
    }

    #[test]
    fn padding_inside_a_text_is_not_counted() {
        let positions = |rule: Positions| rule.of(&[0, 7, 1, 1, 8, 2]).collect::<Vec<_>>();
        assert_eq!(positions(Positions::Place), [0, 1, 2, 3, 4, 5]);
        assert_eq!(positions(Positions::SkipPadding { padding: 1 }), [1, 2, 0, 0, 3, 4]);
    }
}
