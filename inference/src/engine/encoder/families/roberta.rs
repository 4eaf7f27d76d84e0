//! RoBERTa (Liu et al. 2019) and those built like it: XLM-RoBERTa (bge-m3, multilingual-e5, arctic-embed) and CamemBERT.

use super::{Activation, BertLike, ConfigFile, Design, HeadDense, HeadDesign, Names, Spec, bert};
use crate::engine::encoder::LoadError;

pub(super) const NAMES: Names = Names { prefixes: &["roberta."], ..bert::NAMES };

pub(super) const HEAD: HeadDesign = HeadDesign {
    dense: Some(HeadDense::new("classifier.dense", Activation::Tanh)),
    ..HeadDesign::of_first_token("classifier.out_proj")
};

/// The padding token where a configuration does not say: that of all published models of these families.
const PADDING: u32 = 1;

pub(super) fn read(file: &ConfigFile<'_>) -> Result<Spec, LoadError> {
    let config = BertLike::read(file)?;
    let Ok(padding) = config.pad_token_id.map_or(Ok(PADDING), u32::try_from) else {
        let found = format!("pad_token_id {}", config.pad_token_id.unwrap_or_default());
        return file.refuse(found, "the id of a token, behind which this family's positions begin");
    };
    let (positions, rule) = config.positions_after_padding(file, padding)?;
    let dims = config.dims(file, positions, bert::TOKEN_TYPES)?;
    Ok(Spec::new(dims, config.layer_norm_eps, Design::bert(), rule, &NAMES))
}
