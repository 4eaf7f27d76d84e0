//! CUDA devices, found at run time. Only found, so far: no engine runs on them yet.

use cudarc::driver::result::{self, DriverError};

/// A CUDA device as the driver lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// `cuda:0` and so on, in the driver's order, which `CUDA_VISIBLE_DEVICES` governs.
    pub name: String,
    /// What its maker calls it.
    pub product: String,
    /// Bytes.
    pub total: u64,
}

/// Why no devices can be listed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Absent {
    #[error("the NVIDIA driver's library (libcuda) is not on this machine")]
    NoDriver,
    #[error("the NVIDIA driver does not answer: {0}")]
    Driver(DriverError),
}

/// Lists the CUDA devices without opening any.
///
/// # Errors
/// [`Absent`] on a machine without a driver or with one that fails.
pub fn find() -> Result<Vec<Found>, Absent> {
    // cudarc panics on the first call if the library is missing, so this comes before all others.
    // SAFETY: looks the library up by name and opens it; libcuda has no initialisers that need anything of us.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(Absent::NoDriver);
    }
    result::init().map_err(Absent::Driver)?;
    let count = result::device::get_count().map_err(Absent::Driver)?;
    (0..count).map(|ordinal| describe(ordinal).map_err(Absent::Driver)).collect()
}

fn describe(ordinal: i32) -> Result<Found, DriverError> {
    let device = result::device::get(ordinal)?;
    let product = result::device::get_name(device)?;
    // SAFETY: `device` is a handle that the driver has just given for this ordinal.
    let total = unsafe { result::device::total_mem(device) }?;
    Ok(Found { name: format!("cuda:{ordinal}"), product, total: total as u64 })
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
}
