//! Detects an out-of-memory that a program could not report: by known texts on standard error, and by how the program ended.

use super::keeper::Death;
use super::protocol::OomReport;

/// A text that a framework prints when the device's memory runs out. All parts must occur in one line.
struct Sign {
    source: &'static str,
    parts: &'static [&'static str],
}

/// The texts of each framework's own sources, as of the versions that are in use in 2026.
const SIGNS: [Sign; 27] = [
    Sign { source: "torch", parts: &["torch.cuda.OutOfMemoryError"] },
    Sign { source: "torch", parts: &["torch.OutOfMemoryError"] },
    Sign { source: "torch", parts: &["CUDA out of memory. Tried to allocate"] },
    Sign { source: "torch", parts: &["HIP out of memory. Tried to allocate"] },
    Sign { source: "torch", parts: &["XPU out of memory. Tried to allocate"] },
    Sign { source: "torch", parts: &["c10::OutOfMemoryError"] },
    Sign { source: "ctranslate2", parts: &["CUDA failed with error out of memory"] },
    Sign { source: "ggml", parts: &["cudaMalloc failed: out of memory"] },
    Sign { source: "tensorrt", parts: &["Cuda Runtime (out of memory)"] },
    Sign { source: "paddle", parts: &["Out of memory error on GPU"] },
    Sign { source: "cublas", parts: &["CUBLAS_STATUS_ALLOC_FAILED"] },
    Sign { source: "cublas", parts: &["HIPBLAS_STATUS_ALLOC_FAILED"] },
    Sign { source: "cudnn", parts: &["CUDNN_STATUS_ALLOC_FAILED"] },
    Sign { source: "cudnn", parts: &["CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"] },
    Sign { source: "jax", parts: &["RESOURCE_EXHAUSTED: Out of memory"] },
    Sign { source: "jax", parts: &["RESOURCE_EXHAUSTED", "allocat"] },
    Sign { source: "tensorflow", parts: &["ResourceExhaustedError", "OOM when allocating"] },
    Sign { source: "onnxruntime", parts: &["onnxruntime", "Failed to allocate memory"] },
    Sign { source: "onnxruntime", parts: &["BFCArena", "Failed to allocate memory"] },
    Sign { source: "cupy", parts: &["cupy.cuda.memory.OutOfMemoryError"] },
    Sign { source: "cuda", parts: &["cudaErrorMemoryAllocation"] },
    Sign { source: "cuda", parts: &["CUDA_ERROR_OUT_OF_MEMORY"] },
    Sign { source: "cuda", parts: &["CUDA error", "out of memory"] },
    Sign { source: "cuda", parts: &["CUDA failure 2:", "out of memory"] },
    Sign { source: "hip", parts: &["HIP error", "out of memory"] },
    Sign { source: "vulkan", parts: &["ErrorOutOfDeviceMemory"] },
    Sign { source: "vulkan", parts: &["VK_ERROR_OUT_OF_DEVICE_MEMORY"] },
];

/// What the end of a program says about memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryVerdict {
    /// The device's memory ran out.
    Device(Box<OomReport>),
    /// The host's memory ran out, and the kernel or the keeper killed it.
    Host,
    /// Nothing.
    Other,
}

/// Judges a program that failed, by how it ended and by the last that it printed. How it ended counts first, because a program that
/// the kernel killed could not say why.
pub fn judge(death: Death, stderr: &str) -> MemoryVerdict {
    match death {
        // 137 is how a shell or a container reports SIGKILL.
        Death::Killed(libc::SIGKILL) | Death::Exited(137) | Death::HostMemory(_) | Death::HostFull(_) => {
            return MemoryVerdict::Host;
        }
        // The program did not end because of memory, even if it had run out of it before.
        Death::Exited(0) | Death::Killed(libc::SIGTERM) | Death::Processes(_) | Death::KeeperLost => {
            return MemoryVerdict::Other;
        }
        _ => {}
    }
    // The last such line: the program may have caught earlier ones.
    let found = stderr.lines().rev().find_map(|line| {
        let sign = SIGNS.iter().find(|sign| sign.parts.iter().all(|part| line.contains(part)))?;
        Some((sign, line))
    });
    found.map_or(MemoryVerdict::Other, |(sign, line)| {
        let report = OomReport {
            asked: size_after(
                line,
                &["Tried to allocate ", "trying to allocate ", "requested buffer of size ", "allocating "],
            ),
            free: size_before(line, " is free"),
            total: size_after(line, &["total capacity of "]),
            source: sign.source.to_owned(),
            detail: line.trim().to_owned(),
        };
        MemoryVerdict::Device(Box::new(report))
    })
}

/// `2.00 GiB` after one of these words.
fn size_after(line: &str, words: &[&str]) -> Option<u64> {
    let rest = words.iter().find_map(|word| Some(&line[line.find(word)? + word.len()..]))?;
    size(rest)
}

/// `2.00 GiB` before these words.
fn size_before(line: &str, words: &str) -> Option<u64> {
    let before = &line[..line.find(words)?];
    let start = before.rmatch_indices(' ').nth(1)?.0 + 1;
    size(&before[start..])
}

fn size(text: &str) -> Option<u64> {
    let mut words = text.split_ascii_whitespace();
    let number = words.next()?;
    let digits = number.trim_end_matches(|c: char| !c.is_ascii_digit());
    // `2.00GiB` in one word, or two.
    let unit =
        if digits.len() < number.len() { &number[digits.len()..] } else { words.next().unwrap_or("bytes") };
    let scale = match unit.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).chars().next() {
        Some('K' | 'k') => 1u64 << 10,
        Some('M') => 1 << 20,
        Some('G') => 1 << 30,
        Some('T') => 1 << 40,
        _ => 1,
    };
    let number: f64 = digits.parse().ok()?;
    Some((number * scale as f64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn device(stderr: &str) -> Box<OomReport> {
        match judge(Death::Exited(1), stderr) {
            MemoryVerdict::Device(report) => report,
            other => panic!("{other:?}: {stderr}"),
        }
    }

    #[test]
    fn frameworks_say_it_in_their_own_words() {
        let torch = device(
            "Traceback (most recent call last):\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. \
             GPU 0 has a total capacity of 15.77 GiB of which 512.00 MiB is free. Including non-PyTorch memory, …",
        );
        assert_eq!(torch.source, "torch");
        assert_eq!((torch.asked, torch.free), (Some(2 * GIB), Some(GIB / 2)));
        assert_eq!(torch.total, Some((15.77 * GIB as f64) as u64));
        for (source, stderr) in [
            ("torch", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."),
            (
                "cublas",
                "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            ),
            ("cudnn", "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
            (
                "jax",
                "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.",
            ),
            (
                "onnxruntime",
                "onnxruntime::BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 1073741824",
            ),
            ("cupy", "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 512 bytes"),
            ("cuda", "GPUassert: cudaErrorMemoryAllocation main.cu 12"),
            ("cuda", "CUDA error: out of memory"),
            (
                "cuda",
                "onnxruntime::CudaCall CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**)&p, size);",
            ),
            ("hip", "RuntimeError: HIP error: out of memory"),
            ("torch", "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB."),
            ("torch", "terminate called after throwing an instance of 'c10::OutOfMemoryError'"),
            (
                "tensorrt",
                "[E] 1: [defaultAllocator.cpp::allocate::20] Error Code 1: Cuda Runtime (out of memory)",
            ),
            ("vulkan", "ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory"),
            (
                "tensorflow",
                "tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating tensor",
            ),
        ] {
            assert_eq!(device(stderr).source, source, "{stderr}");
        }
        assert_eq!(device("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.").asked, Some(8 * GIB));
        let ggml = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 1024.00 MiB on device 0: cudaMalloc failed: out of memory";
        assert_eq!((device(ggml).source.as_str(), device(ggml).asked), ("ggml", Some(GIB)));
        assert_eq!(
            device("onnxruntime: Failed to allocate memory for requested buffer of size 1073741824").asked,
            Some(GIB)
        );
    }

    #[test]
    fn host_memory_that_ran_out_is_not_device_memory() {
        let text = "CUDA out of memory. Tried to allocate 2.00 GiB.";
        for death in
            [Death::Exited(137), Death::Killed(libc::SIGKILL), Death::HostMemory(1), Death::HostFull(None)]
        {
            assert_eq!(judge(death, text), MemoryVerdict::Host);
        }
        assert_eq!(judge(Death::Exited(1), "MemoryError"), MemoryVerdict::Other);
        assert_eq!(
            judge(
                Death::Exited(1),
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
            ),
            MemoryVerdict::Other
        );
    }

    #[test]
    fn a_process_that_was_ended_from_outside_did_not_run_out_of_memory() {
        let text = "CUDA out of memory. Tried to allocate 2.00 GiB.";
        for death in [Death::KeeperLost, Death::Processes(9000), Death::Killed(libc::SIGTERM)] {
            assert_eq!(judge(death, text), MemoryVerdict::Other, "{death}");
        }
        for death in [Death::Killed(libc::SIGABRT), Death::Killed(libc::SIGSEGV), Death::Exited(-1)] {
            assert!(matches!(judge(death, text), MemoryVerdict::Device(_)), "{death}");
        }
    }

    #[test]
    fn an_end_without_an_error_about_memory_is_no_out_of_memory() {
        assert_eq!(
            judge(Death::Exited(0), "CUDA out of memory. Tried to allocate 2.00 GiB. Falling back."),
            MemoryVerdict::Other
        );
        assert_eq!(judge(Death::Killed(libc::SIGSEGV), "segmentation fault"), MemoryVerdict::Other);
        assert_eq!(judge(Death::Exited(1), "ran out of memory of my youth"), MemoryVerdict::Other);
    }
}
