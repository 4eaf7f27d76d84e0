//! Where CUDA's libraries are on this machine.
//!
//! cudarc opens them by name when it first needs them, and panics if it cannot, or if a symbol is missing. So they are looked
//! for here before: in the places where machines have them, by absolute path. Once opened they stay open, and the dynamic
//! loader gives the same library to every caller that asks for its name.

use std::ffi::{CStr, c_void};
use std::fs;
use std::path::{Path, PathBuf};

use cudarc::{cublaslt, driver, nvrtc};
use libloading::Library;

/// The newest major version of CUDA whose libraries this program knows, and the oldest.
const MAJORS: std::ops::RangeInclusive<i32> = 12..=13;

/// A library that is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    pub path: PathBuf,
}

/// Why one is not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    #[error("not found")]
    Nowhere,
    #[error("{} has no {symbol}: the library is too old, or another library", path.display())]
    Symbol { path: PathBuf, symbol: &'static str },
}

/// What there is besides the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Libraries {
    /// The compiler of kernels.
    pub nvrtc: Result<Opened, Missing>,
    /// NVIDIA's own matrix products.
    pub cublaslt: Result<Opened, Missing>,
}

/// All of the driver's functions that this program may call; the newest of them are of CUDA 11.4.
const DRIVER_SYMBOLS: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceGetUuid_v2",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocFromPoolAsync",
    "cuMemFreeAsync",
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolSetAttribute",
    "cuMemPoolGetAttribute",
    "cuMemPoolTrimTo",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuFuncGetAttribute",
    "cuLaunchKernel",
    "cuGetErrorString",
    "cuGetErrorName",
];

const NVRTC_SYMBOLS: &[&str] = &[
    "nvrtcVersion",
    "nvrtcCreateProgram",
    "nvrtcDestroyProgram",
    "nvrtcCompileProgram",
    "nvrtcGetCUBIN",
    "nvrtcGetCUBINSize",
    "nvrtcGetPTX",
    "nvrtcGetPTXSize",
    "nvrtcGetProgramLog",
    "nvrtcGetProgramLogSize",
    "nvrtcGetNumSupportedArchs",
    "nvrtcGetSupportedArchs",
];

const CUBLASLT_SYMBOLS: &[&str] = &[
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetVersion",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatrixLayoutSetAttribute",
];

/// Opens the driver's library.
///
/// # Errors
/// It is nowhere, or too old for this program.
pub fn driver() -> Result<Opened, Missing> {
    // SAFETY: opens the library and closes it again; its initialisers need nothing of us.
    let present = || unsafe { driver::sys::is_culib_present() };
    if !present() {
        places(None).iter().find(|place| keep(&place.join("libcuda.so.1")));
    }
    if !present() {
        return Err(Missing::Nowhere);
    }
    // SAFETY: it is present, or this would panic.
    let library = unsafe { driver::sys::culib() };
    checked(DRIVER_SYMBOLS, |symbol| address(library, symbol))
}

impl Libraries {
    /// Opens what there is, of a version that a driver for `driver_version` can work with: libraries may be older than the
    /// driver, not newer. A folder of the user's own is looked at first.
    pub fn open(driver_version: i32, folder: Option<&Path>) -> Self {
        let newest = (driver_version / 1000).clamp(*MAJORS.start(), *MAJORS.end());
        let majors: Vec<_> = (*MAJORS.start()..=newest).rev().collect();
        let places = places(folder);
        prefer("libnvrtc.so", &majors, &places, folder.is_some());
        prefer("libcublasLt.so", &majors, &places, folder.is_some());
        // SAFETY: as for the driver's.
        let nvrtc = match unsafe { nvrtc::sys::is_culib_present() } {
            // SAFETY: as for the driver's.
            true => checked(NVRTC_SYMBOLS, |symbol| address(unsafe { nvrtc::sys::culib() }, symbol)),
            false => Err(Missing::Nowhere),
        };
        // SAFETY: as for the driver's.
        let cublaslt = match unsafe { cublaslt::sys::is_culib_present() } {
            // SAFETY: as for the driver's.
            true => checked(CUBLASLT_SYMBOLS, |symbol| address(unsafe { cublaslt::sys::culib() }, symbol)),
            false => Err(Missing::Nowhere),
        };
        Self { nvrtc, cublaslt }
    }
}

/// Opens the newest suitable version of a library, so that it is there when cudarc asks. The loader's own idea of where it is
/// comes before ours, but not before the user's.
fn prefer(name: &str, majors: &[i32], places: &[PathBuf], own_first: bool) {
    let by_loader = |major: &i32| keep(Path::new(&format!("{name}.{major}")));
    let by_place = |place: &Path| majors.iter().any(|major| keep(&place.join(format!("{name}.{major}"))));
    let mut places = places.iter();
    if own_first && places.next().is_some_and(|place| by_place(place)) {
        return;
    }
    let _ = majors.iter().any(by_loader) || places.any(|place| by_place(place));
}

/// Opens a library and never closes it: cudarc's handles, and code of the library in use, have to stay valid. A library beside
/// it that it opens by name itself comes first.
fn keep(path: &Path) -> bool {
    let open = |path: &Path| {
        // SAFETY: libraries of NVIDIA, whose initialisers need nothing of us.
        unsafe { Library::new(path) }.map(std::mem::forget).is_ok()
    };
    if path.is_absolute() {
        if !path.exists() {
            return false;
        }
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc.")) {
            for builtins in
                path.parent().map(|folder| matching(folder, "libnvrtc-builtins.so.")).into_iter().flatten()
            {
                open(&builtins);
            }
        }
    }
    open(path)
}

/// The folders that may hold libraries of CUDA and are not the loader's own, nearest to this process first.
fn places(folder: Option<&Path>) -> Vec<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let mut places: Vec<_> = folder.map(Path::to_owned).into_iter().collect();
    let mut toolkits: Vec<_> = ["CUDA_PATH", "CUDA_HOME"].iter().filter_map(|name| variable(name)).collect();
    toolkits.push("/usr/local/cuda".into());
    toolkits.extend(newest_first(matching(Path::new("/usr/local"), "cuda-")));
    toolkits.push("/opt/cuda".into());
    for toolkit in toolkits {
        places.extend(
            ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"]
                .map(|lib| toolkit.join(lib)),
        );
    }
    // An environment of conda has them in its own folder, one of pip in packages named nvidia-*.
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| variable(name));
    let environments =
        environments.chain(python_on_path()).chain(variable("HOME").map(|home| home.join(".local")));
    for environment in environments.chain(["/usr/local".into(), "/usr".into()]) {
        places.push(environment.join("lib"));
        for python in newest_first(matching(&environment.join("lib"), "python3")) {
            for packages in ["site-packages", "dist-packages"] {
                let packages = matching(&python.join(packages).join("nvidia"), "");
                places.extend(packages.into_iter().map(|package| package.join("lib")));
            }
        }
    }
    // Where containers, WSL and NixOS put what comes with the driver.
    let elsewhere =
        ["/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/wsl/lib", "/run/opengl-driver/lib"];
    places.extend(elsewhere.map(PathBuf::from));
    places
}

/// The environment of the Python that a shell would start.
fn python_on_path() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let python =
        std::env::split_paths(&path).map(|folder| folder.join("python3")).find(|file| file.exists())?;
    Some(python.parent()?.parent()?.to_owned())
}

/// What of a folder begins with some text; nothing, if there is no such folder.
fn matching(folder: &Path, start: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(start))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

/// By the numbers in their names: 3.9 is older than 3.11.
fn newest_first(mut paths: Vec<PathBuf>) -> Vec<PathBuf> {
    let version = |path: &PathBuf| -> Vec<u32> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
    };
    paths.sort_by_key(|path| std::cmp::Reverse(version(path)));
    paths
}

/// The path of a library that has all of its symbols.
fn checked(
    symbols: &[&'static str],
    address: impl Fn(&str) -> Option<*const c_void>,
) -> Result<Opened, Missing> {
    let addresses = symbols.iter().map(|symbol| (*symbol, address(symbol)));
    let mut path = PathBuf::new();
    let mut missing = None;
    for (symbol, address) in addresses {
        match address {
            Some(address) => path = file_of(address).unwrap_or(path),
            None => missing = missing.or(Some(symbol)),
        }
    }
    match missing {
        None => Ok(Opened { path }),
        Some(symbol) => Err(Missing::Symbol { path, symbol }),
    }
}

fn address(library: &Library, symbol: &str) -> Option<*const c_void> {
    // SAFETY: only the address is taken; nothing is called.
    let symbol = unsafe { library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.ok()?;
    Some(*symbol as *const c_void)
}

/// The file of a library that the loader knows by name, if it has a symbol.
pub(super) fn file_with(name: &str, symbol: &str) -> Option<PathBuf> {
    // SAFETY: a library of NVIDIA, whose initialisers need nothing of us.
    let library = unsafe { Library::new(name) }.ok()?;
    file_of(address(&library, symbol)?)
}

/// The file that an address was loaded from.
fn file_of(address: *const c_void) -> Option<PathBuf> {
    // SAFETY: a struct of pointers and integers, which may be zero.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address may be asked for; `info` is written if the answer is not zero.
    if unsafe { libc::dladdr(address, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a text of the loader's that lives as long as the library, which is never closed.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(name.to_string_lossy().into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_python_and_toolkits_are_among_the_places() {
        let folder = tempfile::tempdir().unwrap();
        let lib = folder.path().join("lib/python3.11/site-packages/nvidia/cu13/lib");
        fs::create_dir_all(&lib).unwrap();
        let found = matching(&folder.path().join("lib/python3.11/site-packages/nvidia"), "");
        assert_eq!(found, [lib.parent().unwrap()]);
        let own = Path::new("/srv/cuda");
        let places = places(Some(own));
        assert_eq!(places[0], own);
        assert!(places.iter().any(|place| place.ends_with("usr/local/cuda/lib64")));
    }

    #[test]
    fn versions_are_numbers() {
        let names = ["python3.9", "python3.11", "python3.10"].map(PathBuf::from).to_vec();
        assert_eq!(newest_first(names), ["python3.11", "python3.10", "python3.9"].map(PathBuf::from));
    }

    #[test]
    fn a_library_without_a_symbol_is_told_with_its_name() {
        let here = a_library_without_a_symbol_is_told_with_its_name as *const c_void;
        let has = |symbol: &str| (symbol != "cuNew").then_some(here);
        assert!(checked(&["cuOld"], has).unwrap().path.is_absolute());
        let missing = checked(&["cuOld", "cuNew"], has).unwrap_err();
        assert!(missing.to_string().contains("has no cuNew"), "{missing}");
    }
}
