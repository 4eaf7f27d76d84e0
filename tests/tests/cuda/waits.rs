//! Every wait for the GPU is needed: a test fails without it. The fake driver does a stream's work as late as allowed
//! (tests/fake_cuda/stream.c), and skips single waits on request. `wait_list.rs` lists all waits.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use vramq_inference::device::Device as _;
use vramq_inference::device::cuda::{CudaDevice, Timer};
use vramq_inference::engine::encoder::cuda::{CudaOptions, ElementType};
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_inference::engine::{Engine as _, Item, PassError};
use vramq_tests::bert::{RandomBert, fixture};
use vramq_tests::encoders::{all_as_referred, cache, open, tokens, vectors};
use vramq_tests::fake_cuda::{cublaslt, gpu};
use vramq_tests::lengths::Lengths;
use vramq_tests::with_libraries;

with_libraries! { [gpu()?];
    weights_wait_for_their_way_to_the_device = an_upload_with: [];
    weights_do_not_arrive_without_the_wait = an_upload_without: [];
    weights_may_be_staged_by_the_driver = an_upload_without_is_well: ["FAKE_CUDA_PAGEABLE" = "staged"];
    a_pass_waits_for_its_kernels = a_pass_with: ["FAKE_CUDA_FAIL" = "kernel:2:700"];
    a_pass_does_not_see_its_kernels_error_without_the_wait = a_pass_without: ["FAKE_CUDA_FAIL" = "kernel:2:700"];
    vectors_are_not_there_without_any_wait: [];
    a_refusal_waits_for_earlier_work = a_refusal_with: ["FAKE_CUDA_FAIL" = "kernel:2:700,cuLaunchKernel:4:1"];
    a_refusal_is_taken_at_its_word_without_the_wait = a_refusal_without:
        ["FAKE_CUDA_FAIL" = "kernel:2:700,cuLaunchKernel:4:1"];
    a_long_wait_is_one = a_sleep_with: [];
    a_long_wait_is_needed = a_sleep_without: [];
    a_long_pass_waits_for_its_kernels = a_pass_that_is_long_with: ["FAKE_CUDA_FAIL" = "kernel:2:700"];
    a_long_pass_does_not_see_its_kernels_error_without_the_wait = a_pass_that_is_long_without:
        ["FAKE_CUDA_FAIL" = "kernel:2:700"];
    a_time_is_of_work_that_has_ended = a_time_with: [];
    a_time_is_not_known_without_the_wait = a_time_without: [];
    a_trim_waits_for_what_is_freed = a_trim_with: ["FAKE_CUDA_FAIL" = "cuMemAllocFromPoolAsync:2:2"];
    a_trim_gives_nothing_back_without_the_wait = a_trim_without: ["FAKE_CUDA_FAIL" = "cuMemAllocFromPoolAsync:2:2"];
    memory_is_not_freed_under_a_copy = an_early_end_with: ["FAKE_CUDA_POOLS" = "0"];
    memory_that_is_freed_under_a_copy_shows = an_early_end_without: ["FAKE_CUDA_POOLS" = "0"];
    host_memory_is_read_when_a_copy_runs: [];
    host_memory_may_be_read_in_the_call: ["FAKE_CUDA_PAGEABLE" = "staged"];
}

with_libraries! { [gpu()?, cublaslt()?];
    an_arena_waits_for_a_failed_pass = an_arenas_end_with: ["FAKE_CUDA_FAIL" = "cublasLtMatmul:2:3"];
    staging_is_used_too_early_without_the_wait = an_arenas_end_without: ["FAKE_CUDA_FAIL" = "cublasLtMatmul:2:3"];
}

/// Waits that are left out: after so many, so many.
type LeftOut = (usize, usize);

/// None.
const NONE: LeftOut = (0, 0);
const THE_NEXT: LeftOut = (0, 1);

fn leave_out((after, count): LeftOut) -> Result<()> {
    // SAFETY: the library is loaded already, and the function is as in tests/fake_cuda/stream.c.
    unsafe {
        let library = libloading::Library::new("libcuda.so.1")?;
        let leave_out: libloading::Symbol<'_, unsafe extern "C" fn(usize, usize)> =
            library.get(b"fake_cuda_ignore_waits")?;
        leave_out(after, count);
    }
    Ok(())
}

/// Checks what a test reports when a wait is left out. Another error, or none, is a mistake in this file.
fn shows(result: Result<()>, words: &str) -> Result<()> {
    let error = result.err().context("the wait can be left out, and nothing shows")?;
    ensure!(format!("{error:#}").contains(words), "something else goes wrong: {error:#}");
    Ok(())
}

mod bodies {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// The error with which the fake driver ends a context whose program changes memory during a copy.
    const MEMORY_CHANGED: &str = "CUDA_ERROR_LAUNCH_FAILED (719)";

    fn encoder(device: &Arc<CudaDevice>) -> Result<Encoder> {
        encoder_of(&fixture("tiny-mean"), device)
    }

    fn encoder_of(source: &Source, device: &Arc<CudaDevice>) -> Result<Encoder> {
        let options =
            CudaOptions { element: Some(ElementType::F32), cache: Some(cache()?), ..CudaOptions::default() };
        Ok(Encoder::load_cuda(source, Arc::clone(device), &options, 2)?)
    }

    /// Items for that model, and the vectors that transformers made of them.
    fn items_and_vectors() -> Result<(Vec<Item>, Vec<Vec<f32>>)> {
        Lengths::read("tiny-mean")?.of(&[9, 3])
    }

    fn upload(left_out: LeftOut) -> Result<()> {
        let device = open()?;
        leave_out(left_out)?;
        let encoder = encoder(&device)?;
        leave_out(NONE)?;
        let (items, expected) = items_and_vectors()?;
        all_as_referred(ElementType::F32, &vectors(&encoder.run(&items)?)?, &expected)
    }

    pub fn an_upload_with() -> Result<()> {
        upload(NONE)
    }

    pub fn an_upload_without() -> Result<()> {
        shows(upload((0, usize::MAX)), MEMORY_CHANGED)
    }

    /// Without this wait the upload is still right, because the driver copies memory that is not page-locked itself.
    pub fn an_upload_without_is_well() -> Result<()> {
        upload((0, usize::MAX))
    }

    /// A kernel fails while it runs: that is the pass's error.
    fn pass(source: &Source, lengths: &[usize], left_out: LeftOut) -> Result<()> {
        let device = open()?;
        let encoder = encoder_of(source, &device)?;
        leave_out(left_out)?;
        let ended = encoder.run(&tokens(&encoder, lengths));
        let Err(PassError::DeviceLost(error)) = ended else { bail!("the pass ended with {ended:?}") };
        ensure!(error == "wait for the device: CUDA_ERROR_ILLEGAL_ADDRESS (700)", "{error}");
        let loss = device.lost().context("the device is not lost")?;
        ensure!(!loss.is_late, "{loss:?}");
        Ok(())
    }

    pub fn a_pass_with() -> Result<()> {
        pass(&fixture("tiny-mean"), &[9, 3], NONE)
    }

    pub fn a_pass_without() -> Result<()> {
        shows(pass(&fixture("tiny-mean"), &[9, 3], THE_NEXT), "the pass ended with Ok")
    }

    /// A pass that multiplies so much that its thread sleeps through it. No product is computed: the first one fails.
    fn long_pass(left_out: LeftOut) -> Result<()> {
        let shape =
            RandomBert { hidden: 1024, heads: 16, feed_forward: 4096, layers: 2, ..RandomBert::default() };
        pass(&shape.write()?.source(), &[256; 16], left_out)
    }

    pub fn a_pass_that_is_long_with() -> Result<()> {
        long_pass(NONE)
    }

    pub fn a_pass_that_is_long_without() -> Result<()> {
        shows(long_pass(THE_NEXT), "the pass ended with Ok")
    }

    /// A pass waits twice: for its vectors, and before its arena is freed. Without both, there are none.
    pub fn vectors_are_not_there_without_any_wait() -> Result<()> {
        let device = open()?;
        let encoder = encoder(&device)?;
        let (items, expected) = items_and_vectors()?;
        leave_out((0, 2))?;
        let found = vectors(&encoder.run(&items)?)?;
        leave_out(NONE)?;
        shows(all_as_referred(ElementType::F32, &found, &expected), "off by")
    }

    /// A launch is refused while an earlier kernel, which will fail, has not run: the device is lost, not the launch refused.
    fn refusal(left_out: LeftOut) -> Result<()> {
        let encoder = encoder(&open()?)?;
        let (items, _) = items_and_vectors()?;
        leave_out(left_out)?;
        let ended = encoder.run(&items);
        let Err(PassError::DeviceLost(error)) = ended else { bail!("the pass ended with {ended:?}") };
        ensure!(error == "launch a kernel: CUDA_ERROR_ILLEGAL_ADDRESS (700)", "{error}");
        Ok(())
    }

    pub fn a_refusal_with() -> Result<()> {
        refusal(NONE)
    }

    pub fn a_refusal_without() -> Result<()> {
        shows(refusal(THE_NEXT), "the pass ended with Err(Failed(\"launch a kernel")
    }

    fn sleep(left_out: LeftOut) -> Result<()> {
        let device = open()?;
        let memory = device.alloc(64)?;
        let mut back = [0; 64];
        // SAFETY: as many bytes, which are not touched before the waits below.
        unsafe { device.copy_in("copy in", memory.start(), &[7; 64]) }?;
        device.synchronize()?;
        // SAFETY: as above.
        unsafe { device.copy_out("copy out", &mut back, memory.start()) }?;
        leave_out(left_out)?;
        device.synchronize_asleep()?;
        let found = back;
        // What was left out would write to memory that is no more.
        device.synchronize()?;
        ensure!(found == [7; 64], "{found:?}");
        Ok(())
    }

    pub fn a_sleep_with() -> Result<()> {
        sleep(NONE)
    }

    pub fn a_sleep_without() -> Result<()> {
        shows(sleep(THE_NEXT), "[0, 0, 0, 0,")
    }

    /// Two pieces of work, each of which takes a microsecond by the fake driver's clock, and the record behind them.
    fn time(left_out: LeftOut) -> Result<()> {
        let device = open()?;
        let memory = device.alloc(64)?;
        let bytes = [7; 64];
        let timer = Timer::new(&device)?;
        timer.start()?;
        for _ in 0..2 {
            // SAFETY: as many bytes, which are not touched before the memory is freed, which waits.
            unsafe { device.copy_in("copy in", memory.start(), &bytes) }?;
        }
        leave_out(left_out)?;
        let ms = timer.stop()?;
        ensure!((ms - 0.003).abs() < 1e-5, "{ms} ms");
        Ok(())
    }

    pub fn a_time_with() -> Result<()> {
        time(NONE)
    }

    pub fn a_time_without() -> Result<()> {
        shows(time(THE_NEXT), "measure how long work takes: CUDA_ERROR_NOT_READY (600)")
    }

    /// The driver refuses an allocation once; what a pass has left goes back to the system before it is asked again.
    fn trim(left_out: LeftOut) -> Result<()> {
        let device = open()?;
        let free = || Ok::<_, anyhow::Error>(device.context().free_and_total()?.0 as u64);
        let before = free()?;
        drop(device.alloc_arena(384 * MIB as usize)?);
        leave_out(left_out)?;
        let _arena = device.alloc_arena(128 * MIB as usize)?;
        let taken = (before - free()?) / MIB;
        ensure!(taken == 128, "{taken} MiB of the device are taken");
        Ok(())
    }

    pub fn a_trim_with() -> Result<()> {
        trim(NONE)
    }

    pub fn a_trim_without() -> Result<()> {
        shows(trim(THE_NEXT), "384 MiB of the device are taken")
    }

    /// A pass runs out of memory in the middle, with its ids still to be copied. The next one stages its own.
    fn arenas_end(left_out: LeftOut) -> Result<()> {
        let reference = Lengths::read("bert-2x64x2x128")?;
        let encoder = encoder_of(&reference.source, &open()?)?;
        leave_out(left_out)?;
        let ended = encoder.run(&tokens(&encoder, &[40, 3]));
        ensure!(matches!(ended, Err(PassError::OutOfMemory { .. })), "{ended:?}");
        let (items, expected) = reference.of(&[9, 50])?;
        all_as_referred(ElementType::F32, &vectors(&encoder.run(&items)?)?, &expected)
    }

    pub fn an_arenas_end_with() -> Result<()> {
        arenas_end(NONE)
    }

    pub fn an_arenas_end_without() -> Result<()> {
        shows(arenas_end(THE_NEXT), MEMORY_CHANGED)
    }

    /// On a driver without pools memory is gone as soon as it is freed.
    fn early_end(left_out: LeftOut) -> Result<()> {
        let device = open()?;
        let memory = device.alloc(64)?;
        let mut back = [0; 64];
        // SAFETY: as many bytes, which are not touched before the wait below.
        unsafe { device.copy_out("copy out", &mut back, memory.start()) }?;
        leave_out(left_out)?;
        drop(memory);
        device.synchronize()?;
        Ok(())
    }

    pub fn an_early_end_with() -> Result<()> {
        early_end(NONE)
    }

    pub fn an_early_end_without() -> Result<()> {
        shows(early_end(THE_NEXT), "CUDA_ERROR_ILLEGAL_ADDRESS (700)")
    }

    fn changed_under_a_copy() -> Result<[u8; 64]> {
        let device = open()?;
        let memory = device.alloc(64)?;
        let (mut bytes, mut back) = ([7; 64], [0; 64]);
        // SAFETY: as many bytes, all of them alive until the wait below. That they change is what is looked at.
        unsafe {
            device.copy_in("copy in", memory.start(), &bytes)?;
            std::ptr::from_mut(&mut bytes).write_volatile([8; 64]);
            device.copy_out("copy out", &mut back, memory.start())?;
        }
        device.synchronize()?;
        Ok(back)
    }

    pub fn host_memory_is_read_when_a_copy_runs() -> Result<()> {
        shows(changed_under_a_copy().map(drop), MEMORY_CHANGED)
    }

    pub fn host_memory_may_be_read_in_the_call() -> Result<()> {
        ensure!(changed_under_a_copy()? == [7; 64]);
        Ok(())
    }
}
