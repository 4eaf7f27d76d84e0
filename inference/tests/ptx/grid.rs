//! Runs a launch. Blocks run one after the other, from the last to the first. The warps of a block run from barrier to barrier, in
//! an order that is reversed each time. So the tests see results that depend on an order.

use super::code::Kernel;
use super::fault::{Fault, Report};
use super::fragments::LANES;
use super::memory::{Access, Space};
use super::warp::{Stop, Surroundings, Warp};

/// Runs all blocks. `arguments`: one for each parameter, as its bits.
pub fn run(
    kernel: &Kernel,
    blocks: (u32, u32),
    threads: u32,
    arguments: &[u64],
    global: &mut Space,
) -> Result<(), Report> {
    for down in (0..blocks.1).rev() {
        for across in (0..blocks.0).rev() {
            let mut shared = Space::shared();
            for array in &kernel.shared {
                shared.add_at(array.address, &array.name, vec![0xff; array.bytes], Access::Write);
            }
            let block = (across, down);
            let shared = &mut shared;
            run_block(
                kernel,
                &mut Surroundings { global, shared, arguments, blocks, block, threads, barriers: 0 },
            )?;
        }
    }
    Ok(())
}

fn run_block(kernel: &Kernel, around: &mut Surroundings<'_>) -> Result<(), Report> {
    let mut warps: Vec<_> =
        (0..around.threads as usize / LANES).map(|number| Warp::new(kernel, number)).collect();
    loop {
        let mut stops = Vec::with_capacity(warps.len());
        for warp in &mut warps {
            stops.push(warp.run(around)?);
        }
        if stops.iter().all(|stop| *stop == Stop::Ended) {
            return Ok(());
        }
        if let Some(waiting) = stops.iter().position(|stop| *stop == Stop::Barrier)
            && stops.contains(&Stop::Ended)
        {
            let warp = &warps[waiting];
            return Err(warp.report(Fault::BarrierUnreached, warp.at() - 1, around));
        }
        around.barriers += 1;
        warps.reverse();
    }
}
