//! Passes on a device that another process has filled: they run out of memory, are halved, and give the same vectors.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use serde_json::json;
use vramq_inference::device::Device as _;
use vramq_inference::device::cuda::CudaDevice;
use vramq_inference::engine::encoder::cuda::{CudaOptions, ElementType};
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_inference::engine::{Engine as _, Item, PassError, shape_of};
use vramq_schemas::Output;
use vramq_tests::random::Random;

use crate::Scale;
use crate::checks::{MIB, Neighbour, SLACK, give_back, until};
use crate::encoder::{sequence, vectors, worst};
use crate::figures;
use crate::model::Named;

/// What the neighbour leaves besides its own context, which takes about what this process's does.
const LEFT_MIB: u64 = 256;
const LEFT_MIB_SHORT: u64 = 2;

/// Without NVML nobody knows what a context takes.
const CONTEXT_MIB: u64 = 1024;

const LENGTH: usize = 128;

/// How far vectors of a smaller pass may be from those of a larger one: cuBLASLt has other algorithms for it.
const COSINE_MIN: f64 = 0.9999;

pub fn run(device: &Arc<CudaDevice>, model: &str, scale: Scale) -> Result<bool> {
    let mut random = Random::new(2);
    let named = Named::of(model, &mut random)?;
    let options =
        CudaOptions { element: Some(ElementType::F16), cache: scale.cache(), ..CudaOptions::default() };
    let encoder = Encoder::load_cuda(&Source::Folder(named.path.clone()), Arc::clone(device), &options, 1)?;
    let expected: Vec<Item> = (0..4).map(|_| sequence(LENGTH, &mut random)).collect();
    let before_pressure = vectors(&encoder, &expected)?;
    give_back(device)?;
    device.read()?;
    let before = device.memory();

    let left = if scale.is_short { LEFT_MIB_SHORT } else { LEFT_MIB };
    let context = device.context_cost().map_or(CONTEXT_MIB, |bytes| bytes.div_ceil(MIB));
    let neighbour = Neighbour::holding((before.free / MIB).saturating_sub(context + left))?;
    device.read()?;
    let room = device.memory().free;
    // Half as much again as there is room for in one pass; four times, where that takes no time.
    let bytes = encoder.pass_bytes(shape_of(&expected[..1]));
    let wanted = if scale.is_short { room * 3 / 2 } else { room * 4 };
    let count = usize::try_from(wanted / bytes)?.max(2);
    let mut items = expected.clone();
    items.extend((items.len()..count).map(|_| sequence(LENGTH, &mut random)));

    let Halved { first, size, halvings, foreign } = in_halves(device, &encoder, &items)?;
    ensure!(halvings > 0, "{} items of {bytes} bytes fitted into {room}", items.len());
    ensure!(
        foreign >= before.free / 2,
        "the neighbour's {foreign} bytes are not reported as other processes'"
    );
    let under_pressure = crate::encoder::numbers(first)?;
    // The first pass under pressure may have fewer items than the one before.
    let both = before_pressure.len().min(under_pressure.len());
    ensure!(both > 0, "the first pass under pressure has no vectors");
    let worst = worst(&under_pressure[..both], &before_pressure[..both]);
    ensure!(worst.1 >= COSINE_MIN, "vectors under pressure are others: cosine {}", worst.1);

    drop(neighbour);
    until("the neighbour's memory comes back", || {
        device.read()?;
        Ok(device.memory().free + SLACK >= before.free)
    })?;
    ensure!(device.lost().is_none(), "{:?}", device.lost());
    println!(
        "{} items of {LENGTH} tokens on {}, with {} MiB free beside a neighbour: {halvings} halvings to passes of {size}, all \
         done, the same vectors; {} MiB reported as other processes'; the memory is back.",
        items.len(),
        named.name,
        room / MIB,
        foreign / MIB,
    );
    figures::put(&json!({
        "figure": "pressure", "model": named.name, "items": items.len(), "free_bytes": room, "halvings": halvings,
        "items_per_pass": size, "foreign_bytes": foreign,
    }))?;
    Ok(true)
}

/// What became of items that did not fit into one pass.
struct Halved {
    /// Outputs of the first pass.
    first: Vec<Output>,
    /// Items of the last passes, and how often the first one's were halved.
    size: usize,
    halvings: u32,
    /// Bytes that others held when memory ran out.
    foreign: u64,
}

/// Runs items as a worker does: half as many in a pass each time that memory runs out.
fn in_halves(device: &CudaDevice, encoder: &Encoder, items: &[Item]) -> Result<Halved> {
    let mut halved = Halved { first: Vec::new(), size: items.len(), halvings: 0, foreign: 0 };
    let mut done = 0;
    while done < items.len() {
        let end = items.len().min(done + halved.size);
        match encoder.run(&items[done..end]) {
            Ok(outputs) => {
                if done == 0 {
                    halved.first = outputs;
                }
                done = end;
            }
            Err(PassError::OutOfMemory { oom, .. }) if halved.size > 1 => {
                ensure!(oom.asked + SLACK > oom.free, "{oom}, and that fits");
                halved.foreign = oom.foreign;
                halved.halvings += 1;
                halved.size /= 2;
            }
            Err(error) => bail!("a pass of {} items: {error}", halved.size),
        }
        // Whatever the pass came to, its memory is there again.
        ensure!(device.active_pass_bytes() == 0, "{} bytes of passes are left", device.active_pass_bytes());
    }
    Ok(halved)
}
