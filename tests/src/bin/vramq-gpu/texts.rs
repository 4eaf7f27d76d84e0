//! Measures texts per second, tokenising included, for the comparison with sentence-transformers.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use vramq_inference::device::cuda::CudaDevice;
use vramq_inference::engine::encoder::cuda::{CudaOptions, ElementType};
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_inference::engine::{Engine as _, Item};
use vramq_schemas::{Input, Params};
use vramq_tests::random::Random;

use crate::Scale;
use crate::encoder::cores;
use crate::figures;
use crate::model::Named;

/// Tokens of a pass.
const PASS_TOKENS: usize = 16_384;

/// The texts of a file, one a line, are gone through so often; the best time counts.
const ROUNDS: usize = 3;
const ROUNDS_SHORT: usize = 1;

pub fn run(device: &Arc<CudaDevice>, model: &str, file: &str, scale: Scale) -> Result<bool> {
    let named = Named::of(model, &mut Random::new(3))?;
    let options =
        CudaOptions { element: Some(ElementType::F16), cache: scale.cache(), ..CudaOptions::default() };
    let encoder =
        Encoder::load_cuda(&Source::Folder(named.path.clone()), Arc::clone(device), &options, cores())?;
    let text = std::fs::read_to_string(Path::new(file)).with_context(|| format!("read {file}"))?;
    let inputs: Vec<Input> = text.lines().map(|line| Input::Text(line.to_owned())).collect();
    ensure!(!inputs.is_empty(), "{file} has no texts");
    let (mut tokenising, mut all, mut tokens) = (f64::INFINITY, f64::INFINITY, 0);
    for _ in 0..if scale.is_short { ROUNDS_SHORT } else { ROUNDS } {
        let start = Instant::now();
        let mut items = encoder.prepare(&inputs, &Params::default())?;
        let prepared = start.elapsed().as_secs_f64();
        items.sort_by_key(Item::cost);
        tokens = items.iter().map(Item::cost).sum::<usize>();
        for pass in passes(&items) {
            encoder.run(pass)?;
        }
        (tokenising, all) = (tokenising.min(prepared), all.min(start.elapsed().as_secs_f64()));
    }
    let rate = inputs.len() as f64 / all;
    println!(
        "{}: {rate:.0} texts a second, {:.0} tokens; tokenising took {:.0} % of it, on {} threads and before the passes.",
        named.name,
        tokens as f64 / all,
        100.0 * tokenising / all,
        cores(),
    );
    figures::put(&json!({
        "figure": "texts", "engine": "vramq", "model": named.name, "texts_per_second": rate,
        "tokens_per_second": tokens as f64 / all, "tokenising_share": tokenising / all,
    }))?;
    Ok(true)
}

/// Runs of items of about so many tokens.
fn passes(items: &[Item]) -> Vec<&[Item]> {
    let (mut passes, mut start, mut tokens) = (Vec::new(), 0, 0);
    for (at, item) in items.iter().enumerate() {
        if tokens > 0 && tokens + item.cost() > PASS_TOKENS {
            passes.push(&items[start..at]);
            (start, tokens) = (at, 0);
        }
        tokens += item.cost();
    }
    passes.push(&items[start..]);
    passes
}
