//! The CUDA device on a fake driver: loading, allocations and their return, and errors. These tests show nothing about
//! a real GPU.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use vramq_inference::device::cuda::{
    self, Absent, CudaDevice, CudaError, Libraries, Lock, Missing, Options, Which,
};
use vramq_inference::device::{Device as _, Memory, OutOfMemory};
use vramq_tests::encoders::until;
use vramq_tests::fake_cuda::{
    alone, broken_driver, copied, cublaslt, driver, driver_without, nvml, outstanding,
};
use vramq_tests::setup::Failed;

const MIB: u64 = 1 << 20;

/// Of the fake driver: 1024 MiB, of which a context takes 300, and pools 32 at a time.
const TOTAL: u64 = 1024 * MIB;
const CONTEXT: u64 = 300 * MIB;

/// Makes a test of each body, in a process of its own with these libraries and settings.
macro_rules! in_its_own_process {
    ($($body:ident: $libraries:expr, [$($name:literal = $value:expr),*];)+) => { $(
        #[test]
        fn $body() -> Result<(), Failed> {
            Ok(alone(concat!(module_path!(), "::", stringify!($body)), &$libraries, &[$(($name, $value)),*], bodies::$body)?)
        }
    )+ };
}

in_its_own_process! {
    a_library_that_cannot_be_loaded: [broken_driver()?], [];
    a_driver_that_lacks_a_function: [driver_without("cuDeviceGetUuid_v2")?], [];
    a_driver_that_does_not_start: [driver()?], ["FAKE_CUDA_FAIL" = "cuInit:1:803"];
    a_machine_without_devices: [driver()?], ["FAKE_CUDA_DEVICES" = "0"];
    visible_devices_are_the_drivers_business: [driver()?],
        ["FAKE_CUDA_DEVICES" = "3", "CUDA_VISIBLE_DEVICES" = "2,0"];
    a_device_without_room_for_a_context: [driver()?], ["FAKE_CUDA_MEMORY_MIB" = "100"];
    memory_is_taken_and_given_back: [driver()?, nvml()?], [];
    a_neighbour_is_foreign: [driver()?, nvml()?], ["FAKE_CUDA_FOREIGN" = foreign_file()?.to_str().context("a name")?];
    ten_thousand_failures_leak_nothing: [driver()?, nvml()?], [];
    refusals_of_the_driver_leak_nothing: [driver()?, nvml()?],
        ["FAKE_CUDA_FAIL" = "cuMemAllocFromPoolAsync:2:2:0"];
    a_driver_is_not_asked_for_more_than_it_has: [driver()?, nvml()?],
        ["FAKE_CUDA_FAIL" = "cuMemAllocFromPoolAsync:1:700"];
    a_cap_is_kept: [driver()?, nvml()?], [];
    a_cap_that_is_no_multiple_of_a_piece_can_be_used_whole: [driver()?, nvml()?], [];
    an_old_driver_knows_no_cap: [driver()?, nvml()?], ["FAKE_CUDA_VERSION" = "12010"];
    a_driver_without_pools: [driver()?, nvml()?], ["FAKE_CUDA_POOLS" = "0"];
    kept_memory_is_given_back_on_request: [driver()?, nvml()?], [];
    kept_pieces_are_given_back_before_an_allocation_fails: [driver()?, nvml()?],
        ["FAKE_CUDA_FAIL" = "cuMemAllocFromPoolAsync:2:2"];
    without_nvml_the_context_is_not_known: [driver()?], [];
    nvml_tells_what_it_can: [driver()?, nvml()?],
        ["FAKE_CUDA_THROTTLES" = "36", "FAKE_CUDA_NO_POWER" = "1"];
    libraries_that_are_not_there_are_missed_and_nothing_else: [driver()?], [];
    the_users_folder_wins_over_a_library_without_a_version: [driver()?, without_version()?], [];
    a_library_that_is_newer_than_the_driver_is_missing: [driver()?, without_version()?, cublaslt()?], [];
    a_stub_before_the_driver_is_not_opened: [stub()?, driver()?], [];
    an_instance_of_mig_is_named_as_one: [driver()?, nvml()?], ["FAKE_CUDA_MIG" = "1", "FAKE_CUDA_DEVICES" = "2"];
    an_instance_of_mig_that_is_made_visible_needs_no_nvml: [driver()?],
        ["FAKE_CUDA_MIG" = "1", "FAKE_CUDA_DEVICES" = "2", "CUDA_VISIBLE_DEVICES" = INSTANCE];
}

/// A file that says how much others hold.
fn foreign_file() -> Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name("fake-cuda-foreign"))
}

/// What the loader finds under the name without a version, which may be of any.
fn without_version() -> Result<PathBuf> {
    copied(&cublaslt()?.join("libcublasLt.so.13"), "libcublasLt.so")
}

/// The same for the driver, as toolkits have a stub of it.
fn stub() -> Result<PathBuf> {
    copied(&driver()?.join("libcuda.so.1"), "libcuda.so")
}

/// The second of the fake driver's instances of MIG.
const INSTANCE: &str = "MIG-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadae01";

mod bodies {
    use super::*;

    fn open(cap: Option<u64>) -> Result<Arc<CudaDevice>> {
        let which = Which::Index(0);
        Ok(CudaDevice::open(&Options { which, cap, lock: Lock::None, libraries: None })?)
    }

    fn out_of_memory(result: Result<cuda::CudaMemory, CudaError>) -> Result<OutOfMemory> {
        match result {
            Err(CudaError::OutOfMemory(oom)) => Ok(oom),
            other => anyhow::bail!("{other:?}"),
        }
    }

    pub fn a_library_that_cannot_be_loaded() -> Result<()> {
        ensure!(cuda::find() == Err(Absent::NoDriver), "{:?}", cuda::find());
        let error = open(None).err().context("there is a device")?.to_string();
        ensure!(error.contains("libcuda.so.1") && error.contains("install the driver"), "{error}");
        Ok(())
    }

    pub fn a_driver_that_lacks_a_function() -> Result<()> {
        let Err(Absent::Unsuitable(Missing::Symbol { path, symbol })) = cuda::find() else {
            anyhow::bail!("{:?}", cuda::find());
        };
        ensure!(symbol == "cuDeviceGetUuid_v2" && path.starts_with(driver_without(symbol)?), "{path:?}");
        Ok(())
    }

    pub fn a_driver_that_does_not_start() -> Result<()> {
        let error = open(None).err().context("there is a device")?.to_string();
        ensure!(error.contains("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"), "{error}");
        Ok(())
    }

    pub fn a_machine_without_devices() -> Result<()> {
        let error = open(None).err().context("there is a device")?.to_string();
        ensure!(error.contains("CUDA_ERROR_NO_DEVICE (100)"), "{error}");
        Ok(())
    }

    pub fn visible_devices_are_the_drivers_business() -> Result<()> {
        let devices = cuda::find()?.devices;
        let found: Vec<_> = devices.iter().map(|d| (d.name.as_str(), d.product.as_str(), d.total)).collect();
        ensure!(found == [("cuda:0", "Fake GPU 2", TOTAL), ("cuda:1", "Fake GPU 0", TOTAL)], "{found:?}");
        let by = |which| CudaDevice::open(&Options { which, cap: None, lock: Lock::None, libraries: None });
        let second = by(Which::Uuid(devices[1].uuid.clone()))?;
        ensure!(second.name() == "cuda:1" && second.found().product == "Fake GPU 0", "{second:?}");
        let hidden = by(Which::Index(2)).err().context("there is a third")?.to_string();
        ensure!(
            hidden.contains("CUDA_VISIBLE_DEVICES is `2,0`") && hidden.contains("Fake GPU 2"),
            "{hidden}"
        );
        Ok(())
    }

    pub fn a_device_without_room_for_a_context() -> Result<()> {
        let error = open(None).err().context("there is a device")?.to_string();
        ensure!(error.contains("make a context: CUDA_ERROR_OUT_OF_MEMORY (2)"), "{error}");
        ensure!(error.contains("nvidia-smi"), "{error}");
        Ok(())
    }

    pub fn memory_is_taken_and_given_back() -> Result<()> {
        let device = open(None)?;
        let empty = Memory { free: TOTAL - CONTEXT, total: TOTAL, foreign: 0 };
        ensure!(device.memory() == empty && device.context_cost() == Some(CONTEXT), "{device:?}");
        let weights = device.alloc(500 * MIB as usize)?;
        let arena = device.alloc_arena(100 * MIB as usize)?;
        ensure!(arena.start() % 256 == 0 && arena.len() == 100 * MIB as usize);
        ensure!(device.active_pass_bytes() == 100 * MIB);
        // By the own count, and by the driver's.
        for _ in 0..2 {
            ensure!(device.memory().free == empty.free - 600 * MIB, "{device:?}");
            ensure!(device.memory().own() == CONTEXT + 600 * MIB);
            device.read()?;
        }
        let asked = 125 * MIB;
        let refused = out_of_memory(device.alloc_arena(asked as usize))?;
        ensure!(refused == OutOfMemory { asked, free: 124 * MIB, total: TOTAL, foreign: 0 }, "{refused:?}");
        let nothing = device.alloc(0)?;
        ensure!(nothing.is_empty() && nothing.start() == 0);
        drop((arena, weights, nothing));
        ensure!(device.memory() == empty && device.active_pass_bytes() == 0 && outstanding()? == 0);
        device.read()?;
        ensure!(device.memory() == empty && device.lost().is_none(), "{device:?}");
        Ok(())
    }

    pub fn a_neighbour_is_foreign() -> Result<()> {
        let neighbour = |bytes: u64| std::fs::write(foreign_file()?, bytes.to_string()).context("write");
        neighbour(0)?;
        let device = open(None)?;
        let _held = device.alloc(200 * MIB as usize)?;
        neighbour(400 * MIB)?;
        let asked = 200 * MIB;
        // The refusal itself returns the newest figures; no earlier reading is needed.
        let refused = out_of_memory(device.alloc(asked as usize))?;
        let expected = OutOfMemory { asked, free: 124 * MIB, total: TOTAL, foreign: 400 * MIB };
        ensure!(refused == expected, "{refused:?}");
        ensure!(device.memory().own() == CONTEXT + 200 * MIB);
        neighbour(0)?;
        // The test does not read the memory: the device's own thread does.
        until(&device, |device| device.memory().foreign == 0)?;
        drop(device.alloc(asked as usize)?);
        Ok(())
    }

    /// Each asks for so many bytes, by what is free and the round.
    fn refusals_leak_nothing(asked: impl Fn(u64, u64) -> u64) -> Result<Arc<CudaDevice>> {
        let device = open(None)?;
        let _weights = device.alloc(100 * MIB as usize)?;
        let before = device.memory();
        for round in 0..10_000u64 {
            let asked = asked(before.free, round);
            let refused = out_of_memory(device.alloc_arena(asked as usize))?;
            ensure!(refused.asked == asked && refused.free == before.free, "{round}: {refused:?}");
        }
        device.read()?;
        ensure!(device.memory() == before && outstanding()? == 100 * MIB as usize, "{device:?}");
        ensure!(device.active_pass_bytes() == 0 && device.lost().is_none());
        Ok(device)
    }

    pub fn ten_thousand_failures_leak_nothing() -> Result<()> {
        let device = refusals_leak_nothing(|free, round| free + 1 + round)?;
        // All of it can still be had, but for the pieces that pools take.
        Ok(device.alloc_arena((device.memory().free - 64 * MIB) as usize).map(drop)?)
    }

    /// By the driver's figures there is room, and the driver finds none.
    pub fn refusals_of_the_driver_leak_nothing() -> Result<()> {
        refusals_leak_nothing(|free, round| free - round).map(drop)
    }

    /// The first allocation that reaches this driver loses the device.
    pub fn a_driver_is_not_asked_for_more_than_it_has() -> Result<()> {
        let device = open(None)?;
        let free = device.memory().free;
        let refused = out_of_memory(device.alloc_arena(free as usize + 1))?;
        ensure!(refused.free == free && device.lost().is_none(), "{refused:?}");
        ensure!(matches!(device.alloc_arena(free as usize), Err(CudaError::Lost { .. })), "{device:?}");
        Ok(())
    }

    fn keeps_a_cap() -> Result<()> {
        let device = open(Some(64 * MIB))?;
        ensure!(device.memory() == Memory { free: 64 * MIB, total: 64 * MIB, foreign: 0 }, "{device:?}");
        let held = device.alloc(40 * MIB as usize)?;
        let asked = 24 * MIB + 1;
        let refused = out_of_memory(device.alloc_arena(asked as usize))?;
        let expected = OutOfMemory { asked, free: 24 * MIB, total: 64 * MIB, foreign: 0 };
        ensure!(refused == expected, "{refused:?}");
        let rest = device.alloc_arena(24 * MIB as usize)?;
        ensure!(device.memory().free == 0 && device.memory().own() == 64 * MIB);
        drop((held, rest));
        ensure!(device.memory().free == 64 * MIB);
        Ok(())
    }

    pub fn a_cap_is_kept() -> Result<()> {
        keeps_a_cap()
    }

    pub fn an_old_driver_knows_no_cap() -> Result<()> {
        keeps_a_cap()
    }

    pub fn a_driver_without_pools() -> Result<()> {
        let device = open(None)?;
        let held = device.alloc(500 * MIB as usize)?;
        device.read()?;
        ensure!(device.memory().own() == CONTEXT + 500 * MIB, "{device:?}");
        let refused = out_of_memory(device.alloc_arena(300 * MIB as usize))?;
        ensure!(refused.free == 224 * MIB && refused.foreign == 0, "{refused:?}");
        drop(held);
        device.read()?;
        ensure!(device.memory().free == TOTAL - CONTEXT && outstanding()? == 0);
        Ok(())
    }

    pub fn kept_memory_is_given_back_on_request() -> Result<()> {
        let device = open(None)?;
        drop(device.alloc_arena(384 * MIB as usize)?);
        let free = || Ok::<_, anyhow::Error>(device.context().free_and_total()?.0 as u64);
        // It is free for the next pass, but not for others.
        ensure!(device.memory().free == TOTAL - CONTEXT && free()? == TOTAL - CONTEXT - 384 * MIB);
        device.trim();
        let deadline = std::time::Instant::now() + vramq_tests::wait::DEADLINE;
        while free()? < TOTAL - CONTEXT {
            ensure!(std::time::Instant::now() < deadline, "{} are free", free()?);
            std::thread::yield_now();
        }
        Ok(())
    }

    pub fn kept_pieces_are_given_back_before_an_allocation_fails() -> Result<()> {
        let device = open(None)?;
        drop(device.alloc_arena(384 * MIB as usize)?);
        // The driver refuses this once.
        let arena = device.alloc_arena(128 * MIB as usize)?;
        ensure!(device.context().free_and_total()?.0 as u64 == TOTAL - CONTEXT - 128 * MIB);
        drop(arena);
        Ok(())
    }

    /// A part of a piece more than the cap: the driver's own limit must not be the one that counts.
    pub fn a_cap_that_is_no_multiple_of_a_piece_can_be_used_whole() -> Result<()> {
        let device = open(Some(70 * MIB))?;
        let held = [40, 29].map(|mib| device.alloc(mib * MIB as usize));
        let [Ok(_), Ok(_)] = &held else { anyhow::bail!("{held:?}") };
        let refused = out_of_memory(device.alloc_arena(2 * MIB as usize))?;
        ensure!(refused.free == MIB && refused.total == 70 * MIB, "{refused:?}");
        Ok(())
    }

    pub fn without_nvml_the_context_is_not_known() -> Result<()> {
        let device = open(None)?;
        ensure!(device.context_cost().is_none() && device.telemetry().is_none());
        // It looks like a neighbour's, as the documentation says.
        ensure!(device.memory() == Memory { free: TOTAL - CONTEXT, total: TOTAL, foreign: CONTEXT });
        Ok(())
    }

    pub fn nvml_tells_what_it_can() -> Result<()> {
        let device = open(None)?;
        let _held = device.alloc(192 * MIB as usize)?;
        let deadline = std::time::Instant::now() + vramq_tests::wait::DEADLINE;
        let telemetry = loop {
            match device.telemetry() {
                Some(telemetry) if telemetry.memory_used == Some(CONTEXT + 192 * MIB) => break telemetry,
                telemetry => ensure!(std::time::Instant::now() < deadline, "{telemetry:?}"),
            }
            std::thread::yield_now();
        };
        ensure!((telemetry.gpu_percent, telemetry.memory_percent) == (Some(42), Some(17)), "{telemetry:?}");
        ensure!(
            telemetry.temperature_celsius == Some(61) && telemetry.power_milliwatt.is_none(),
            "{telemetry:?}"
        );
        ensure!(
            (telemetry.sm_clock_mhz, telemetry.memory_clock_mhz) == (Some(1980), Some(2619)),
            "{telemetry:?}"
        );
        ensure!(telemetry.throttled().eq(["sw_power_cap", "sw_thermal_slowdown"]), "{telemetry:?}");
        Ok(())
    }

    pub fn libraries_that_are_not_there_are_missed_and_nothing_else() -> Result<()> {
        let version = cuda::find()?.version;
        // A machine with GPUs may have them; then they must be usable.
        let Libraries { nvrtc, cublaslt } = Libraries::open(version, None);
        for found in [nvrtc, cublaslt] {
            ensure!(found.is_ok() || found == Err(Missing::Nowhere), "{found:?}");
        }
        Ok(())
    }

    pub fn the_users_folder_wins_over_a_library_without_a_version() -> Result<()> {
        let own = cublaslt()?;
        let found = Libraries::open(cuda::find()?.version, Some(&own)).cublaslt?;
        ensure!(found.path == own.join("libcublasLt.so.13"), "{found:?}");
        Ok(())
    }

    pub fn a_library_that_is_newer_than_the_driver_is_missing() -> Result<()> {
        cuda::find()?;
        // Of CUDA 12.8, and of 11.8: the library is of 13, and so may be what has no version in its name.
        for driver in [12_080, 11_080] {
            let found = Libraries::open(driver, Some(&cublaslt()?)).cublaslt;
            // A machine may have one of its own that is older.
            let is_newer =
                found.as_ref().is_ok_and(|opened| opened.path.to_string_lossy().contains("fake_cuda"));
            ensure!(!is_newer, "{found:?} for a driver of {driver}");
        }
        Ok(())
    }

    pub fn a_stub_before_the_driver_is_not_opened() -> Result<()> {
        let device = open(None)?;
        drop(device.alloc(MIB as usize)?);
        let found = cuda::find()?.library.path;
        ensure!(found == driver()?.join("libcuda.so.1"), "{found:?}");
        let maps = std::fs::read_to_string("/proc/self/maps")?;
        ensure!(maps.contains("/libcuda.so.1\n") && !maps.contains("/libcuda.so\n"), "{maps}");
        Ok(())
    }

    pub fn an_instance_of_mig_is_named_as_one() -> Result<()> {
        let devices = cuda::find()?.devices;
        let uuids: Vec<_> = devices.iter().map(|device| device.uuid.as_str()).collect();
        ensure!(uuids == ["MIG-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadae00"], "{uuids:?}");
        let device = open(None)?;
        ensure!(device.context_cost() == Some(CONTEXT), "NVML does not know {device:?}");
        ensure!(device.program_env() == [("CUDA_VISIBLE_DEVICES".to_owned(), uuids[0].to_owned())]);
        Ok(())
    }

    pub fn an_instance_of_mig_that_is_made_visible_needs_no_nvml() -> Result<()> {
        let which = Which::Uuid(INSTANCE.to_owned());
        let device = CudaDevice::open(&Options { which, cap: None, lock: Lock::None, libraries: None })?;
        ensure!(device.found().uuid == INSTANCE && device.found().product == "Fake GPU 1", "{device:?}");
        Ok(())
    }
}
