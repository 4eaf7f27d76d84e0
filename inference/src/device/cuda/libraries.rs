//! Finds CUDA's libraries on this machine, and opens them.
//!
//! [`functions!`](super::calls) calls the opened libraries.

use std::ffi::{CStr, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::Library;

/// The major versions of CUDA whose libraries this program knows.
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

/// The driver's functions that this program cannot do without; the newest of them are of CUDA 11.4.
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
    "cuCtxSetCurrent",
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
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLaunchKernel",
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

/// The driver's library by the name that drivers install it with.
const DRIVER: &str = "libcuda.so.1";

static DRIVER_LIBRARY: OnceLock<Library> = OnceLock::new();
static NVRTC_LIBRARY: OnceLock<Library> = OnceLock::new();
static CUBLASLT_LIBRARY: OnceLock<Library> = OnceLock::new();

/// The driver's library, once [`open_driver`] has opened it.
pub(super) fn driver() -> Option<&'static Library> {
    DRIVER_LIBRARY.get()
}

/// NVRTC, once [`Libraries::open`] has opened it.
pub(super) fn nvrtc() -> Option<&'static Library> {
    NVRTC_LIBRARY.get()
}

/// cuBLASLt, as [`nvrtc`].
pub(super) fn cublaslt() -> Option<&'static Library> {
    CUBLASLT_LIBRARY.get()
}

/// Opens the driver's library.
///
/// # Errors
/// It is nowhere, or too old for this program.
pub fn open_driver() -> Result<Opened, Missing> {
    let by_place = || places(None).iter().find_map(|place| open(&place.join(DRIVER)));
    if driver().is_none()
        && let Some(library) = open(Path::new(DRIVER)).or_else(by_place)
    {
        // `Err` means that another thread has opened the same library.
        let _ = DRIVER_LIBRARY.set(library);
    }
    let library = driver().ok_or(Missing::Nowhere)?;
    checked(DRIVER_SYMBOLS, |symbol| address(library, symbol))
}

impl Libraries {
    /// Opens the libraries that are there, in a version that a driver for `driver_version` supports: no newer major version than
    /// the driver's. The user's own `folder` comes first. A library stays open, so another call in the same process returns the
    /// same one.
    pub fn open(driver_version: i32, folder: Option<&Path>) -> Self {
        let newest = driver_version / 1000;
        let majors: Vec<_> = MAJORS.rev().filter(|major| *major <= newest).collect();
        let places = places(folder);
        let own = usize::from(folder.is_some());
        let find = |name: &str, symbols: &[&'static str], cell: &'static OnceLock<Library>| {
            let files = files(name, &majors, &places, own);
            if cell.get().is_none()
                && let Some(library) = files.iter().find_map(|file| open(file))
            {
                // `Err` means that another thread has opened it.
                let _ = cell.set(library);
            }
            let library = cell.get().ok_or(Missing::Nowhere)?;
            checked(symbols, |symbol| address(library, symbol))
        };
        Self {
            nvrtc: find("libnvrtc.so", NVRTC_SYMBOLS, &NVRTC_LIBRARY),
            cublaslt: find("libcublasLt.so", CUBLASLT_SYMBOLS, &CUBLASLT_LIBRARY),
        }
    }
}

/// The files that a library may be, the best first: in the first `own` places, where the loader has it, in the other places; of
/// the newest version in each. Never by a name without a version: that may be a stub, or of any version.
fn files(name: &str, majors: &[i32], places: &[PathBuf], own: usize) -> Vec<PathBuf> {
    let in_place = |place: &PathBuf| {
        majors.iter().map(|major| place.join(format!("{name}.{major}"))).collect::<Vec<_>>()
    };
    let (own, others) = places.split_at(own.min(places.len()));
    let by_loader = majors.iter().map(|major| PathBuf::from(format!("{name}.{major}")));
    own.iter().flat_map(in_place).chain(by_loader).chain(others.iter().flat_map(in_place)).collect()
}

/// Opens a library for good, because its code may be in use. NVRTC opens its builtins by name, so those beside it are opened first.
fn open(path: &Path) -> Option<Library> {
    // SAFETY: libraries of NVIDIA, whose initialisers need nothing of us.
    let open = |path: &Path| unsafe { Library::new(path) }.ok();
    if path.is_absolute() {
        if !path.exists() {
            return None;
        }
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc.")) {
            for builtins in
                path.parent().map(|folder| matching(folder, "libnvrtc-builtins.so.")).into_iter().flatten()
            {
                if let Some(builtins) = open(&builtins) {
                    std::mem::forget(builtins);
                }
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

/// The entries of a folder whose names begin with `start`; none if there is no such folder.
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
    fn the_users_folder_comes_first_and_no_version_is_newer_than_the_driver() {
        let places = ["/own", "/usr/local/cuda/lib64"].map(PathBuf::from);
        let names = |majors: &[i32], own| {
            let files = files("libnvrtc.so", majors, &places, own);
            files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>()
        };
        let all = ["/own/libnvrtc.so.13", "/own/libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so.12"];
        assert_eq!(names(&[13, 12], 1)[..4], all);
        assert_eq!(
            names(&[12], 0),
            ["libnvrtc.so.12", "/own/libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so.12"]
        );
        assert!(names(&[], 1).is_empty());
    }

    #[test]
    fn versions_are_numbers() {
        let names = ["python3.9", "python3.11", "python3.10"].map(PathBuf::from).to_vec();
        assert_eq!(newest_first(names), ["python3.11", "python3.10", "python3.9"].map(PathBuf::from));
    }

    #[test]
    fn a_library_without_a_symbol_is_named() {
        let here = a_library_without_a_symbol_is_named as *const c_void;
        let has = |symbol: &str| (symbol != "cuNew").then_some(here);
        assert!(checked(&["cuOld"], has).unwrap().path.is_absolute());
        let missing = checked(&["cuOld", "cuNew"], has).unwrap_err();
        assert!(missing.to_string().contains("has no cuNew"), "{missing}");
    }
}
