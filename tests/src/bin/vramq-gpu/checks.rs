//! The checks of the CUDA device, each with its measurements.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use vramq_core::units::Mib;
use vramq_inference::device::cuda::{CudaDevice, CudaError, Timer};
use vramq_inference::device::{Device as _, OutOfMemory};

use crate::figures;

pub const MIB: u64 = 1 << 20;

/// What the driver's own count may be off by: two of the pieces, of 32 MiB, that its pools take memory in.
pub const SLACK: u64 = 64 * MIB;

/// A neighbour may take so long to come and go.
const DEADLINE: Duration = Duration::from_secs(60);

/// So many out-of-memory errors, or as many as fit into the time.
const FAILURES: u32 = 10_000;
const FAILURES_WITHIN: Duration = Duration::from_secs(20);

type Check = fn(&Arc<CudaDevice>) -> Result<String>;

const CHECKS: &[(&str, Check)] = &[
    ("the device", device_itself),
    ("telemetry", telemetry),
    ("memory comes back", memory_comes_back),
    ("an allocation and its end, 64 MiB", allocation_time),
    ("the device measures how long work takes", time_is_measured),
    ("an out-of-memory error has the bytes", out_of_memory_has_the_bytes),
    ("a cap is kept", a_cap_is_kept),
    ("out-of-memory errors leak nothing", failures_leak_nothing),
    ("a neighbour is foreign, and its memory comes back", a_neighbour_is_foreign),
    ("an illegal address ends the device and nothing else", an_illegal_address),
];

/// Runs all checks and prints a table. Whether all hold.
pub fn run(device: &Arc<CudaDevice>) -> Result<bool> {
    let found = device.found();
    println!("Device: {} ({}), {}.\n", found.product, found.uuid, Mib(found.total));
    println!("| check | holds | figures |\n|---|---|---|");
    let mut all = true;
    for (name, check) in CHECKS {
        let (holds, detail) = match check(device) {
            Ok(figures) => ("yes", figures),
            Err(error) => {
                all = false;
                ("**no**", format!("{error:#}"))
            }
        };
        figures::put(&json!({"figure": "check", "name": name, "holds": holds == "yes", "detail": detail}))?;
        println!("| {name} | {holds} | {} |", detail.replace('|', "\\|").replace('\n', " "));
    }
    Ok(all)
}

fn device_itself(device: &Arc<CudaDevice>) -> Result<String> {
    device.read()?;
    let memory = device.memory();
    let (major, minor) = device.capability();
    let context =
        device.context_cost().map_or_else(|| "not measured".to_owned(), |cost| Mib(cost).to_string());
    let libraries = device.libraries();
    let named = |found: bool| if found { "found" } else { "not found" };
    Ok(format!(
        "sm_{major}{minor}; {} free of {}, foreign {}; context {context}; libnvrtc {}, libcublasLt {}",
        Mib(memory.free),
        Mib(memory.total),
        Mib(memory.foreign),
        named(libraries.nvrtc.is_ok()),
        named(libraries.cublaslt.is_ok()),
    ))
}

fn telemetry(device: &Arc<CudaDevice>) -> Result<String> {
    let has_it = || {
        device
            .telemetry()
            .is_some_and(|reading| reading.memory_used.is_some() && reading.gpu_percent.is_some())
    };
    until("NVML tells memory and utilisation", || Ok(has_it()))?;
    let reading = device.telemetry().context("no telemetry")?;
    ensure!(reading.temperature_celsius.is_some() && reading.sm_clock_mhz.is_some(), "{reading:?}");
    Ok(format!("{reading:?}"))
}

fn memory_comes_back(device: &Arc<CudaDevice>) -> Result<String> {
    let before = device.read()?;
    let free = device.memory().free;
    let half = device.alloc(usize::try_from(free / 2)?)?;
    ensure!(
        device.memory().free == free - free / 2,
        "by the own count {} are free",
        Mib(device.memory().free)
    );
    let during = device.read()?;
    ensure!(before.room.abs_diff(during.room) <= SLACK, "the room went from {before:?} to {during:?}");
    drop(half);
    let after = device.read()?;
    ensure!(before.room.abs_diff(after.room) <= SLACK, "the room went from {before:?} to {after:?}");
    device.check()?;
    Ok(format!(
        "{} taken and given back; the room moved by {} bytes",
        Mib(free / 2),
        before.room.abs_diff(after.room)
    ))
}

fn allocation_time(device: &Arc<CudaDevice>) -> Result<String> {
    const ROUNDS: u32 = 1000;
    let bytes = 64 * MIB as usize;
    drop(device.alloc_arena(bytes)?);
    let start = Instant::now();
    for _ in 0..ROUNDS {
        drop(device.alloc_arena(bytes)?);
    }
    Ok(format!("{:.1} us, from what the pool keeps", start.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS)))
}

fn time_is_measured(device: &Arc<CudaDevice>) -> Result<String> {
    let bytes = vec![7; 64 * MIB as usize];
    let memory = device.alloc(bytes.len())?;
    let timer = Timer::new(device)?;
    let start = Instant::now();
    timer.start()?;
    // SAFETY: as many bytes, which stay as they are until the wait that `stop` is.
    unsafe { device.copy_in("copy in", memory.start(), &bytes) }?;
    let (by_device, by_clock) = (f64::from(timer.stop()?), start.elapsed().as_secs_f64() * 1e3);
    // The clock's time has the calls in it, too; two clocks may differ by a thousandth.
    ensure!(by_device > 0.0 && by_device <= by_clock * 1.001, "{by_device} ms in {by_clock} ms");
    Ok(format!("a copy of 64 MiB: {by_device:.2} ms by the device, {by_clock:.2} ms by the clock"))
}

/// An allocation that is larger than the device.
fn too_much(device: &Arc<CudaDevice>) -> Result<OutOfMemory> {
    let asked = device.found().total;
    match device.alloc_arena(usize::try_from(asked)?) {
        Err(CudaError::OutOfMemory(oom)) => {
            ensure!(oom.asked == asked && oom.free < asked, "{oom:?}");
            Ok(oom)
        }
        other => anyhow::bail!("{other:?}"),
    }
}

fn out_of_memory_has_the_bytes(device: &Arc<CudaDevice>) -> Result<String> {
    let before = device.memory();
    let refused = too_much(device)?;
    ensure!(device.memory().free.abs_diff(before.free) <= SLACK && device.lost().is_none(), "{device:?}");
    Ok(refused.to_string())
}

fn a_cap_is_kept(device: &Arc<CudaDevice>) -> Result<String> {
    let before = device.read()?;
    let part = super::open(Some(256 * MIB))?;
    let held = part.alloc(200 * MIB as usize)?;
    let CudaError::OutOfMemory(oom) =
        part.alloc(57 * MIB as usize).err().context("more than the cap was given")?
    else {
        anyhow::bail!("no out-of-memory");
    };
    ensure!((oom.total, oom.free) == (256 * MIB, 56 * MIB), "{oom:?}");
    drop(held);
    ensure!(part.memory().free == 256 * MIB);
    drop(part);
    // The thread that watches the part may be the last to let go of it.
    until("what the part kept goes back", || Ok(device.read()?.room + SLACK >= before.room))?;
    Ok(oom.to_string())
}

fn failures_leak_nothing(device: &Arc<CudaDevice>) -> Result<String> {
    let before = device.read()?;
    let start = Instant::now();
    let mut count = 0;
    while count < FAILURES && start.elapsed() < FAILURES_WITHIN {
        too_much(device)?;
        count += 1;
    }
    let each = start.elapsed().as_secs_f64() * 1e6 / f64::from(count);
    let after = device.read()?;
    ensure!(before.room.abs_diff(after.room) <= SLACK, "the room went from {before:?} to {after:?}");
    ensure!(device.lost().is_none(), "{:?}", device.lost());
    drop(device.alloc_arena(usize::try_from(device.memory().free / 2)?)?);
    Ok(format!(
        "{count} of them, {each:.0} us each; the room moved by {} bytes",
        before.room.abs_diff(after.room)
    ))
}

/// This program, as another process on the device.
pub struct Neighbour(Child);

impl Neighbour {
    pub fn holding(mib: u64) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["hold", &mib.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("no standard output")?;
        let neighbour = Self(child);
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(line == "holding\n", "the neighbour says `{}`", line.trim());
        Ok(neighbour)
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // By a kill, as a process ends that nobody asked: an `Err` is one that has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn a_neighbour_is_foreign(device: &Arc<CudaDevice>) -> Result<String> {
    give_back(device)?;
    device.read()?;
    let before = device.memory();
    // All but what two contexts may take.
    let held = (before.free / MIB).saturating_sub(1536).max(before.free / MIB / 2);
    let neighbour = Neighbour::holding(held)?;
    device.read()?;
    let foreign = device.memory().foreign - before.foreign;
    ensure!(foreign >= held * MIB, "the neighbour holds {held} MiB, {} count as foreign", Mib(foreign));
    let asked = before.free;
    let refused = match device.alloc_arena(usize::try_from(asked)?) {
        Err(CudaError::OutOfMemory(oom)) => oom,
        other => anyhow::bail!("{other:?}"),
    };
    ensure!(refused.foreign >= held * MIB, "{refused}");
    // What is left can be had, but for the driver's pieces.
    drop(device.alloc_arena(usize::try_from(refused.free.saturating_sub(SLACK) / 2)?)?);
    drop(neighbour);
    let killed = Instant::now();
    until("its memory comes back", || {
        device.read()?;
        Ok(device.memory().free + SLACK >= before.free)
    })?;
    let back = killed.elapsed().as_millis();
    drop(device.alloc_arena(usize::try_from(asked - SLACK)?)?);
    Ok(format!(
        "it held {held} MiB and a context, {} were foreign; back {back} ms after it was killed",
        Mib(foreign)
    ))
}

pub fn until(what: &str, is_so: impl Fn() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !is_so()? {
        ensure!(start.elapsed() < DEADLINE, "waited in vain: {what}");
        std::thread::yield_now();
    }
    Ok(())
}

/// Lets others have what the pool keeps.
pub fn give_back(device: &CudaDevice) -> Result<()> {
    device.trim();
    until("what is kept goes back", || {
        Ok(device.context().free_and_total()?.0 as u64 + SLACK >= device.memory().free)
    })
}

fn an_illegal_address(device: &Arc<CudaDevice>) -> Result<String> {
    give_back(device)?;
    let ended = Command::new(std::env::current_exe()?).arg("crash").stdin(Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&ended.stdout).trim().to_owned();
    ensure!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr).trim());
    // It was another process: this one's context is as it was.
    device.read()?;
    drop(device.alloc_arena(MIB as usize)?);
    Ok(text)
}
