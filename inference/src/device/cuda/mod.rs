//! A CUDA device: its context, one stream, its memory, and what its errors mean.
//!
//! `libraries` opens the libraries, `calls` calls them, and `error` interprets their codes. `find` lists devices, `open` prepares
//! one, and `context` has the driver's objects. `stream` gives it work, and `timer` measures how long that takes; `pool` allocates,
//! `reading` computes memory figures, `memory` is what engines hold. `watch` polls the driver, `nvml` reads sensors. `cublaslt` has
//! NVIDIA's matrix products, `nvrtc` its kernel compiler.

pub mod calls;
mod context;
pub mod cublaslt;
mod error;
mod find;
mod libraries;
mod memory;
mod nvml;
pub mod nvrtc;
mod open;
mod pool;
mod reading;
mod stream;
mod timer;
mod watch;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use cudarc::driver::sys::CUstream;

pub use context::{Context, Function, Module};
use context::{Event, Stream};
pub use error::{Code, CudaError, Meaning};
pub use find::{Absent, Driver, Found, NotListed, Which, choose, find};
pub use libraries::{Libraries, Missing, Opened};
pub use memory::CudaMemory;
use nvml::Monitor;
pub use nvml::nvml_path;
pub use open::{Lock, OpenError, Options};
pub use reading::Reading;
pub use timer::Timer;

use super::fault::{Fault, Injection};
use super::lock::DeviceLock;
use super::telemetry::{FRESH, Telemetry};
use super::{Device, Loss, Memory, OutOfMemory};
use pool::Pool;
use reading::OwnUsage;

/// A CUDA device of this process.
pub struct CudaDevice {
    found: Found,
    /// Major and minor, as in `sm_90`.
    capability: (u32, u32),
    context: Arc<Context>,
    stream: Arc<Stream>,
    /// Marks the end of the enqueued work, for threads that sleep until then.
    end: Event,
    pool: Pool,
    cap: Option<u64>,
    /// Bytes allocated and not given back.
    used: AtomicU64,
    /// Of those, bytes of arenas.
    active_pass_bytes: AtomicU64,
    /// Bytes of context, code and libraries.
    overhead: AtomicU64,
    /// The newest reading, and when it was begun.
    reading: Mutex<(Reading, Instant)>,
    lock: DeviceLock,
    injection: OnceLock<Injection>,
    libraries: Libraries,
    /// Tells processes apart, if NVML is there.
    monitor: Option<Arc<Monitor>>,
    /// Bytes that creating the context took; `None` if that is unknown.
    context_cost: Option<u64>,
    /// The newest readings of the sensors, and when they were complete.
    telemetry: Mutex<Option<(Telemetry, Instant)>>,
    /// Memory that is kept for the next pass should go back to the system.
    wants_trim: AtomicBool,
    /// Why the device is unusable, and when that was noticed.
    lost: OnceLock<(CudaError, Noticed)>,
}

/// When a loss was noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Noticed {
    /// When it happened: in a call for a pass, or while a pass ran.
    AtOnce,
    /// Later: during clean-up, or from an error that had been kept. The pass that runs now did not cause it.
    Late,
}

impl CudaDevice {
    fn new(parts: open::Parts, cap: Option<u64>) -> Self {
        let open::Parts {
            found,
            capability,
            monitor,
            context,
            context_cost,
            stream,
            end,
            pool,
            lock,
            libraries,
        } = parts;
        let nothing = Reading { total: found.total, room: 0 };
        Self {
            found,
            capability,
            context,
            stream,
            end,
            pool,
            cap,
            used: AtomicU64::new(0),
            active_pass_bytes: AtomicU64::new(0),
            overhead: AtomicU64::new(context_cost.unwrap_or(0)),
            reading: Mutex::new((nothing, Instant::now())),
            lock,
            injection: OnceLock::new(),
            libraries,
            monitor,
            context_cost,
            telemetry: Mutex::default(),
            wants_trim: AtomicBool::new(false),
            lost: OnceLock::new(),
        }
    }

    /// Makes allocations of passes fail as the fault says. May be called once.
    pub fn inject(&self, fault: Fault) {
        // An `Err` is a second call.
        let _ = self.injection.set(Injection::new(fault));
    }

    /// The context that all of the device's work is done in.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The stream that all of it goes to, in order.
    pub fn stream(&self) -> CUstream {
        self.stream.handle()
    }

    /// Major and minor, as in `sm_90`.
    pub fn capability(&self) -> (u32, u32) {
        self.capability
    }

    /// What the driver says of the device.
    pub fn found(&self) -> &Found {
        &self.found
    }

    /// What of CUDA's libraries there is beside the driver.
    pub fn libraries(&self) -> &Libraries {
        &self.libraries
    }

    /// Bytes of the device that code, handles and the context take, as far as they could be measured.
    pub fn overhead(&self) -> u64 {
        self.overhead.load(Ordering::Acquire)
    }

    /// Bytes that making the context took; none without NVML.
    pub fn context_cost(&self) -> Option<u64> {
        self.context_cost
    }

    /// Whether the device can still be used. Reports errors that could not be returned before, such as those in a `Drop`. They
    /// belong to no pass, so the device is lost, whatever their code.
    ///
    /// # Errors
    /// Only [`CudaError::Lost`].
    pub fn check(&self) -> Result<(), CudaError> {
        if let Some(code) = self.context.late_error() {
            self.lose("clean up after earlier work", code, Noticed::Late);
        }
        self.lost.get().map_or(Ok(()), |(lost, _)| Err(*lost))
    }

    /// Counts the device memory that `load` takes outside the pool (code, library handles, workspaces) as this process's own. What
    /// other processes take meanwhile is included, because it cannot be told apart.
    ///
    /// # Errors
    /// The memory cannot be read.
    pub fn counting<T>(&self, load: impl FnOnce() -> T) -> Result<T, CudaError> {
        let before = self.read()?.room;
        let loaded = load();
        let after = self.read()?.room;
        self.overhead.fetch_add(before.saturating_sub(after), Ordering::AcqRel);
        Ok(loaded)
    }

    /// Asks the driver for the memory. May wait for the device; [`memory`](Device::memory) does not.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn read(&self) -> Result<Reading, CudaError> {
        self.read_by(|| Noticed::AtOnce)
    }

    /// As [`read`](Self::read); `noticed` classifies a loss that it finds.
    fn read_by(&self, noticed: impl Fn() -> Noticed) -> Result<Reading, CudaError> {
        self.bind_by(&noticed)?;
        let begun = Instant::now();
        let reading = self.ask().map_err(|code| self.lose("read the memory", code, noticed()))?;
        let mut newest = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.1 <= begun {
            *newest = (reading, begun);
        }
        Ok(reading)
    }

    fn ask(&self) -> Result<Reading, Code> {
        loop {
            let before = self.pool.reserved()?;
            let (free, total) = self.context.free_and_total()?;
            let held = match before {
                Some(reserved) if self.pool.reserved()? == before => reserved,
                // Another thread allocated in between, so the figures do not fit together.
                Some(_) => continue,
                None => self.used.load(Ordering::Acquire),
            };
            return Ok(Reading { total: total as u64, room: free as u64 + held });
        }
    }

    fn out_of_memory(&self, asked: u64) -> CudaError {
        // Use the newest figures, or the last ones if there are none.
        match self.read() {
            Err(lost @ CudaError::Lost { .. }) => lost,
            _ => {
                let Memory { free, total, foreign } = self.memory();
                OutOfMemory { asked, free, total, foreign }.into()
            }
        }
    }

    fn lose(&self, during: &'static str, code: Code, noticed: Noticed) -> CudaError {
        self.lost.get_or_init(|| (CudaError::Lost { during, code }, noticed)).0
    }

    /// Whether the running pass may have caused an error that appeared outside of its calls. Call this after the error: a pass at
    /// fault then still holds its arena, or has reported the error already.
    fn in_pass(&self) -> Noticed {
        if self.active_pass_bytes() > 0 { Noticed::AtOnce } else { Noticed::Late }
    }

    /// Returns memory that is kept for the next pass to the system, if that was requested and no pass runs. Waits for the device.
    fn trim_now(&self) {
        // A running pass uses the kept memory, or adds to it: trim at its end.
        if self.active_pass_bytes() > 0 || !self.wants_trim.swap(false, Ordering::AcqRel) {
            return;
        }
        if self.bind_by(|| self.in_pass()).is_ok()
            && let Err(code) = self.pool.trim()
        {
            self.lose("give back what is kept", code, self.in_pass());
        }
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.found.name
    }

    fn memory(&self) -> Memory {
        let (reading, _) = *self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        reading.memory(OwnUsage {
            used: self.used.load(Ordering::Acquire),
            overhead: self.overhead.load(Ordering::Acquire),
            cap: self.cap,
        })
    }

    fn try_memory(&self) -> Option<Memory> {
        // An error is the device's loss, which it keeps.
        self.read_by(|| self.in_pass()).ok()?;
        Some(self.memory())
    }

    fn active_pass_bytes(&self) -> u64 {
        self.active_pass_bytes.load(Ordering::Acquire)
    }

    fn trim(&self) {
        // The caller must not wait for the device.
        self.wants_trim.store(true, Ordering::Release);
    }

    fn lost(&self) -> Option<Loss> {
        let error = self.check().err()?;
        let (_, noticed) = self.lost.get()?;
        Some(Loss { error: error.to_string(), is_late: *noticed == Noticed::Late })
    }

    fn telemetry(&self) -> Option<Telemetry> {
        let newest = self.telemetry.lock().unwrap_or_else(PoisonError::into_inner);
        let (reading, at) = newest.as_ref()?;
        (at.elapsed() < FRESH).then(|| reading.clone())
    }

    fn held_by(&self, pids: &[i32]) -> Option<u64> {
        self.monitor.as_ref()?.held_by(pids)
    }

    fn program_env(&self) -> Vec<(String, String)> {
        vec![("CUDA_VISIBLE_DEVICES".to_owned(), self.found.uuid.clone())]
    }

    fn lock(&self) -> &DeviceLock {
        &self.lock
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice")
            .field("found", &self.found)
            .field("memory", &self.memory())
            .finish_non_exhaustive()
    }
}
