//! What a device tells of itself besides its memory.

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
    /// Why the clocks are lower than they could be; being idle is no reason here.
    pub throttled: Vec<&'static str>,
}
