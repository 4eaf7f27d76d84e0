//! Which CUDA devices there are, asked without opening any.

use std::mem::MaybeUninit;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

/// A CUDA device as the driver lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its place in the driver's order, which `CUDA_VISIBLE_DEVICES` governs.
    pub ordinal: usize,
    /// `cuda:0` and so on, by that place.
    pub name: String,
    /// What its maker calls it.
    pub product: String,
    /// As `nvidia-smi -L` shows it: `GPU-` and 32 digits.
    pub uuid: String,
    /// Bytes.
    pub total: u64,
}

/// Why no devices can be listed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    #[error("the NVIDIA driver's library (libcuda) is not on this machine")]
    NoDriver,
    #[error("the NVIDIA driver does not answer: {0}")]
    Driver(super::Code),
}

impl From<DriverError> for Absent {
    fn from(error: DriverError) -> Self {
        Self::Driver(error.into())
    }
}

/// Lists the CUDA devices without opening any.
///
/// # Errors
/// [`Absent`] on a machine without a driver or with one that fails.
pub fn find() -> Result<Vec<Found>, Absent> {
    // cudarc panics on the first call if the library is missing, so this comes before all others.
    // SAFETY: looks the library up by name and opens it; libcuda has no initialisers that need anything of us.
    if !unsafe { sys::is_culib_present() } {
        return Err(Absent::NoDriver);
    }
    result::init()?;
    let count = result::device::get_count()?;
    (0..count).map(|ordinal| Ok(describe(ordinal)?)).collect()
}

fn describe(ordinal: i32) -> Result<Found, DriverError> {
    let device = result::device::get(ordinal)?;
    let product = result::device::get_name(device)?;
    let uuid = in_words(result::device::get_uuid(device)?.bytes.map(|byte| byte.cast_unsigned()));
    // SAFETY: `device` is a handle that the driver has just given for this ordinal.
    let total = unsafe { result::device::total_mem(device) }?;
    let ordinal = usize::try_from(ordinal).unwrap_or(0);
    Ok(Found { ordinal, name: format!("cuda:{ordinal}"), product, uuid, total: total as u64 })
}

/// A UUID as NVIDIA's tools write it.
fn in_words(bytes: [u8; 16]) -> String {
    format!("GPU-{}", uuid::Uuid::from_bytes(bytes))
}

/// The newest version of CUDA that the driver knows: 12080 is 12.8.
pub(super) fn driver_version() -> Result<i32, DriverError> {
    let mut version = MaybeUninit::uninit();
    // SAFETY: the pointer is valid for a write, which the call has made if it succeeds.
    unsafe {
        sys::cuDriverGetVersion(version.as_mut_ptr()).result()?;
        Ok(version.assume_init())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_with_or_without_a_driver_gets_an_answer_and_no_panic() {
        match find() {
            Ok(devices) => assert!(devices.iter().all(|device| device.total > 0), "{devices:?}"),
            Err(absent) => assert!(!absent.to_string().is_empty()),
        }
    }

    #[test]
    fn a_uuid_reads_as_in_nvidia_smi() {
        let bytes = [0x1d, 0x5a, 0x00, 0xff, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
        assert_eq!(in_words(bytes), "GPU-1d5a00ff-0102-0304-0506-0708090a0b0c");
    }
}
