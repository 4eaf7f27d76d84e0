//! Matrix products by cuBLASLt: a fake of it beside the emulation of a GPU, which refuses what the library's documentation
//! refuses (tests/fake_cuda/cublaslt).

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use vramq_inference::device::Device as _;
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::device::cuda::CudaDevice;
use vramq_inference::engine::encoder::cuda::{CudaOptions, ElementType};
use vramq_inference::engine::encoder::{Encoder, LoadError};
use vramq_inference::engine::{Engine as _, PassError};
use vramq_schemas::{Input, Params};
use vramq_tests::bert::{RandomBert, fixture, reference};
use vramq_tests::encoders::{
    all_as_referred, cache, cuda_encoder, lengths_agree, open, texts_agree, tokens, vectors, vectors_agree,
};
use vramq_tests::fake_cuda::{cublaslt, gpu};
use vramq_tests::lengths::Lengths;
use vramq_tests::resized::resized;
use vramq_tests::with_libraries;

with_libraries! { [gpu()?, cublaslt()?];
    it_agrees = products_agree: [];
    it_agrees_for_other_families = other_families_agree: [];
    it_agrees_where_heads_share_keys = shared_keys_agree: [];
    it_is_asked_once_for_about_so_many_rows = plans_are_few: [];
    it_does_not_take_all_models = rows_that_are_not_aligned_are_multiplied_here: [];
    it_need_not_be_used = own_products_can_be_chosen: [];
    it_may_not_start = without_its_products: ["FAKE_CUDA_FAIL" = "cublasLtCreate:1:8:0"];
    it_may_have_no_algorithm = without_its_products:
        ["FAKE_CUDA_FAIL" = "cublasLtMatmulAlgoGetHeuristic:1:15:0"];
    it_may_refuse_a_product_once = a_refused_product_is_asked_for_once_more:
        ["FAKE_CUDA_FAIL" = "cublasLtMatmul:3:15,cublasLtMatmul:9:7"];
    it_may_refuse_a_product_twice = a_product_that_is_refused_twice_is_made_here:
        ["FAKE_CUDA_FAIL" = "cublasLtMatmul:3:15:2"];
    it_may_run_out_of_memory = out_of_memory_in_a_product_is_the_pass:
        ["FAKE_CUDA_FAIL" = "cublasLtMatmul:2:3"];
    it_may_start_without_memory = out_of_memory_at_the_start_is_told: ["FAKE_CUDA_FAIL" = "cublasLtCreate:1:3"];
    it_is_tried_while_the_model_loads = products_are_tried_at_load: [];
    it_may_run_out_of_memory_at_load = a_full_device_is_no_reason_not_to_load: ["FAKE_CUDA_FAIL" = "cublasLtMatmul:3:3"];
    its_fastest_algorithm_is_used = the_second_algorithm_is_used: ["FAKE_CUDA_ALGORITHMS" = "5,2,9"];
    its_first_algorithm_is_used_if_others_are_hardly_faster = the_first_algorithm_is_used:
        ["FAKE_CUDA_ALGORITHMS" = "5,4.9,9"];
    its_algorithms_are_timed_at_load_only = without_a_warm_start: ["FAKE_CUDA_ALGORITHMS" = "5,2"];
    its_algorithms_are_timed_four_at_most = the_first_algorithm_is_used: ["FAKE_CUDA_ALGORITHMS" = "5,6,7,8,1"];
    its_algorithms_may_be_refused = the_second_algorithm_is_used_elsewhere:
        ["FAKE_CUDA_ALGORITHMS" = "5,2,9", "FAKE_CUDA_FAIL" = "cublasLtMatmul:3:15"];
    its_algorithms_may_take_even_numbers_only = the_first_algorithm_is_used:
        ["FAKE_CUDA_ALGORITHMS" = "5,2", "FAKE_CUDA_EVEN" = "1"];
    its_algorithms_cannot_be_timed_without_times = the_first_algorithm_is_used:
        ["FAKE_CUDA_ALGORITHMS" = "5,2", "FAKE_CUDA_FAIL" = "cuEventElapsedTime:1:801:0"];
    its_algorithms_cannot_be_timed_without_events = the_first_algorithm_is_used:
        ["FAKE_CUDA_ALGORITHMS" = "5,2", "FAKE_CUDA_FAIL" = "cuEventCreate:2:801:0"];
    its_algorithms_may_find_no_room = the_first_algorithm_is_used:
        ["FAKE_CUDA_ALGORITHMS" = "5,2", "FAKE_CUDA_FAIL" = "cublasLtMatmul:3:3"];
    code_of_its_algorithms_is_counted: ["FAKE_CUDA_ALGORITHMS" = "5,2,9", "FAKE_CUDA_CODE_MIB" = "40"];
    a_device_may_be_lost_while_algorithms_are_timed = a_lost_device_does_not_load:
        ["FAKE_CUDA_ALGORITHMS" = "5,2", "FAKE_CUDA_FAIL" = "cuEventElapsedTime:1:700"];
    it_may_fail = a_product_that_fails_ends_its_pass_only: ["FAKE_CUDA_FAIL" = "cublasLtMatmul:2:13"];
}

const ALL: [ElementType; 3] = [ElementType::F32, ElementType::F16, ElementType::Bf16];

mod bodies {
    use super::*;

    /// Of shapes whose rows cuBLASLt takes.
    fn aligned_shapes_agree() -> Result<()> {
        for name in ["bert-2x64x2x256", "bert-1x96x3x200"] {
            lengths_agree(name, &ALL, &[1, 7, 64, 65, 130, 0])?;
        }
        Ok(())
    }

    pub fn products_agree() -> Result<()> {
        aligned_shapes_agree()?;
        ensure!(counted("fake_cuda_products")? > 0, "cuBLASLt was not used");
        Ok(())
    }

    /// Those of which a fixture has rows that cuBLASLt takes in 16 bits.
    pub fn other_families_agree() -> Result<()> {
        for name in ["tiny-roberta", "tiny-modernbert", "tiny-nomic", "tiny-gte-no-types"] {
            for element in ALL {
                let before = counted("fake_cuda_products")?;
                texts_agree(name, &[element])?;
                ensure!(
                    counted("fake_cuda_products")? > before,
                    "{name} in {element}: cuBLASLt was not used"
                );
            }
        }
        Ok(())
    }

    /// Fixtures of Qwen3 and Gemma have no such rows, so their models get other sizes, and random weights. The CPU, which agrees with
    /// transformers on the fixtures, makes what is expected.
    pub fn shared_keys_agree() -> Result<()> {
        let models = [
            ("tiny-qwen3", &[(36, 64), (100, 96), (10, 16), (20, 32), (40, 64)][..]),
            ("tiny-gemma", &[(36, 64), (100, 96), (12, 16), (48, 64)]),
        ];
        for (name, sizes) in models {
            let model = resized(name, sizes)?;
            let texts: Vec<String> = reference(name)?.0.into_iter().filter(|text| text.len() < 200).collect();
            let inputs: Vec<Input> = texts.iter().cloned().map(Input::Text).collect();
            let cpu = Encoder::load_f32(&model.source(), CpuDevice::new(1 << 30, 2)?)?;
            let expected = vectors(&cpu.run(&cpu.prepare(&inputs, &Params::default())?)?)?;
            for element in ALL {
                let before = counted("fake_cuda_products")?;
                vectors_agree(&model.source(), (texts.clone(), expected.clone()), &[element])?;
                ensure!(
                    counted("fake_cuda_products")? > before,
                    "{name} in {element}: cuBLASLt was not used"
                );
            }
        }
        Ok(())
    }

    /// Two passes, whose vectors are to be transformers': how many products cuBLASLt made, and how often it was asked.
    fn two_passes() -> Result<(usize, usize)> {
        let reference = Lengths::read("bert-2x64x2x256")?;
        let (items, expected) = reference.of(&[1, 7, 64, 65, 130])?;
        let encoder = cuda_encoder(&reference.source, ElementType::F32, Some(cache()?))?;
        for _ in 0..2 {
            all_as_referred(ElementType::F32, &vectors(&encoder.run(&items)?)?, &expected)?;
        }
        Ok((counted("fake_cuda_products")?, counted("fake_cuda_heuristics")?))
    }

    pub fn a_refused_product_is_asked_for_once_more() -> Result<()> {
        // Four maps in a layer, two layers, two passes; asked once for each map, and for each of the two refusals.
        let found = two_passes()?;
        ensure!(found == (16, 4 + 2), "{found:?}");
        Ok(())
    }

    pub fn a_product_that_is_refused_twice_is_made_here() -> Result<()> {
        // That map's four products, and no other's.
        let found = two_passes()?;
        ensure!(found == (12, 4 + 1), "{found:?}");
        Ok(())
    }

    pub fn without_its_products() -> Result<()> {
        aligned_shapes_agree()?;
        ensure!(counted("fake_cuda_products")? == 0, "cuBLASLt was used");
        Ok(())
    }

    pub fn rows_that_are_not_aligned_are_multiplied_here() -> Result<()> {
        lengths_agree("bert-1x60x3x100", &[ElementType::F16], &[3, 70])?;
        ensure!(counted("fake_cuda_products")? == 0 && counted("fake_cuda_heuristics")? == 0);
        Ok(())
    }

    pub fn own_products_can_be_chosen() -> Result<()> {
        let options = CudaOptions { own_products: true, cache: Some(cache()?), ..CudaOptions::default() };
        let encoder = Encoder::load_cuda(&fixture("tiny-long"), open()?, &options, 2)?;
        encoder.run(&tokens(&encoder, &[9]))?;
        ensure!(counted("fake_cuda_products")? == 0, "cuBLASLt was used");
        Ok(())
    }

    pub fn plans_are_few() -> Result<()> {
        let shape = RandomBert { hidden: 32, heads: 2, feed_forward: 64, layers: 2, ..RandomBert::default() };
        let encoder = cuda_encoder(&shape.write()?.source(), ElementType::F16, Some(cache()?))?;
        for length in 1..=130 {
            encoder.run(&tokens(&encoder, &[length]))?;
        }
        // Four maps in a layer; rows up to 64, to 128, to 192.
        ensure!(counted("fake_cuda_products")? == 130 * 8, "{} products", counted("fake_cuda_products")?);
        ensure!(
            counted("fake_cuda_heuristics")? == 4 * 3,
            "asked {} times",
            counted("fake_cuda_heuristics")?
        );
        Ok(())
    }

    fn load_warm(device: Arc<CudaDevice>) -> Result<Encoder> {
        let options = CudaOptions {
            pass_tokens: Some(100),
            warm_up: true,
            cache: Some(cache()?),
            ..CudaOptions::default()
        };
        Ok(Encoder::load_cuda(&fixture("tiny-long"), device, &options, 2)?)
    }

    pub fn products_are_tried_at_load() -> Result<()> {
        let device = open()?;
        let before = device.memory();
        let encoder = load_warm(Arc::clone(&device))?;
        // Four maps, rows up to 64 and to 128.
        ensure!(counted("fake_cuda_products")? == 8 && counted("fake_cuda_heuristics")? == 8);
        ensure!(before.free - device.memory().free == encoder.resident_bytes(), "{:?}", device.memory());
        for length in [1, 64, 65, 100] {
            encoder.run(&tokens(&encoder, &[length]))?;
        }
        ensure!(counted("fake_cuda_heuristics")? == 8, "asked {} times", counted("fake_cuda_heuristics")?);
        Ok(())
    }

    /// Which algorithms make the products of a pass, whose vectors are to be transformers': how many are by each of the first three.
    fn algorithms_of_a_pass(warm_up: bool) -> Result<[usize; 3]> {
        let options = CudaOptions {
            element: Some(ElementType::F32),
            pass_tokens: Some(100),
            warm_up,
            cache: Some(cache()?),
            ..CudaOptions::default()
        };
        let encoder = Encoder::load_cuda(&fixture("tiny-long"), open()?, &options, 2)?;
        let (items, expected) = Lengths::read("tiny-long")?.of(&[9, 31])?;
        let counts = || [counted_by(0), counted_by(1), counted_by(2)].into_iter().collect::<Result<Vec<_>>>();
        let before = counts()?;
        all_as_referred(ElementType::F32, &vectors(&encoder.run(&items)?)?, &expected)?;
        let after = counts()?;
        Ok([0, 1, 2].map(|at| after[at] - before[at]))
    }

    /// Four maps in each layer.
    fn products_of_a_pass() -> Result<usize> {
        Ok(4 * Encoder::load_f32(&fixture("tiny-long"), CpuDevice::new(1 << 30, 2)?)?.dims().layers)
    }

    pub fn the_second_algorithm_is_used() -> Result<()> {
        let (found, all) = (algorithms_of_a_pass(true)?, products_of_a_pass()?);
        ensure!(found == [0, all, 0], "{found:?}");
        // Two buckets of four maps; one product as before, one of each algorithm, and three measurements of four.
        let at_load = 8 * (1 + 3 + 3 * 3 * 4);
        ensure!(counted("fake_cuda_products")? == at_load + all, "{}", counted("fake_cuda_products")?);
        ensure!(counted("fake_cuda_heuristics")? == 8, "asked {} times", counted("fake_cuda_heuristics")?);
        Ok(())
    }

    pub fn the_first_algorithm_is_used() -> Result<()> {
        let (found, all) = (algorithms_of_a_pass(true)?, products_of_a_pass()?);
        ensure!(found == [all, 0, 0], "{found:?}");
        Ok(())
    }

    pub fn without_a_warm_start() -> Result<()> {
        let (found, all) = (algorithms_of_a_pass(false)?, products_of_a_pass()?);
        ensure!(found == [all, 0, 0] && counted("fake_cuda_products")? == all, "{found:?}");
        Ok(())
    }

    /// The library refuses the second algorithm for the first map, once: that is enough.
    pub fn the_second_algorithm_is_used_elsewhere() -> Result<()> {
        let (found, all) = (algorithms_of_a_pass(true)?, products_of_a_pass()?);
        ensure!(found == [all / 4, all - all / 4, 0], "{found:?}");
        Ok(())
    }

    /// Of three algorithms, 40 MiB each.
    pub fn code_of_its_algorithms_is_counted() -> Result<()> {
        const CODE: u64 = 120 << 20;
        let device = open()?;
        let (before, overhead) = (device.memory(), device.overhead());
        let encoder = load_warm(Arc::clone(&device))?;
        ensure!(device.overhead() - overhead == CODE, "{} bytes of code", device.overhead() - overhead);
        let after = device.memory();
        ensure!(before.free - after.free == encoder.resident_bytes() + CODE, "{before:?}, {after:?}");
        ensure!(after.foreign == before.foreign, "{before:?}, {after:?}");
        for length in [1, 64, 65, 100] {
            encoder.run(&tokens(&encoder, &[length]))?;
        }
        device.read()?;
        ensure!(device.memory() == after, "{:?}, {after:?}", device.memory());
        Ok(())
    }

    pub fn a_lost_device_does_not_load() -> Result<()> {
        let device = open()?;
        let refused = load_warm(Arc::clone(&device)).err().context("it loads")?;
        ensure!(format!("{refused:#}").contains("CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "{refused:#}");
        ensure!(device.lost().is_some());
        Ok(())
    }

    pub fn a_full_device_is_no_reason_not_to_load() -> Result<()> {
        let encoder = load_warm(open()?)?;
        ensure!(counted("fake_cuda_products")? == 2, "{} products", counted("fake_cuda_products")?);
        ensure!(encoder.run(&tokens(&encoder, &[70, 3]))?.len() == 2);
        Ok(())
    }

    pub fn out_of_memory_in_a_product_is_the_pass() -> Result<()> {
        let device = open()?;
        let options = CudaOptions { cache: Some(cache()?), ..CudaOptions::default() };
        let encoder = Encoder::load_cuda(&fixture("tiny-long"), Arc::clone(&device), &options, 2)?;
        let items = tokens(&encoder, &[40, 3]);
        let before = device.memory();
        let refused = encoder.run(&items).err().context("it has run")?;
        ensure!(matches!(refused, PassError::OutOfMemory { .. }), "{refused:?}");
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
        let encoder = cuda_encoder(&fixture("tiny-long"), ElementType::F16, Some(cache()?))?;
        let items = tokens(&encoder, &[40, 3]);
        let refused = encoder.run(&items).err().context("it has run")?;
        let message = "multiply matrices: CUBLAS_STATUS_EXECUTION_FAILED (13)";
        ensure!(matches!(&refused, PassError::Failed(text) if text.contains(message)), "{refused:?}");
        ensure!(encoder.run(&items)?.len() == 2);
        Ok(())
    }
}

/// Products that the fake cuBLASLt has made by an algorithm.
fn counted_by(number: usize) -> Result<usize> {
    // SAFETY: the library is loaded already, and the function is as in tests/fake_cuda/cublaslt.
    unsafe {
        let library = libloading::Library::new("libcublasLt.so.13")?;
        let counted: libloading::Symbol<'_, unsafe extern "C" fn(usize) -> usize> =
            library.get(b"fake_cuda_products_by")?;
        Ok(counted(number))
    }
}

/// A number that the fake cuBLASLt exports.
fn counted(what: &str) -> Result<usize> {
    // SAFETY: the library is loaded already, and the function is as in tests/fake_cuda/cublaslt.
    unsafe {
        let library = libloading::Library::new("libcublasLt.so.13")?;
        let counted: libloading::Symbol<'_, unsafe extern "C" fn() -> usize> =
            library.get(what.as_bytes())?;
        Ok(counted())
    }
}
