//! The encoder on CUDA against the encoder on the CPU: the kernels' own source, run by an emulation of a GPU that fails
//! what a GPU would not stand (tests/standin/emulation). Nothing here says anything about a GPU's speed.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::{EmbeddingFormat, Input, Output, Params};
use vramq_tests::bert::{RandomBert, fixture};
use vramq_tests::programs::root;
use vramq_tests::setup::Failed;
use vramq_tests::standin::{alone, cublaslt, gpu};
use vramq_worker::device::Device as _;
use vramq_worker::device::cpu::CpuDevice;
use vramq_worker::device::cuda::{CudaDevice, Options, Which};
use vramq_worker::engine::encoder::cuda::{CudaOptions, ElementType};
use vramq_worker::engine::encoder::{Encoder, LoadError, Source};
use vramq_worker::engine::{Engine as _, Item, PassError, PassShape};

/// Makes a test of each body, in a process of its own with the emulation and these settings.
macro_rules! on_an_emulated_gpu {
    ($($body:ident: [$($name:literal = $value:expr),*];)+) => { $(
        #[test]
        fn $body() -> Result<(), Failed> {
            let settings = [("STANDIN_POISON", "1") $(, ($name, $value))*];
            Ok(alone(stringify!($body), &[gpu()?], &settings, bodies::$body)?)
        }
    )+ };
}

on_an_emulated_gpu! {
    tiny_models_agree: [];
    sizes_that_are_no_multiple_of_anything_agree: [];
    heads_of_32_and_64_agree: [];
    a_wide_model_agrees: [];
    every_length_agrees: [];
    empty_items_agree: [];
    minilm_agrees_in_f32: [];
    minilm_agrees_in_16_bits: [];
    turing_has_f16_and_f32: ["STANDIN_SM" = "75"];
    what_has_no_kernel_is_refused: [];
    numbers_too_large_for_f16_are_refused: [];
    a_pass_takes_its_plan_and_gives_it_back: [];
    kernels_are_compiled_once: [];
}

/// The same beside a stand-in for cuBLASLt, which then makes the matrix products.
macro_rules! with_cublaslt {
    ($($test:ident = $body:ident: [$($name:literal = $value:expr),*];)+) => { $(
        #[test]
        fn $test() -> Result<(), Failed> {
            let settings = [("STANDIN_POISON", "1") $(, ($name, $value))*];
            Ok(alone(stringify!($test), &[gpu()?, cublaslt()?], &settings, bodies::$body)?)
        }
    )+ };
}

with_cublaslt! {
    cublaslt_agrees = products_agree: [];
    cublaslt_agrees_with_minilm = minilm_agrees_in_16_bits: [];
    cublaslt_has_a_workspace = a_wide_model_agrees: [];
    cublaslt_counts_in_what_a_model_takes = a_pass_takes_its_plan_and_gives_it_back: [];
    cublaslt_is_asked_once_for_about_so_many_rows = plans_are_few: [];
    cublaslt_does_not_take_all_models = rows_that_are_not_aligned_are_multiplied_here: [];
    cublaslt_need_not_be_used = own_products_are_for_the_asking: [];
    cublaslt_may_not_start = without_its_products: ["STANDIN_FAIL" = "cublasLtCreate:1:8:0"];
    cublaslt_may_have_no_algorithm = without_its_products: ["STANDIN_FAIL" = "cublasLtMatmulAlgoGetHeuristic:1:15:0"];
    cublaslt_may_refuse_a_product = a_refused_product_is_made_here:
        ["STANDIN_FAIL" = "cublasLtMatmul:3:15,cublasLtMatmul:9:7"];
    cublaslt_may_run_out_of_memory = out_of_memory_in_a_product_is_the_pass: ["STANDIN_FAIL" = "cublasLtMatmul:2:3"];
    cublaslt_may_start_without_memory = out_of_memory_at_the_start_is_told: ["STANDIN_FAIL" = "cublasLtCreate:1:3"];
    cublaslt_may_fail = a_product_that_fails_ends_its_pass_only: ["STANDIN_FAIL" = "cublasLtMatmul:2:13"];
}

const ALL: [ElementType; 3] = [ElementType::F32, ElementType::F16, ElementType::Bf16];

mod bodies {
    use super::*;

    pub fn tiny_models_agree() -> Result<()> {
        for name in ["tiny-mean", "tiny-max"] {
            texts_agree(&fixture(name), &ALL)?;
        }
        Ok(())
    }

    pub fn sizes_that_are_no_multiple_of_anything_agree() -> Result<()> {
        for name in ["tiny-cls-normalize", "tiny-mean-normalize-v6-f16"] {
            texts_agree(&fixture(name), &ALL)?;
        }
        Ok(())
    }

    pub fn heads_of_32_and_64_agree() -> Result<()> {
        let shapes = [
            RandomBert { hidden: 96, heads: 3, feed_forward: 200, layers: 2, ..RandomBert::default() },
            RandomBert { hidden: 192, heads: 3, feed_forward: 320, layers: 2, ..RandomBert::default() },
            RandomBert { hidden: 160, heads: 4, feed_forward: 136, layers: 1, ..RandomBert::default() },
        ];
        for shape in shapes {
            let model = shape.write()?;
            lengths_agree(&model.source(), &ALL, &[1, 7, 64, 65, 130, 200])?;
        }
        Ok(())
    }

    pub fn a_wide_model_agrees() -> Result<()> {
        let shape =
            RandomBert { hidden: 1024, heads: 16, feed_forward: 4096, layers: 1, ..RandomBert::default() };
        let model = shape.write()?;
        lengths_agree(&model.source(), &[ElementType::F16], &[5, 70])
    }

    pub fn every_length_agrees() -> Result<()> {
        let near = |n: usize| [n - 1, n, n + 1];
        let lengths: Vec<usize> =
            [2, 16, 32, 64, 128, 256].into_iter().flat_map(near).chain([5, 100, 511, 512]).collect();
        lengths_agree(&fixture("tiny-long"), &ALL, &lengths)
    }

    pub fn empty_items_agree() -> Result<()> {
        lengths_agree(&fixture("tiny-mean"), &ALL, &[0, 3, 0, 0, 1])?;
        lengths_agree(&fixture("tiny-cls-normalize"), &ALL, &[0])
    }

    /// Of shapes whose rows cuBLASLt takes.
    fn aligned_shapes_agree() -> Result<()> {
        let shapes = [
            RandomBert { hidden: 64, heads: 2, feed_forward: 256, layers: 2, ..RandomBert::default() },
            RandomBert { hidden: 96, heads: 3, feed_forward: 200, layers: 1, ..RandomBert::default() },
        ];
        for shape in shapes {
            lengths_agree(&shape.write()?.source(), &ALL, &[1, 7, 64, 65, 130, 0])?;
        }
        Ok(())
    }

    pub fn products_agree() -> Result<()> {
        aligned_shapes_agree()?;
        ensure!(counted("standin_products")? > 0, "cuBLASLt was not used");
        Ok(())
    }

    pub fn a_refused_product_is_made_here() -> Result<()> {
        let shape =
            RandomBert { hidden: 64, heads: 2, feed_forward: 256, layers: 2, ..RandomBert::default() };
        let source = shape.write()?;
        let cpu = Encoder::load(&source.source(), CpuDevice::new(1 << 30, 2)?)?;
        let items = tokens(&cpu, &[1, 7, 64, 65, 130]);
        let expected = vectors(&cpu.run(&items)?)?;
        let encoder = cuda_encoder(&source.source(), ElementType::F32, Some(cache()?))?;
        for _ in 0..2 {
            for (found, expected) in vectors(&encoder.run(&items)?)?.iter().zip(&expected) {
                close(ElementType::F32, found, expected)?;
            }
        }
        // Of two times eight products the two that were refused, and each one of that shape after it, were made here.
        ensure!((1..14).contains(&counted("standin_products")?), "{} products", counted("standin_products")?);
        Ok(())
    }

    pub fn without_its_products() -> Result<()> {
        aligned_shapes_agree()?;
        ensure!(counted("standin_products")? == 0, "cuBLASLt was used");
        Ok(())
    }

    pub fn rows_that_are_not_aligned_are_multiplied_here() -> Result<()> {
        let shape =
            RandomBert { hidden: 60, heads: 3, feed_forward: 100, layers: 1, ..RandomBert::default() };
        lengths_agree(&shape.write()?.source(), &[ElementType::F16], &[3, 70])?;
        ensure!(counted("standin_products")? == 0 && counted("standin_heuristics")? == 0);
        Ok(())
    }

    pub fn own_products_are_for_the_asking() -> Result<()> {
        let options = CudaOptions { own_products: true, cache: Some(cache()?), ..CudaOptions::default() };
        let encoder = Encoder::load_cuda(&fixture("tiny-long"), open()?, &options, 2)?;
        encoder.run(&tokens(&encoder, &[9]))?;
        ensure!(counted("standin_products")? == 0, "cuBLASLt was used");
        Ok(())
    }

    pub fn plans_are_few() -> Result<()> {
        let shape = RandomBert { hidden: 32, heads: 2, feed_forward: 64, layers: 2, ..RandomBert::default() };
        let encoder = cuda_encoder(&shape.write()?.source(), ElementType::F16, Some(cache()?))?;
        for length in 1..=130 {
            encoder.run(&tokens(&encoder, &[length]))?;
        }
        // Four maps in a layer; rows up to 64, to 128, to 256.
        ensure!(counted("standin_products")? == 130 * 8, "{} products", counted("standin_products")?);
        ensure!(counted("standin_heuristics")? == 4 * 3, "asked {} times", counted("standin_heuristics")?);
        Ok(())
    }

    pub fn out_of_memory_in_a_product_is_the_pass() -> Result<()> {
        let device = open()?;
        let encoder =
            Encoder::load_cuda(&fixture("tiny-long"), Arc::clone(&device), &CudaOptions::default(), 2)?;
        let items = tokens(&encoder, &[40, 3]);
        let before = device.memory();
        let refused = encoder.run(&items).err().context("it has run")?;
        ensure!(matches!(refused, PassError::OutOfMemory(_)), "{refused:?}");
        ensure!(device.memory() == before && device.lost().is_none(), "{:?}", device.memory());
        ensure!(encoder.run(&items)?.len() == 2);
        Ok(())
    }

    pub fn out_of_memory_at_the_start_is_told() -> Result<()> {
        let refused =
            cuda_encoder(&fixture("tiny-long"), ElementType::F16, None).err().context("it loads")?;
        ensure!(matches!(refused, LoadError::OutOfMemory(_)), "{refused:?}");
        Ok(())
    }

    pub fn a_product_that_fails_ends_its_pass_only() -> Result<()> {
        let encoder = cuda_encoder(&fixture("tiny-long"), ElementType::F16, None)?;
        let items = tokens(&encoder, &[40, 3]);
        let refused = encoder.run(&items).err().context("it has run")?;
        let told = "multiply matrices: CUBLAS_STATUS_EXECUTION_FAILED (13)";
        ensure!(matches!(&refused, PassError::Failed(text) if text.contains(told)), "{refused:?}");
        ensure!(encoder.run(&items)?.len() == 2);
        Ok(())
    }

    pub fn minilm_agrees_in_f32() -> Result<()> {
        lengths_agree(&minilm()?, &[ElementType::F32], &[3, 20])
    }

    pub fn minilm_agrees_in_16_bits() -> Result<()> {
        let source = minilm()?;
        let cpu = Encoder::load(&source, CpuDevice::new(1 << 30, 2)?)?;
        let items = tokens(&cpu, &[9, 40, 80]);
        let expected = vectors(&cpu.run(&items)?)?;
        for element in [ElementType::F16, ElementType::Bf16] {
            let found = vectors(&cuda_encoder(&source, element, Some(cache()?))?.run(&items)?)?;
            for (found, expected) in found.iter().zip(&expected) {
                let cosine = cosine(found, expected);
                ensure!(cosine >= 0.9999, "cosine {cosine} in {element}");
            }
        }
        Ok(())
    }

    pub fn turing_has_f16_and_f32() -> Result<()> {
        texts_agree(&fixture("tiny-mean"), &[ElementType::F32, ElementType::F16])?;
        let refused =
            cuda_encoder(&fixture("tiny-mean"), ElementType::Bf16, None).err().context("it loads")?;
        let told = refused.to_string();
        ensure!(told == "bf16 needs compute capability 8.0 or newer, the device has 7.5", "{told}");
        Ok(())
    }

    pub fn what_has_no_kernel_is_refused() -> Result<()> {
        let shapes = [
            (RandomBert { hidden: 160, heads: 2, ..RandomBert::default() }, "heads of 80 elements"),
            (
                RandomBert { hidden: 4104, heads: 513, feed_forward: 8, ..RandomBert::default() },
                "a width of 4104",
            ),
        ];
        for (shape, words) in shapes {
            let refused =
                cuda_encoder(&shape.write()?.source(), ElementType::F16, None).err().context("it loads")?;
            ensure!(refused.to_string().contains(words), "{refused}");
        }
        Ok(())
    }

    pub fn numbers_too_large_for_f16_are_refused() -> Result<()> {
        let model = RandomBert { scale: 1e6, ..RandomBert::default() }.write()?;
        let refused = cuda_encoder(&model.source(), ElementType::F16, None).err().context("it loads")?;
        ensure!(matches!(refused, LoadError::Unsupported { .. }), "{refused:?}");
        ensure!(refused.to_string().contains("dtype = \"bf16\""), "{refused}");
        cuda_encoder(&model.source(), ElementType::Bf16, None)?;
        Ok(())
    }

    pub fn a_pass_takes_its_plan_and_gives_it_back() -> Result<()> {
        let device = open()?;
        let before = device.memory();
        let options = CudaOptions::default();
        let encoder = Encoder::load_cuda(&fixture("tiny-long"), Arc::clone(&device), &options, 2)?;
        let loaded = device.memory();
        ensure!(before.free - loaded.free == encoder.resident_bytes(), "{before:?}, {loaded:?}");
        // More than there is: the same error as on any device, and the device is well after it.
        let vast: Vec<Item> = tokens(&encoder, &vec![512; 12_000]);
        let planned = encoder.pass_bytes(vast.iter().collect::<PassShape>());
        let refused = encoder.run(&vast).err().context("it has run")?;
        ensure!(refused.to_string().contains(&format!("asked for {planned} bytes")), "{refused}");
        ensure!(device.memory() == loaded, "{:?}", device.memory());
        ensure!(encoder.run(&tokens(&encoder, &[4]))?.len() == 1);
        ensure!(device.memory() == loaded && device.passing() == 0, "{:?}", device.memory());
        Ok(())
    }

    /// NVRTC's code goes to the cache, comes from there, and is made anew where the cache is broken.
    pub fn kernels_are_compiled_once() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let model = fixture("tiny-mean");
        let load = || cuda_encoder(&model, ElementType::F32, Some(folder.path().to_owned()));
        let code = || -> Result<Vec<PathBuf>> {
            let all =
                std::fs::read_dir(folder.path())?.map(|file| Ok(file?.path())).collect::<Result<Vec<_>>>()?;
            Ok(all.into_iter().filter(|file| file.extension().is_some_and(|own| own == "bin")).collect())
        };
        load()?;
        let [file] = &code()?[..] else { anyhow::bail!("{:?}", code()?) };
        let compiled = std::fs::read(file)?;
        let modified = std::fs::metadata(file)?.modified()?;
        load()?;
        ensure!(std::fs::metadata(file)?.modified()? == modified, "compiled again");
        std::fs::write(file, &compiled[..1000])?;
        load()?;
        ensure!(std::fs::read(file)? == compiled, "another code than before");
        Ok(())
    }
}

/// A number that the stand-in for cuBLASLt exports.
fn counted(what: &str) -> Result<usize> {
    // SAFETY: the library is loaded already, and the function is as in tests/standin/cublaslt.
    unsafe {
        let library = libloading::Library::new("libcublasLt.so.13")?;
        let counted: libloading::Symbol<'_, unsafe extern "C" fn() -> usize> =
            library.get(what.as_bytes())?;
        Ok(counted())
    }
}

fn open() -> Result<Arc<CudaDevice>> {
    let libraries = std::env::var_os("VRAMQ_TEST_NVRTC").map(PathBuf::from);
    Ok(CudaDevice::open(&Options { which: Which::Index(0), cap: None, lane: None, libraries })?)
}

fn cuda_encoder(source: &Source, element: ElementType, cache: Option<PathBuf>) -> Result<Encoder, LoadError> {
    let device = open().map_err(|error| LoadError::Tokenizer {
        path: PathBuf::from("the stand-in"),
        reason: error.to_string(),
    })?;
    Encoder::load_cuda(source, device, &CudaOptions { element, cache, ..CudaOptions::default() }, 2)
}

fn minilm() -> Result<Source> {
    let folder = root().join("models/all-MiniLM-L6-v2");
    let folder = std::env::var_os("VRAMQ_TEST_MODEL").map_or(folder, PathBuf::from);
    ensure!(
        folder.join("model.safetensors").exists(),
        "{} has no weights: run models/fetch",
        folder.display()
    );
    Ok(Source::Folder(folder))
}

/// Items of these lengths, of any of the model's tokens.
fn tokens(encoder: &Encoder, lengths: &[usize]) -> Vec<Item> {
    let vocabulary = encoder.dims().vocabulary as u32;
    // Any sequence without a short period.
    let mut state = 1_u32;
    let mut token = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % vocabulary
    };
    let item = |length: &usize| Item::Tokens {
        ids: (0..*length).map(|_| token()).collect(),
        format: EmbeddingFormat::default(),
    };
    lengths.iter().map(item).collect()
}

fn lengths_agree(source: &Source, elements: &[ElementType], lengths: &[usize]) -> Result<()> {
    agree(source, elements, |encoder| Ok(tokens(encoder, lengths)))
}

/// The texts of a fixture.
fn texts_agree(source: &Source, elements: &[ElementType]) -> Result<()> {
    let Source::Folder(folder) = source else { anyhow::bail!("{source} is no folder") };
    let texts: Vec<String> = serde_json::from_slice(&std::fs::read(folder.join("texts.json"))?)?;
    let inputs: Vec<Input> = texts.into_iter().map(Input::Text).collect();
    agree(source, elements, |encoder| Ok(encoder.prepare(&inputs, &Params::default())?))
}

/// Vectors of the GPU are those of the CPU, within what the type of elements can tell; and to the bit the same whether an
/// item is alone in its pass or not.
fn agree(
    source: &Source,
    elements: &[ElementType],
    items: impl Fn(&Encoder) -> Result<Vec<Item>>,
) -> Result<()> {
    let cpu = Encoder::load(source, CpuDevice::new(1 << 30, 2)?)?;
    let items = items(&cpu)?;
    let expected = vectors(&cpu.run(&items)?)?;
    for element in elements {
        let encoder = cuda_encoder(source, *element, Some(cache()?))?;
        let packed = vectors(&encoder.run(&items)?)?;
        for (at, (found, expected)) in packed.iter().zip(&expected).enumerate() {
            let what = format!("{source} in {element}, item {at} of {} tokens", items[at].cost());
            close(*element, found, expected).context(what)?;
        }
        for at in 0..items.len() {
            let alone = vectors(&encoder.run(&items[at..=at])?)?;
            ensure!(alone[0] == packed[at], "{source} in {element}: item {at} is another one alone");
        }
    }
    Ok(())
}

/// Compiled kernels, kept between runs of the tests.
fn cache() -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    Ok(test.ancestors().nth(2).context("tests run from a target folder")?.join("standin/kernels"))
}

fn vectors(outputs: &[Output]) -> Result<Vec<Vec<f32>>> {
    let vector = |output: &Output| match output {
        Output::Embedding(embedding) => Ok(embedding.values.to_f32()),
        other => anyhow::bail!("{other:?} is no embedding"),
    };
    outputs.iter().map(vector).collect()
}

/// ‖Δ‖/‖ref‖ ≤ 1e-5 in f32, cosine ≥ 0.9999 in f16. bf16 keeps eight bits of each number, and these small models have few
/// numbers to average over: NumPy, rounding after the same steps, gets the same cosines down to 0.9996. So there it is 0.999;
/// MiniLM has to keep to 0.9999.
fn close(element: ElementType, found: &[f32], expected: &[f32]) -> Result<()> {
    ensure!(found.len() == expected.len(), "{} numbers", found.len());
    let delta: Vec<f32> = found.iter().zip(expected).map(|(x, y)| x - y).collect();
    let (off, size) = (dot(&delta, &delta).sqrt(), dot(expected, expected).sqrt());
    if size == 0.0 {
        ensure!(off == 0.0, "{off} instead of zeros");
        return Ok(());
    }
    let cosine = cosine(found, expected);
    let is_close = match element {
        ElementType::F32 => off / size <= 1e-5,
        ElementType::F16 => cosine >= 0.9999,
        ElementType::Bf16 => cosine >= 0.999,
    };
    ensure!(is_close, "relative error {}, cosine {cosine}", off / size);
    Ok(())
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}
