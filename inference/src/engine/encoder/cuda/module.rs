//! Loads the kernels on a device: from the cache, from NVRTC or, without NVRTC, from PTX that the driver compiles.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::cache::Entry;
use super::compile::{self, CompileError, Target};
use super::element::ElementType;
use super::{embedded, sources};
use crate::device::cuda::{CudaDevice, CudaError, Function, Module};

/// Why a device has no kernels.
#[derive(Debug, thiserror::Error)]
pub enum KernelsError {
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("{element} needs compute capability {}.{} or newer, the device has {}.{}", needs.0, needs.1, has.0, has.1)]
    TooOld { element: ElementType, needs: (u32, u32), has: (u32, u32) },
    #[error(
        "the driver rejects the embedded kernels: {refused}. {}",
        match nvrtc {
            Some(error) => format!("NVRTC could not help: {error}"),
            None => "NVRTC, which could compile them for this driver, is not on this machine: install a newer driver, or \
                     nvidia-cuda-nvrtc".to_owned(),
        }
    )]
    Unusable { refused: CudaError, nvrtc: Option<NvrtcError> },
}

/// Why NVRTC's code is of no use.
#[derive(Debug, thiserror::Error)]
pub enum NvrtcError {
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error("the driver rejects its code: {0}")]
    Refused(CudaError),
}

/// The kernels of one type of elements.
#[derive(Debug)]
pub(super) struct Kernels {
    pub embed: Function,
    pub add_norm: Function,
    pub pool: Function,
    pub bias_gelu: Function,
    pub rotate: Function,
    pub gate: Function,
    pub linear: LinearTiles,
    pub attention: Function,
    /// Queries that a block of attention takes.
    pub attention_queries: usize,
}

/// Linear maps, without and with GELU behind them, in tiles of two sizes; in f32 there are small ones only.
#[derive(Debug)]
pub(super) struct LinearTiles {
    pub small: [Function; 2],
    pub large: Option<[Function; 2]>,
}

/// Head sizes that attention is compiled for. A smaller head is padded.
const HEADS: [usize; 5] = [16, 32, 64, 128, 256];

/// Queries of a block of attention: as in kernels/attention.cu, attention_f32.cu and attention_wide.cu.
const QUERIES: usize = 64;
const QUERIES_F32: usize = 16;
const QUERIES_WIDE: usize = 8;

/// The largest head that there is a kernel for.
pub(super) const HEAD_MAX: usize = HEADS[HEADS.len() - 1];

impl Kernels {
    /// Loads the kernels for heads of a size up to [`HEAD_MAX`]. Seconds, the first time; compiled code is kept in
    /// `cache`, if there is such a folder.
    pub fn load(
        device: &CudaDevice,
        element: ElementType,
        head: usize,
        cache: Option<&Path>,
    ) -> Result<Self, KernelsError> {
        let (needs, has) = (element.capability_min(), device.capability());
        if has < needs {
            return Err(KernelsError::TooOld { element, needs, has });
        }
        let module = device.counting(|| load(device, element, cache))??;
        let function = |name: &str| -> Result<Function, KernelsError> {
            let loaded = module.function(&format!("{name}_{element}"));
            Ok(loaded.map_err(|error| device.failed("find a kernel", 0, error))?)
        };
        let pair = |name: &str| -> Result<_, KernelsError> {
            Ok([function(name)?, function(&format!("{name}_gelu"))?])
        };
        let padded = HEADS.into_iter().find(|size| head <= *size).unwrap_or(HEAD_MAX);
        Ok(Self {
            embed: function("embed")?,
            add_norm: function("add_norm")?,
            pool: function("pool")?,
            bias_gelu: function("bias_gelu")?,
            rotate: function("rotate")?,
            gate: function("gate")?,
            linear: LinearTiles {
                small: pair("linear_small")?,
                large: match element {
                    ElementType::F32 => None,
                    ElementType::F16 | ElementType::Bf16 => Some(pair("linear_large")?),
                },
            },
            attention: function(&format!("attention_{padded}"))?,
            attention_queries: match element {
                _ if padded == HEAD_MAX => QUERIES_WIDE,
                ElementType::F32 => QUERIES_F32,
                ElementType::F16 | ElementType::Bf16 => QUERIES,
            },
        })
    }
}

fn load(
    device: &CudaDevice,
    element: ElementType,
    cache: Option<&Path>,
) -> Result<Arc<Module>, KernelsError> {
    let mut nvrtc = None;
    if device.libraries().nvrtc.is_ok() {
        match compiled(device, element, cache) {
            Ok(module) => return Ok(module),
            Err(Uncompiled::Lost(error)) => return Err(error.into()),
            Err(Uncompiled::Nvrtc(error)) => {
                tracing::warn!(%error, "NVRTC's kernels cannot be used: the driver compiles the embedded PTX");
                nvrtc = Some(error);
            }
        }
    }
    let begun = Instant::now();
    let module = device.load_module(embedded::ptx(element, device.capability()).into_bytes());
    module
        .inspect(
            |_| tracing::info!(%element, ms = begun.elapsed().as_millis(), "the driver compiled the kernels"),
        )
        .map_err(|error| match error {
            CudaError::Refused { .. } => KernelsError::Unusable { refused: error, nvrtc },
            error => error.into(),
        })
}

/// Why there is no module of NVRTC's.
enum Uncompiled {
    Lost(CudaError),
    Nvrtc(NvrtcError),
}

/// Takes the code from the cache, or compiles it and caches it. A cache that cannot be written only makes the next start slower.
fn compiled(
    device: &CudaDevice,
    element: ElementType,
    cache: Option<&Path>,
) -> Result<Arc<Module>, Uncompiled> {
    let target = Target::Cubin(device.capability());
    let (major, minor) = compile::version();
    let key = format!("{element}-{target}-nvrtc{major}.{minor}-{}", sources::hash(element));
    let entry = cache.map(|folder| Entry::new(folder, &key));
    let folder = || cache.map(Path::display);
    // Held until the code is cached, because other processes wait for it.
    let _lock = entry.as_ref().map(|entry| {
        entry.lock().inspect_err(|error| {
            tracing::warn!(folder = folder().map(tracing::field::display), %error, "cannot lock the cache of kernels: processes that start together may each compile them");
        })
    });
    if let Some(code) = entry.as_ref().and_then(Entry::read) {
        match device.load_module(code) {
            Ok(module) => return Ok(module),
            Err(error @ CudaError::Refused { .. }) => {
                tracing::info!(%error, "the driver rejects the cached kernels: compiling them again");
            }
            Err(error) => return Err(Uncompiled::Lost(error)),
        }
    }
    let begun = Instant::now();
    let code = compile::compile(element, target, &[]).map_err(|error| Uncompiled::Nvrtc(error.into()))?.code;
    tracing::info!(%element, %target, ms = begun.elapsed().as_millis(), "compiled the kernels");
    let module = device.load_module(code.clone()).map_err(|error| match error {
        CudaError::Refused { .. } => Uncompiled::Nvrtc(NvrtcError::Refused(error)),
        error => Uncompiled::Lost(error),
    })?;
    // Only now: code that the driver rejects would be read and rejected again at each start.
    if let Some(error) = entry.and_then(|entry| entry.write(&code).err()) {
        tracing::debug!(folder = folder().map(tracing::field::display), %error, "cannot write the compiled kernels to the cache");
    }
    Ok(module)
}
