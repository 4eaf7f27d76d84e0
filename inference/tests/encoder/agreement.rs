//! Vectors of every family against sentence-transformers: on every vector unit and with AMX's linear maps, alone and in one
//! batch.

use crate::{agrees_with, minilm, tiny};

#[test]
fn minilm_agrees_with_sentence_transformers_on_nasty_texts() {
    if let Some(minilm) = minilm() {
        agrees_with("minilm", &minilm);
    }
}

#[test]
fn mean_pooling_agrees() {
    agrees_with("tiny-mean", &tiny("tiny-mean"));
}

#[test]
fn max_pooling_agrees() {
    agrees_with("tiny-max", &tiny("tiny-max"));
}

#[test]
fn cls_pooling_with_normalisation_agrees() {
    agrees_with("tiny-cls-normalize", &tiny("tiny-cls-normalize"));
}

#[test]
fn half_precision_weights_in_the_layout_of_version_6_agree() {
    agrees_with("tiny-mean-normalize-v6-f16", &tiny("tiny-mean-normalize-v6-f16"));
}

#[test]
fn roberta_agrees() {
    agrees_with("tiny-roberta", &tiny("tiny-roberta"));
}

#[test]
fn xlm_roberta_agrees() {
    agrees_with("tiny-xlm-roberta", &tiny("tiny-xlm-roberta"));
}

#[test]
fn camembert_agrees() {
    agrees_with("tiny-camembert", &tiny("tiny-camembert"));
}

#[test]
fn distilbert_agrees() {
    agrees_with("tiny-distilbert", &tiny("tiny-distilbert"));
}

#[test]
fn mpnet_agrees() {
    agrees_with("tiny-mpnet", &tiny("tiny-mpnet"));
}

#[test]
fn modernbert_agrees() {
    agrees_with("tiny-modernbert", &tiny("tiny-modernbert"));
}

#[test]
fn modernbert_with_biases_agrees() {
    agrees_with("tiny-modernbert-bias", &tiny("tiny-modernbert-bias"));
}

#[test]
fn qwen3_agrees() {
    agrees_with("tiny-qwen3", &tiny("tiny-qwen3"));
}

#[test]
fn gemma_agrees() {
    agrees_with("tiny-gemma", &tiny("tiny-gemma"));
}

#[test]
fn nomic_agrees() {
    agrees_with("tiny-nomic", &tiny("tiny-nomic"));
}

#[test]
fn gte_agrees() {
    agrees_with("tiny-gte", &tiny("tiny-gte"));
}

#[test]
fn gte_without_token_types_agrees() {
    agrees_with("tiny-gte-no-types", &tiny("tiny-gte-no-types"));
}

#[test]
fn gte_of_stretched_positions_agrees() {
    agrees_with("tiny-gte-ntk", &tiny("tiny-gte-ntk"));
}

#[test]
fn a_layer_behind_pooling_agrees_in_another_family() {
    agrees_with("tiny-dense", &tiny("tiny-dense"));
}
