//! A device's sensors: utilisation, temperature, power, clocks.

use std::time::Duration;

/// Readings come every second. A driver that hangs gives none; older readings than this are not reported.
pub const FRESH: Duration = Duration::from_secs(10);

/// Readings of a device. What it does not measure is absent: cards differ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Telemetry {
    /// Bytes that processes hold, all of them.
    pub memory_used: Option<u64>,
    /// Percent of the last sampling period in which a kernel ran.
    pub gpu_percent: Option<u32>,
    /// Percent of it in which memory was read or written.
    pub memory_percent: Option<u32>,
    pub temperature_celsius: Option<u32>,
    pub power_milliwatt: Option<u32>,
    pub power_limit_milliwatt: Option<u32>,
    pub sm_clock_mhz: Option<u32>,
    pub memory_clock_mhz: Option<u32>,
    /// Each reason for lower clocks, and whether it holds now. Being idle is not among them. Empty if the device reports none.
    pub throttles: Vec<(&'static str, bool)>,
}

impl Telemetry {
    /// Why the clocks are lower than they could be.
    pub fn throttled(&self) -> impl Iterator<Item = &'static str> {
        self.throttles.iter().filter(|(_, now)| *now).map(|(reason, _)| *reason)
    }
}
