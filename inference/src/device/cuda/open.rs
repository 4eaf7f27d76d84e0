//! Opens the configured device: finds it, creates its context, measures the context's memory, and finds the libraries.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute;
use vramq_core::units::{FreeMib, Mib};

use super::context::{Context, Event, EventKind, Stream};
use super::find::{Absent, Found, NotListed, Which, choose, find};
use super::libraries::Libraries;
use super::nvml::Monitor;
use super::pool::Pool;
use super::{Code, CudaDevice, CudaError, watch};
use crate::device::Device as _;
use crate::device::lock::DeviceLock;

/// Which device, and how much of it.
#[derive(Clone, Debug)]
pub struct Options {
    pub which: Which,
    /// The most bytes that models and passes may take together.
    pub cap: Option<u64>,
    /// The lock with which processes run exclusive passes on the device one at a time.
    pub lock: Lock,
    /// A folder with libraries, before all others.
    pub libraries: Option<PathBuf>,
}

/// Where the file of the device lock is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lock {
    /// There is none: the device is this process's own.
    None,
    /// In this folder, named after the device's UUID: all processes that see the folder share the lock.
    ByUuid(PathBuf),
    File(PathBuf),
}

impl Lock {
    /// Opens the lock. A file that the user named must open. A file in the shared folder may belong to another user: then passes
    /// are exclusive within this process only, and the log says so.
    fn open(&self, uuid: &str) -> Result<DeviceLock, OpenError> {
        match self {
            Self::None => Ok(DeviceLock::own()),
            Self::File(path) => {
                DeviceLock::shared(path).map_err(|source| OpenError::Lock { path: path.clone(), source })
            }
            Self::ByUuid(folder) => {
                let path = folder.join(format!("vramq-{uuid}"));
                Ok(DeviceLock::shared(&path).unwrap_or_else(|error| {
                    tracing::warn!(
                        file = %path.display(), %error,
                        "the device lock cannot be opened: exclusive passes do not wait for other processes. Set \
                         `device.cuda.file` to a file that all workers on this GPU can write"
                    );
                    DeviceLock::own()
                }))
            }
        }
    }
}

/// Why there is no [`CudaDevice`].
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Absent(#[from] Absent),
    #[error(transparent)]
    NotListed(#[from] NotListed),
    #[error("{device}: {during}: {code}{}", hint(.code))]
    Driver { device: String, during: &'static str, code: Code },
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("open {}, the file of the device lock", path.display())]
    Lock {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("start the thread that watches the device")]
    Thread(#[source] io::Error),
}

/// What to do about codes that come from how the machine is, not from what this program does.
fn hint(code: &Code) -> &'static str {
    use cudarc::driver::sys::CUresult::*;
    match *code {
        Code::Driver(code) if code == CUDA_ERROR_OUT_OF_MEMORY as u32 => {
            ". Other processes leave no room even for a context: `nvidia-smi` shows them"
        }
        Code::Driver(code) if code == CUDA_ERROR_DEVICE_UNAVAILABLE as u32 => {
            ". Another process has it for itself: see `nvidia-smi -q -d COMPUTE`"
        }
        _ => "",
    }
}

/// What a device is made of.
pub(super) struct Parts {
    pub found: Found,
    pub capability: (u32, u32),
    pub monitor: Option<Arc<Monitor>>,
    pub context: Arc<Context>,
    pub context_cost: Option<u64>,
    pub stream: Arc<Stream>,
    pub end: Event,
    pub pool: Pool,
    pub lock: DeviceLock,
    pub libraries: Libraries,
}

impl CudaDevice {
    /// Makes a context on a device, which costs some hundred MiB of it, a stream and a pool, and starts the thread that
    /// watches it.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(options: &Options) -> Result<Arc<Self>, OpenError> {
        let driver = find()?;
        let found = choose(&driver.devices, &options.which)?;
        let failed = |during| {
            let device = found.to_string();
            move |code: Code| OpenError::Driver { device, during, code }
        };
        let lock = options.lock.open(&found.uuid)?;
        let monitor = Monitor::open(&found.uuid)
            .inspect_err(
                |error| tracing::info!(%error, "NVML is not available: no temperature, power or use of the device, and the memory of the CUDA context is unknown"),
            )
            .ok()
            .map(Arc::new);
        let ordinal = i32::try_from(found.ordinal).unwrap_or(i32::MAX);
        let (context, context_cost) =
            make_context(ordinal, monitor.as_deref()).map_err(failed("make a context"))?;
        let stream = Stream::new(&context).map_err(failed("make a stream"))?;
        let end = Event::new(&context, EventKind::Slept).map_err(failed("make an event"))?;
        let pool = Pool::new(Arc::clone(&stream), ordinal, driver.version, options.cap)
            .map_err(failed("make a memory pool"))?;
        let attribute =
            |which| context.attribute(which).map(i32::unsigned_abs).map_err(failed("ask for its capability"));
        let capability = (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let libraries = Libraries::open(driver.version, options.libraries.as_deref());
        let parts =
            Parts { found, capability, monitor, context, context_cost, stream, end, pool, lock, libraries };
        let device = Arc::new(Self::new(parts, options.cap));
        device.read()?;
        device.tell(driver.version);
        watch::start(&device).map_err(OpenError::Thread)?;
        Ok(device)
    }
}

impl CudaDevice {
    /// The log's line on what was opened.
    fn tell(&self, cuda: i32) {
        let Found { name, product, uuid, .. } = self.found();
        let (major, minor) = self.capability();
        let (free, total) = (FreeMib(self.memory().free), FreeMib(self.found().total));
        let context = self.context_cost().map_or_else(|| "unknown".to_owned(), |cost| Mib(cost).to_string());
        let Libraries { nvrtc, cublaslt } = self.libraries();
        let (nvrtc, cublaslt) = (nvrtc.is_ok(), cublaslt.is_ok());
        tracing::info!(
            device = name, product, uuid, cuda, sm = major * 10 + minor, context, %free, %total, nvrtc, cublaslt,
            "device open"
        );
    }
}

/// Measures the context's memory by NVML, which needs no context itself. Memory that other processes take meanwhile is counted as
/// well; no way is known to tell them apart.
fn make_context(ordinal: i32, monitor: Option<&Monitor>) -> Result<(Arc<Context>, Option<u64>), Code> {
    let used = || monitor.and_then(Monitor::memory_used);
    let before = used();
    let context = Context::new(ordinal)?;
    let cost = before.zip(used()).map(|(before, after)| after.saturating_sub(before));
    Ok((context, cost))
}
