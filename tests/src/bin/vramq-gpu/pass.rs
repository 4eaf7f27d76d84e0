//! Runs one pass for a profiler to look at.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use libloading::Library;
use vramq_inference::device::cuda::CudaDevice;
use vramq_inference::engine::Engine as _;
use vramq_inference::engine::encoder::cuda::ElementType;
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_tests::random::Random;

use crate::Scale;
use crate::encoder::{longest, of_tokens};
use crate::kind::Kind;
use crate::measure::seconds_each;
use crate::model::Named;

/// Tokens of texts as people have them: passages, not the longest.
const LONGEST_TEXT: usize = 256;

/// Loads a model, runs a pass of `tokens` tokens, and runs it again between `cuProfilerStart` and `cuProfilerStop`: a profiler that waits
/// for these sees this pass only.
pub fn run(
    device: &Arc<CudaDevice>,
    model: &str,
    [element, products, tokens]: [&str; 3],
    scale: Scale,
) -> Result<bool> {
    let mut random = Random::new(5);
    let named = Named::of(model, &mut random)?;
    let tokens: usize = tokens.parse().context("TOKENS is not a number")?;
    let elements = [ElementType::F32, ElementType::F16, ElementType::Bf16];
    let Some(element) = elements.into_iter().find(|known| known.as_str() == element) else {
        bail!("ELEMENT is f32, f16 or bf16, not {element}")
    };
    let Some(kind) = Kind::all(device).iter().find(|kind| kind.word() == products) else {
        bail!("there are no products `{products}` here")
    };
    let options = kind.options(element, tokens, scale);
    let encoder = Encoder::load_cuda(&Source::Folder(named.path.clone()), Arc::clone(device), &options, 1)?;
    let longest = longest(&encoder).min(LONGEST_TEXT);
    let items = of_tokens(tokens, longest, &mut random);
    let alone = seconds_each(|| Ok(encoder.run(&items).map(drop)?))?;
    // SAFETY: the driver's library, which is open already.
    let driver = unsafe { Library::new("libcuda.so.1") }.context("open the driver's library again")?;
    call(&driver, "cuProfilerStart")?;
    let ran = encoder.run(&items);
    call(&driver, "cuProfilerStop")?;
    ran?;
    println!(
        "{}, {element}, {}: {tokens} tokens in {} texts of at most {longest} tokens. Without the profiler such a pass takes \
         {:.0} us, from the call to the vectors.",
        named.name,
        kind.name(),
        items.len(),
        alone * 1e6,
    );
    Ok(true)
}

fn call(driver: &Library, name: &str) -> Result<()> {
    // SAFETY: both functions take nothing and return a code.
    let code = unsafe { driver.get::<unsafe extern "C" fn() -> u32>(name.as_bytes())?() };
    ensure!(code == 0, "{name} returned {code}");
    Ok(())
}
