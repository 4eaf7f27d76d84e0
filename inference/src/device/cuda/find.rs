//! Lists the CUDA devices without opening any, and selects the one that the configuration names.

use std::ffi::CStr;
use std::fmt;

use cudarc::driver::sys::CUuuid;

use super::libraries::{self, Missing};
use super::nvml::Monitor;
use super::{Code, calls};

/// A CUDA device as the driver lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its index in the driver's order, which `CUDA_VISIBLE_DEVICES` may change.
    pub ordinal: usize,
    /// `cuda:0` and so on, by that place.
    pub name: String,
    /// What its maker calls it.
    pub product: String,
    /// As `nvidia-smi -L` shows it: `GPU-` and 32 digits, or `MIG-` for an instance of a part of a GPU.
    pub uuid: String,
    /// Bytes.
    pub total: u64,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {})", self.name, self.product, self.uuid)
    }
}

/// The driver, and what it lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    pub library: libraries::Opened,
    /// The newest version of CUDA that it knows: 12080 is 12.8.
    pub version: i32,
    pub devices: Vec<Found>,
}

/// Why no devices can be listed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    #[error(
        "the NVIDIA driver's library, libcuda.so.1, is not on this machine: install the driver, or give the container access \
         to it"
    )]
    NoDriver,
    #[error("unsupported NVIDIA driver: {0}")]
    Unsuitable(Missing),
    #[error("the NVIDIA driver lists no device: {0}")]
    Driver(Code),
}

impl From<Code> for Absent {
    fn from(code: Code) -> Self {
        Self::Driver(code)
    }
}

impl From<Missing> for Absent {
    fn from(missing: Missing) -> Self {
        if missing == Missing::Nowhere { Self::NoDriver } else { Self::Unsuitable(missing) }
    }
}

/// Lists the CUDA devices without opening any.
///
/// # Errors
/// [`Absent`] on a machine without a driver or with one that fails.
pub fn find() -> Result<Driver, Absent> {
    let library = libraries::open_driver()?;
    let (mut version, mut count) = (0, 0);
    // SAFETY: the driver takes no flags, and the pointers are valid for a write.
    unsafe {
        calls::cuInit(0)?;
        calls::cuDriverGetVersion(&raw mut version)?;
        calls::cuDeviceGetCount(&raw mut count)?;
    }
    let visible = std::env::var(VISIBLE).unwrap_or_default();
    let devices = (0..count).map(|ordinal| describe(ordinal, &visible)).collect::<Result<_, _>>()?;
    Ok(Driver { library, version, devices })
}

/// Selects the devices that the driver lists, and their order. It names MIG instances by `MIG-` and their UUID.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Room for a device's name, which ends with a zero.
const NAME_BYTES: usize = 256;

fn describe(ordinal: i32, visible: &str) -> Result<Found, Code> {
    let (mut device, mut total) = (0, 0);
    let mut name = [0_u8; NAME_BYTES];
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: the pointers are valid for a write, that of the name for so many bytes.
    unsafe {
        calls::cuDeviceGet(&raw mut device, ordinal)?;
        calls::cuDeviceGetName(name.as_mut_ptr().cast(), NAME_BYTES as i32, device)?;
        calls::cuDeviceGetUuid_v2(&raw mut uuid, device)?;
        calls::cuDeviceTotalMem_v2(&raw mut total, device)?;
    }
    let product = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
    let uuid = in_words(uuid.bytes.map(|byte| byte.to_ne_bytes()[0]), visible, Monitor::knows);
    let ordinal = usize::try_from(ordinal).unwrap_or(0);
    Ok(Found { ordinal, name: format!("cuda:{ordinal}"), product, uuid, total: total as u64 })
}

/// A UUID as NVIDIA's tools write it. The driver returns the same 16 bytes for a GPU and for a MIG instance. `CUDA_VISIBLE_DEVICES`
/// shows which of the two it is, or else NVML does.
fn in_words(bytes: [u8; 16], visible: &str, is_known: impl Fn(&str) -> bool) -> String {
    let digits = uuid::Uuid::from_bytes(bytes).to_string();
    let [gpu, instance] = ["GPU", "MIG"].map(|kind| format!("{kind}-{digits}"));
    let is_named = visible.split(',').any(|name| name.trim().eq_ignore_ascii_case(&instance));
    if is_named || (!is_known(&gpu) && is_known(&instance)) { instance } else { gpu }
}

/// Which device a worker is to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// By its place in the driver's order.
    Index(u32),
    /// By its UUID, or the start of it.
    Uuid(String),
}

impl Which {
    /// Whether it names an instance of MIG in full.
    pub fn is_instance(&self) -> bool {
        let digits = |uuid: &str| uuid.strip_prefix("MIG-").map(uuid::Uuid::try_parse);
        matches!(self, Self::Uuid(uuid) if matches!(digits(uuid), Some(Ok(_))))
    }
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "number {index}"),
            Self::Uuid(uuid) => write!(f, "{uuid}"),
        }
    }
}

/// The configured device is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", no_device_message(.which, *.candidates, .devices, .visible.as_deref()))]
pub struct NotListed {
    pub which: Which,
    /// How many listed devices match.
    pub candidates: usize,
    pub devices: Vec<Found>,
    /// `CUDA_VISIBLE_DEVICES`, which hides devices.
    pub visible: Option<String>,
}

fn no_device_message(which: &Which, candidates: usize, devices: &[Found], visible: Option<&str>) -> String {
    let listed: Vec<_> = devices.iter().map(Found::to_string).collect();
    let problem =
        if candidates == 0 { "there is no such CUDA device" } else { "that could be several CUDA devices" };
    let hides = visible.map(|visible| format!(" (CUDA_VISIBLE_DEVICES is `{visible}` and hides others)"));
    format!("device {which}: {problem}; the driver lists {}{}", listed.join(", "), hides.unwrap_or_default())
}

/// The device that is meant, among those that the driver lists.
///
/// # Errors
/// It is not there, or not the only one that could be meant.
pub fn choose(devices: &[Found], which: &Which) -> Result<Found, NotListed> {
    let digits = |uuid: &str| {
        let uuid = uuid.to_ascii_lowercase();
        let bare = uuid.strip_prefix("gpu-").or(uuid.strip_prefix("mig-")).unwrap_or(&uuid);
        bare.replace('-', "")
    };
    let is_meant = |device: &Found| match which {
        Which::Index(index) => device.ordinal == *index as usize,
        Which::Uuid(uuid) => digits(&device.uuid).starts_with(&digits(uuid)),
    };
    let meant: Vec<_> = devices.iter().filter(|device| is_meant(device)).collect();
    if let [device] = meant[..] {
        return Ok(device.clone());
    }
    Err(NotListed {
        which: which.clone(),
        candidates: meant.len(),
        devices: devices.to_vec(),
        visible: std::env::var(VISIBLE).ok(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(ordinal: usize, uuid: &str) -> Found {
        let (name, product) = (format!("cuda:{ordinal}"), "A".to_owned());
        Found { ordinal, name, product, uuid: uuid.to_owned(), total: 1 }
    }

    #[test]
    fn a_machine_with_or_without_a_driver_gets_an_answer_and_no_panic() {
        match find() {
            Ok(driver) => assert!(driver.devices.iter().all(|device| device.total > 0), "{driver:?}"),
            Err(absent) => assert!(!absent.to_string().is_empty()),
        }
    }

    #[test]
    fn a_uuid_reads_as_in_nvidia_smi() {
        let bytes = [0x1d, 0x5a, 0x00, 0xff, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
        let digits = "1d5a00ff-0102-0304-0506-0708090a0b0c";
        let named = |visible: &str, known: &str| in_words(bytes, visible, |name| name.starts_with(known));
        assert_eq!(named("", "GPU-"), format!("GPU-{digits}"));
        assert_eq!(named("0,1", "no NVML"), format!("GPU-{digits}"));
        // A MIG instance, by `CUDA_VISIBLE_DEVICES` or by NVML.
        assert_eq!(named(&format!("MIG-{digits}"), "no NVML"), format!("MIG-{digits}"));
        assert_eq!(named("", "MIG-"), format!("MIG-{digits}"));
    }

    #[test]
    fn a_device_is_meant_by_its_place_or_by_the_start_of_its_uuid() {
        let devices = [
            device(0, "GPU-1d5a00ff-0102-0304-0506-0708090a0b0c"),
            device(1, "GPU-1d5a00ee-0102-0304-0506-0708090a0b0c"),
        ];
        let chosen = |which| choose(&devices, &which).map(|device| device.ordinal);
        let uuid = |text: &str| Which::Uuid(text.to_owned());
        assert_eq!(chosen(Which::Index(1)), Ok(1));
        assert_eq!(chosen(uuid("GPU-1D5A00EE")), Ok(1));
        assert_eq!(chosen(uuid("MIG-1d5a00ff-0102-0304-0506-0708090a0b0c")), Ok(0));
        assert!(uuid("MIG-1d5a00ff-0102-0304-0506-0708090a0b0c").is_instance());
        assert!(
            !uuid("MIG-1d5a").is_instance()
                && !uuid("GPU-1d5a00ff-0102-0304-0506-0708090a0b0c").is_instance()
        );
        let several = chosen(uuid("GPU-1d5a")).unwrap_err();
        assert!(several.to_string().contains("several"), "{several}");
        let absent = chosen(Which::Index(2)).unwrap_err().to_string();
        assert!(absent.contains("number 2") && absent.contains("cuda:1 (A, GPU-1d5a00ee"), "{absent}");
    }
}
