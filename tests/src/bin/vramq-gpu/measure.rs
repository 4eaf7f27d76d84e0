//! Measures speed: the device's best matrix products, and the share of it that the encoder reaches with each kind of products.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;
use vramq_inference::device::cuda::cublaslt::{DataType, Handle, Places, Plan, Shape};
use vramq_inference::device::cuda::{Code, CudaDevice};
use vramq_inference::engine::Engine as _;
use vramq_inference::engine::Item;
use vramq_inference::engine::encoder::cuda::{CudaOptions, ElementType};
use vramq_inference::engine::encoder::{Dims, Encoder, Source};
use vramq_tests::random::Random;

use crate::Scale;
use crate::encoder::{LONGEST, longest, of_tokens, sequence};
use crate::figures;
use crate::kind::Kind;
use crate::model::Named;

/// Sizes of the products that the ceiling is the best of: square ones, as in NVIDIA's own figures.
const SQUARES: &[usize] = &[4096, 8192];
const SQUARES_SHORT: &[usize] = &[64];

/// Tokens of a pass. 4,200 are just above a power of two: algorithms for the next one would be poor ones for them.
const PASS_TOKENS: &[usize] = &[2048, 4200, 8192, 32_768];
const PASS_TOKENS_SHORT: &[usize] = &[96];

/// How long each figure is measured for.
const MEASURED: Duration = Duration::from_millis(500);

const WORKSPACE_BYTES: usize = 32 << 20;

/// Measures models. Prints tables. It never fails: the reader judges.
pub fn run(device: &Arc<CudaDevice>, models: &[&str], scale: Scale) -> Result<bool> {
    let mut random = Random::new(1);
    let (squares, passes) =
        if scale.is_short { (SQUARES_SHORT, PASS_TOKENS_SHORT) } else { (SQUARES, PASS_TOKENS) };
    let has_library = device.libraries().cublaslt.is_ok();
    let mut ceilings = Vec::new();
    for element in [ElementType::F16, ElementType::Bf16] {
        if !has_library {
            println!("The ceiling in {element} is not measured: libcublasLt is not on this machine.\n");
            continue;
        }
        match ceiling(device, element, squares) {
            Ok(ceiling) => {
                println!(
                    "Matrix products of cuBLASLt alone, {element}: {:.1} TFLOP/s at best.\n",
                    ceiling / 1e12
                );
                figures::put(&json!({"figure": "ceiling", "element": element.as_str(), "flops": ceiling}))?;
                ceilings.push((element, ceiling));
            }
            Err(error) => println!("The ceiling in {element} is not measured: {error:#}.\n"),
        }
    }
    println!(
        "Tokens a second, in sequences of 1 to {LONGEST} tokens or to the model's own limit, without tokenising; the share is \
         that of the ceiling. `fixed` is a pass of one token, with its launches, wait and fetch, and its part of each pass \
         (docs/adr/0021-one-pass-at-a-time-and-no-graphs.md).\n"
    );
    let heads: Vec<_> =
        passes.iter().map(|tokens| format!(" passes of {tokens} | share | fixed |")).collect();
    println!(
        "| model | elements | products | fixed, us |{}\n|---|---|---|---|{}",
        heads.concat(),
        "---|---|---|".repeat(passes.len())
    );
    for model in models {
        let named = Named::of(model, &mut random)?;
        for element in [ElementType::F16, ElementType::Bf16, ElementType::F32] {
            for kind in Kind::all(device) {
                // Products in f32 take so long that timing those of the largest passes would take minutes on small GPUs.
                if element == ElementType::F32 && *kind == Kind::Timed {
                    continue;
                }
                let options = kind.options(element, *passes.iter().max().unwrap_or(&0), scale);
                let products = kind.name();
                let ceiling = ceilings.iter().find(|(of, _)| *of == element).map(|(_, ceiling)| *ceiling);
                let row = rates(device, &named, &options, passes, products, ceiling, &mut random)
                    .unwrap_or_else(|error| format!(" {} |", format!("{error:#}").replace(['|', '\n'], " ")));
                println!("| {} | {element} | {products} |{row}", named.name);
            }
        }
    }
    device.check()?;
    Ok(true)
}

fn rates(
    device: &Arc<CudaDevice>,
    named: &Named,
    options: &CudaOptions,
    passes: &[usize],
    products: &str,
    ceiling: Option<f64>,
    random: &mut Random,
) -> Result<String> {
    let encoder = Encoder::load_cuda(&Source::Folder(named.path.clone()), Arc::clone(device), options, 1)?;
    let one_token = [sequence(1, random)];
    let fixed = seconds_each(|| Ok(encoder.run(&one_token).map(drop)?))?;
    let mut row = format!(" {:.0} |", fixed * 1e6);
    for tokens in passes {
        let items = of_tokens(*tokens, longest(&encoder), random);
        let seconds = seconds_each(|| Ok(encoder.run(&items).map(drop)?))?;
        let rate = *tokens as f64 / seconds;
        let share = ceiling.map(|ceiling| flops(&encoder.dims(), &items) / seconds / ceiling);
        row += &format!(
            " {rate:.0} | {} | {:.1} % |",
            share.map_or("-".to_owned(), |share| format!("{:.0} %", share * 100.0)),
            fixed / seconds * 100.0
        );
        figures::put(&json!({
            "figure": "rate", "model": named.name, "element": options.element.map(ElementType::as_str), "products": products,
            "pass_tokens": tokens, "tokens_per_second": rate, "share_of_ceiling": share, "fixed_share": fixed / seconds,
        }))?;
    }
    Ok(row)
}

/// Floating-point operations of a pass, of matrix products and attention only.
fn flops(dims: &Dims, items: &[Item]) -> f64 {
    let (hidden, feed_forward) = (dims.hidden as f64, dims.feed_forward as f64);
    let per_token = 8.0 * hidden * hidden + 4.0 * hidden * feed_forward;
    let of = |length: f64| length * per_token + 4.0 * length * length * hidden;
    dims.layers as f64 * items.iter().map(|item| of(item.cost() as f64)).sum::<f64>()
}

/// The time that something takes, after it was done once to warm up.
pub fn seconds_each(mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    work()?;
    let (start, mut rounds) = (Instant::now(), 0);
    while start.elapsed() < MEASURED {
        work()?;
        rounds += 1;
    }
    Ok(start.elapsed().as_secs_f64() / f64::from(rounds))
}

/// The most operations a second that the library makes of square products.
fn ceiling(device: &Arc<CudaDevice>, element: ElementType, squares: &[usize]) -> Result<f64> {
    /// Products between two waits, so that waiting does not count.
    const AT_ONCE: u32 = 8;
    device.bind()?;
    let failed = |code: Code| device.failed("measure the ceiling", 0, code);
    let data = if element == ElementType::F16 { DataType::CUDA_R_16F } else { DataType::CUDA_R_16BF };
    let handle = Handle::new().map_err(failed)?;
    let workspace = device.alloc(WORKSPACE_BYTES)?;
    let mut best = 0.0_f64;
    for side in squares {
        let bytes = side * side * 2;
        let matrices = device.alloc(3 * bytes)?;
        // Ones: what is multiplied makes a difference to the power, and with it to the clock. Neither zeros nor NaN.
        let one: [u8; 2] = if element == ElementType::F16 { [0, 0x3c] } else { [0x80, 0x3f] };
        let ones = one.repeat(2 * side * side);
        // SAFETY: there is room for them, and they stay until the wait below.
        unsafe { device.copy_in("copy ones", matrices.start(), &ones) }?;
        device.synchronize()?;
        let shape = Shape { data, inner: *side, columns: *side, has_bias: false, alignment: 256 };
        let mut plan =
            Plan::new(&handle, &shape, *side, (workspace.start(), workspace.len())).map_err(failed)?;
        let [from, weights, to] = [0, 1, 2].map(|at| matrices.start() + (at * bytes) as u64);
        let places = Places { from, weights, bias: None, to };
        let seconds = seconds_each(|| {
            for _ in 0..AT_ONCE {
                let workspace = (workspace.start(), workspace.len());
                // SAFETY: three matrices of that shape, which live until the wait below, as the workspace does.
                unsafe { plan.run(&handle, *side, &places, workspace, device.stream()) }.map_err(failed)?;
            }
            Ok(device.synchronize()?)
        })?;
        let side = *side as f64;
        best = best.max(2.0 * side * side * side * f64::from(AT_ONCE) / seconds);
    }
    ensure!(best > 0.0, "nothing was measured");
    Ok(best)
}
