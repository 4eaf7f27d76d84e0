//! The encoder on the device against the vectors that transformers made of token ids (models/lengths.py): of tiny models of every
//! family, and of BERTs whose heads and widths are those of large models.

use std::sync::Arc;

use anyhow::Result;
use serde_json::json;
use vramq_inference::device::cuda::CudaDevice;
use vramq_inference::engine::encoder::Encoder;
use vramq_inference::engine::encoder::cuda::{CudaOptions, ElementType};
use vramq_inference::engine::{Engine as _, Item};
use vramq_tests::encoders::{all_as_referred, vectors};
use vramq_tests::lengths::Lengths;

use crate::Scale;
use crate::figures;
use crate::kind::Kind;

/// With few tokens, for the emulation.
const SHORT: [&str; 2] = ["bert-1x60x3x100", "tiny-mean"];

/// Compares all of them. Prints a table; whether all are near enough.
pub fn run(device: &Arc<CudaDevice>, scale: Scale) -> Result<bool> {
    println!("| model | elements | products | holds, against transformers |");
    println!("|---|---|---|---|");
    let mut all = true;
    let names = if scale.is_short { SHORT.map(str::to_owned).to_vec() } else { Lengths::names()? };
    for name in names {
        let reference = Lengths::read(&name)?;
        let (items, expected) = reference.of(&reference.all())?;
        for element in [ElementType::F32, ElementType::F16, ElementType::Bf16] {
            // As workers multiply, and without the library; the other table has all kinds.
            for kind in Kind::all(device).iter().filter(|kind| **kind != Kind::Library) {
                let options = kind.options(element, items.iter().map(Item::cost).sum(), scale);
                let Some(compared) = compare(*kind, device, &reference, &options, &items, &expected) else {
                    continue;
                };
                let (products, holds) = (kind.name(), compared.is_ok());
                all &= holds;
                let row = match compared {
                    Ok(()) => "yes".to_owned(),
                    Err(error) => format!("**no**: {}", format!("{error:#}").replace(['|', '\n'], " ")),
                };
                println!("| {name} | {element} | {products} | {row} |");
                figures::put(&json!({
                    "figure": "refers", "model": name, "element": element.as_str(), "products": products, "holds": holds,
                }))?;
            }
        }
    }
    println!();
    Ok(all)
}

/// `None` if the library does not take the model's rows: the program's own products would be compared twice.
fn compare(
    kind: Kind,
    device: &Arc<CudaDevice>,
    reference: &Lengths,
    options: &CudaOptions,
    items: &[Item],
    expected: &[Vec<f32>],
) -> Option<Result<()>> {
    let encoder = match Encoder::load_cuda(&reference.source, Arc::clone(device), options, 1) {
        Ok(encoder) => encoder,
        Err(error) => return Some(Err(error.into())),
    };
    let is_by_library = encoder.computes().is_some_and(|words| words.contains("by cuBLASLt"));
    if kind != Kind::Own && !is_by_library {
        return None;
    }
    let element = options.element.unwrap_or(ElementType::F32);
    Some(
        encoder
            .run(items)
            .map_err(Into::into)
            .and_then(|outputs| vectors(&outputs))
            .and_then(|found| all_as_referred(element, &found, expected)),
    )
}
