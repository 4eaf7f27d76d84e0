//! MPNet (Song et al. 2020): RoBERTa's positions, no token types, and a bias on attention's scores by distance.

use super::{BertLike, ConfigFile, Design, Names, RelativeBias, Spec, roberta};
use crate::engine::encoder::LoadError;
use crate::engine::encoder::forward::{Linear, Norm};

const NAMES: Names = Names {
    prefixes: &["mpnet."],
    token_types: None,
    relative: "encoder.relative_attention_bias",
    linears: [
        (Linear::Qkv, &["attention.attn.q", "attention.attn.k", "attention.attn.v"]),
        (Linear::AttentionOut, &["attention.attn.o"]),
        (Linear::Up, &["intermediate.dense"]),
        (Linear::Down, &["output.dense"]),
    ],
    norms: [(Norm::Attention, "attention.LayerNorm"), (Norm::Output, "output.LayerNorm")],
    ..roberta::NAMES
};

/// The reference has this number in its code, whatever the configuration says.
const PADDING: u32 = 1;

/// As above.
const DISTANCE_MAX: usize = 128;

/// As above: another number in the configuration changes the table's rows, and not which of them count.
const BUCKETS: usize = 32;

pub(super) fn read(file: &ConfigFile<'_>) -> Result<Spec, LoadError> {
    let config = BertLike::read(file)?;
    let buckets = config.relative_attention_num_buckets.unwrap_or(BUCKETS);
    if buckets != BUCKETS {
        return file
            .refuse(format!("{buckets} buckets of relative positions"), "32, as transformers computes");
    }
    let (positions, rule) = config.positions_after_padding(file, PADDING)?;
    let dims = config.dims(file, positions, 0)?;
    let relative = Some(RelativeBias { buckets, distance_max: DISTANCE_MAX });
    Ok(Spec { relative, ..Spec::new(dims, config.layer_norm_eps, Design::bert(), rule, &NAMES) })
}
