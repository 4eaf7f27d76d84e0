//! Checks AMX on this machine: its self-check, then a whole encoder on it against the model of its tiles, to the bit.
//!
//! `cargo run -p vramq-inference --example amx -- MODEL`
//!
//! On a CPU without AMX it says why AMX is not used, and succeeds. It is a separate program, so that a fault of AMX does not end
//! a test run.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::Engine;
use vramq_inference::engine::encoder::{CpuUnits, Encoder, Level, Parts, Source};
use vramq_schemas::{Input, Output, Params};

/// Texts of these many words: passes of one row to several blocks.
const WORDS: [usize; 6] = [1, 2, 5, 11, 17, 30];

fn main() -> Result<()> {
    let model = std::env::args().nth(1).context("usage: amx MODEL")?;
    compare(Path::new(&model))
}

/// Compares a model's vectors, if there is the unit, and says what it did.
pub fn compare(model: &Path) -> Result<()> {
    let source = Source::Folder(model.into());
    for parts in [Parts::Split, Parts::Rounded] {
        let units = match CpuUnits::amx(parts) {
            Ok(units) => units,
            Err(absent) if absent.is_fault() => bail!("{absent}"),
            Err(absent) => {
                println!("amx: not checked here: {absent}");
                return Ok(());
            }
        };
        println!("amx: the self-check has passed; now {units}");
        let expected = vectors(&source, CpuUnits::tile_model(Level::best(), parts))?;
        let found = vectors(&source, units)?;
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            ensure!(
                found == expected,
                "text {at} in {parts:?}: the unit gives {found:?}, the model {expected:?}"
            );
        }
        println!("amx: {} vectors are those of the model, to the bit", found.len());
    }
    Ok(())
}

/// Each text alone, then all in one pass.
fn vectors(source: &Source, units: CpuUnits) -> Result<Vec<Output>> {
    let encoder = Encoder::load_on_units(source, CpuDevice::new(1 << 30, 2)?, units)?;
    let texts: Vec<Input> = WORDS.iter().map(|words| Input::Text("a cat was ".repeat(*words))).collect();
    let items = encoder.prepare(&texts, &Params::default())?;
    let mut vectors = Vec::new();
    for item in &items {
        vectors.extend(encoder.run(std::slice::from_ref(item))?);
    }
    vectors.extend(encoder.run(&items)?);
    Ok(vectors)
}
