//! The device's part of the configuration.

use std::path::{Path, PathBuf};

use super::gpus::{Gpus, gpus};
use super::read::{at_least_one, parsed};
use super::section::Section;
use super::{ConfigFault, EngineConfig, ModelConfig};
use crate::device::cuda::{Lock, Options};
use crate::device::fault::Fault;
use crate::engine::encoder::ComputeType;
use crate::host_memory;

/// The device that models run on.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    pub kind: DeviceKind,
    /// If several GPUs are configured, a worker is started for each (`app/supervisor.rs`). `kind` then describes the first.
    pub gpus: Option<Gpus>,
    /// Bytes of it that stay free.
    pub reserve: u64,
    pub fault: Option<Fault>,
    /// Where compiled kernels are kept.
    pub kernels: Option<PathBuf>,
}

impl DeviceConfig {
    /// A folder with CUDA's libraries, to be looked at before all others.
    pub fn libraries(&self) -> Option<&Path> {
        match &self.kind {
            DeviceKind::Cpu(_) => None,
            DeviceKind::Cuda(options) => options.libraries.as_deref(),
        }
    }

    /// A text for the CPU device whose memory is more than this machine has. Passes may take all of it.
    pub fn more_than_machine(&self) -> Option<ConfigFault> {
        let (memory, machine) = (self.host_bytes(), host_memory::machine_bytes()?);
        let (memory, machine) = (memory >> 20, (memory > machine).then_some(machine >> 20)?);
        let what = format!(
            "is {memory}, and this machine, or the control group of this process, has {machine} MiB: the system may kill a worker \
             that uses all of it: lower it"
        );
        Some(ConfigFault { key: "device.cpu.memory_mib".to_owned(), what })
    }

    /// How many bytes of the host's memory the device may take.
    pub fn host_bytes(&self) -> u64 {
        match &self.kind {
            DeviceKind::Cpu(cpu) => cpu.memory,
            DeviceKind::Cuda(_) => 0,
        }
    }
}

/// What device it is.
#[derive(Clone, Debug)]
pub enum DeviceKind {
    Cpu(CpuConfig),
    Cuda(Options),
}

/// The CPU as a device.
#[derive(Clone, Debug)]
pub struct CpuConfig {
    /// Bytes that models and passes may take together.
    pub memory: u64,
    pub threads: usize,
    /// Processes that name the same file share the memory.
    pub file: Option<PathBuf>,
}

/// Kept free on a CPU device for memory that is not counted, such as allocator rounding.
const CPU_RESERVE_MIB_DEFAULT: u32 = 64;

/// The same on a GPU. It must also hold code that is loaded at its first use, and the pool's allocations come in pieces of 32 MiB.
const CUDA_RESERVE_MIB_DEFAULT: u32 = 256;

/// The CPU device's memory by default: room for a small encoder and dozens of jobs on any host.
const CPU_MEMORY_MIB_DEFAULT: u32 = 2048;

pub(super) fn device(mut section: Section) -> DeviceConfig {
    let kind = section.take::<String>("kind");
    let (has_cpu, has_cuda) = (section.has("cpu"), section.has("cuda"));
    let is_cuda = match kind.as_deref() {
        Some("cuda") => true,
        Some("cpu") => false,
        Some(other) => {
            section.fault("kind", format!("is `{other}`; it must be `cpu` or `cuda`"));
            false
        }
        None if has_cpu && has_cuda => {
            let what =
                "is needed where both device.cpu and device.cuda are configured: a worker runs on one device";
            section.fault("kind", what);
            false
        }
        None => has_cuda,
    };
    // Reads both, to report faults in the unused one too.
    let (cpu, cuda) = (cpu(section.section("cpu")), cuda(section.section("cuda")));
    section.finish();
    if is_cuda { cuda } else { cpu }
}

/// Rejects a type that the configured device never computes in. Whether this machine supports a type is known only when the device is
/// opened.
pub(super) fn check_types(root: &Section, models: &[ModelConfig], device: &DeviceKind) {
    for model in models {
        let is_f16 = matches!(model.engine, EngineConfig::Encoder { dtype: ComputeType::F16, .. });
        if is_f16 && matches!(device, DeviceKind::Cpu(_)) {
            let what = "is `f16`, which is for CUDA devices (`[device.cuda]`); the CPU takes `auto`, `f32` and `bf16`";
            root.fault(&format!("model.{}.dtype", model.name), what);
        }
    }
}

fn mib(n: u32) -> u64 {
    u64::from(n) << 20
}

fn cpu(mut section: Section) -> DeviceConfig {
    let cores =
        std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX));
    let fault = parsed(&mut section, "fault");
    let reserve = mib(section.number("reserve_mib", 0..=u32::MAX).unwrap_or(CPU_RESERVE_MIB_DEFAULT));
    let memory = mib(at_least_one(&mut section, "memory_mib", CPU_MEMORY_MIB_DEFAULT));
    check_reserve(&section, reserve, Some(memory));
    let kind = DeviceKind::Cpu(CpuConfig {
        memory,
        threads: at_least_one(&mut section, "threads", cores) as usize,
        file: section.take::<String>("file").map(PathBuf::from),
    });
    section.finish();
    DeviceConfig { kind, gpus: None, reserve, fault, kernels: None }
}

/// A reserve that leaves nothing of the device's memory is a fault.
fn check_reserve(section: &Section, reserve: u64, memory: Option<u64>) {
    if let Some(memory) = memory.filter(|memory| reserve >= *memory) {
        let (reserve, memory) = (reserve >> 20, memory >> 20);
        let what = format!(
            "is {reserve}, and memory_mib is {memory}: nothing is left for models: lower the reserve, or raise memory_mib"
        );
        section.fault("reserve_mib", what);
    }
}

/// The folder of GPU locks if `file` is not set: in memory, and writable by all users of the machine.
const LOCKS: &str = "/dev/shm";

fn cuda(mut section: Section) -> DeviceConfig {
    let fault = parsed(&mut section, "fault");
    let reserve = mib(section.number("reserve_mib", 0..=u32::MAX).unwrap_or(CUDA_RESERVE_MIB_DEFAULT));
    let (which, gpus) = gpus(&mut section);
    let cap = section.number("memory_mib", 1..=u32::MAX).map(mib);
    check_reserve(&section, reserve, cap);
    let kind = DeviceKind::Cuda(Options {
        which,
        cap,
        lock: section
            .take::<String>("file")
            .map_or_else(|| Lock::ByUuid(LOCKS.into()), |file| Lock::File(file.into())),
        libraries: section.take::<String>("libraries").map(PathBuf::from),
    });
    let kernels = section.take::<String>("kernels").map(PathBuf::from).or_else(default_kernels);
    section.finish();
    DeviceConfig { kind, gpus, reserve, fault, kernels }
}

/// The user's folder for files that can be created again.
fn default_kernels() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let caches = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    caches.map(|caches| caches.join("vramq/kernels"))
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Invalid};
    use super::*;
    use crate::device::cuda::Which;

    fn read(device: &str) -> Result<DeviceConfig, Vec<String>> {
        let file = format!("[model.m]\nengine = 'echo'\n{device}");
        Config::read(Some(&file), &[]).map(|config| config.device).map_err(texts)
    }

    fn texts(Invalid(faults): Invalid) -> Vec<String> {
        faults.iter().map(ToString::to_string).collect()
    }

    fn cuda_of(device: &str) -> Options {
        match read(device).unwrap().kind {
            DeviceKind::Cuda(options) => options,
            DeviceKind::Cpu(cpu) => panic!("{cpu:?}"),
        }
    }

    #[test]
    fn a_table_for_cuda_asks_for_a_gpu_and_nothing_else_does() {
        assert!(matches!(read("").unwrap().kind, DeviceKind::Cpu(_)));
        assert!(matches!(read("[device.cpu]\nthreads = 2").unwrap().kind, DeviceKind::Cpu(_)));
        assert_eq!(cuda_of("[device.cuda]").which, Which::Index(0));
        assert_eq!(cuda_of("[device]\nkind = 'cuda'").which, Which::Index(0));
        assert_eq!(cuda_of("[device.cuda]\nindex = 3\nreserve_mib = 4\nmemory_mib = 5").cap, Some(5 << 20));
        assert_eq!(cuda_of("[device.cuda]\nuuid = 'GPU-1d5a'").which, Which::Uuid("GPU-1d5a".to_owned()));
        assert_eq!(cuda_of("[device]\nkind = 'cuda'\n[device.cpu]\nthreads = 2").cap, None);
        assert_eq!(read("[device.cuda]").unwrap().reserve, 256 << 20);
    }

    #[test]
    fn faults_are_reported_with_what_to_do() {
        let rows = [
            ("[device.cuda]\nindex = 'first'", "device.cuda.index", "a list of numbers"),
            ("[device.cuda]\nuuid = 'the first'", "device.cuda.uuid", "nvidia-smi -L"),
            ("[device.cuda]\nuuid = 'GPU-1'\nindex = 0", "device.cuda.uuid", "one of them is enough"),
            ("[device.cuda]\nmemory_mib = 0", "device.cuda.memory_mib", "from 1 to"),
            (
                "[device.cuda]\nmemory_mib = 256",
                "device.cuda.reserve_mib",
                "lower the reserve, or raise memory_mib",
            ),
            ("[device.cpu]\nmemory_mib = 9\nreserve_mib = 10", "device.cpu.reserve_mib", "memory_mib is 9"),
            ("[device.cuda]\ndevices = 2", "device.cuda.devices", "not a known key"),
            ("[device.cuda]\n[device.cpu]", "device.kind", "one device"),
            ("[device]\nkind = 'tpu'", "device.kind", "`cpu` or `cuda`"),
        ];
        for (device, key, words) in rows {
            let faults = read(device).unwrap_err();
            let [fault] = &faults[..] else { panic!("{device}: {faults:?}") };
            assert!(fault.starts_with(&format!("{key}: ")) && fault.contains(words), "{device}: {fault}");
        }
    }

    #[test]
    fn a_type_that_nothing_computes_in_is_refused() {
        let faults = |file: &str| Config::read(Some(file), &[]).map(drop).map_err(texts);
        let encoder = "[model.m]\npath = '/'\ndtype = 'f16'\n";
        assert_eq!(faults(&format!("{encoder}[device.cuda]")), Ok(()));
        for (file, words) in [
            (encoder.to_owned(), "is `f16`, which is for CUDA devices"),
            (format!("{encoder}[device.cpu]\nthreads = 1"), "the CPU takes `auto`, `f32` and `bf16`"),
            ("[model.m]\nengine = 'echo'\ndtype = 'auto'".to_owned(), "`echo` computes nothing"),
        ] {
            let found = faults(&file).unwrap_err();
            let [fault] = &found[..] else { panic!("{file}: {found:?}") };
            assert!(fault.starts_with("model.m.dtype: ") && fault.contains(words), "{file}: {fault}");
        }
    }
}
