//! Reads a device through the NVIDIA Management Library: temperature, power, clocks, use, and its memory without a context.

use std::path::PathBuf;

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

use super::libraries::file_with;
use crate::device::telemetry::Telemetry;

/// The library, as the driver installs it.
const NVML: &str = "libnvidia-ml.so.1";

/// Reasons to slow down, as metrics name them.
const THROTTLES: &[(ThrottleReasons, &str)] = &[
    (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, "applications_clocks_setting"),
    (ThrottleReasons::SW_POWER_CAP, "sw_power_cap"),
    (ThrottleReasons::HW_SLOWDOWN, "hw_slowdown"),
    (ThrottleReasons::SYNC_BOOST, "sync_boost"),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, "sw_thermal_slowdown"),
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, "hw_thermal_slowdown"),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "hw_power_brake_slowdown"),
    (ThrottleReasons::DISPLAY_CLOCK_SETTING, "display_clock_setting"),
];

/// The library's file, if there is one.
pub fn nvml_path() -> Option<PathBuf> {
    file_with(NVML, "nvmlInit_v2")
}

/// The library's view of one device. Calls may take milliseconds: not for the event loop.
#[derive(Debug)]
pub struct Monitor {
    nvml: Nvml,
    uuid: String,
}

impl Monitor {
    /// # Errors
    /// The library is not there, or does not know the device.
    pub fn open(uuid: &str) -> Result<Self, NvmlError> {
        let monitor = Self { nvml: Nvml::builder().lib_path(NVML.as_ref()).init()?, uuid: uuid.to_owned() };
        monitor.device()?;
        Ok(monitor)
    }

    /// Whether the library is there and knows a device by this name: `GPU-` or, for an instance of MIG, `MIG-` and its UUID.
    pub fn knows(uuid: &str) -> bool {
        Self::open(uuid).is_ok()
    }

    /// Bytes that processes hold.
    pub fn memory_used(&self) -> Option<u64> {
        Some(self.device().ok()?.memory_info().ok()?.used)
    }

    /// Bytes that these processes hold together; `None` if the driver does not tell. In some containers it reports ids of another
    /// namespace: then neither these processes are in its list nor the worker's own, which has a context on the device.
    pub fn held_by(&self, pids: &[i32]) -> Option<u64> {
        let device = self.device().ok()?;
        let computing = device.running_compute_processes().ok()?;
        let is_own = |process: &ProcessInfo| {
            process.pid == std::process::id() && process.used_gpu_memory != UsedGpuMemory::Unavailable
        };
        let is_own_namespace = computing.iter().any(is_own);
        let ours = computing
            .iter()
            .filter(|process| i32::try_from(process.pid).is_ok_and(|pid| pids.contains(&pid)));
        let bytes = ours.map(|process| match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        });
        let bytes = bytes.collect::<Option<Vec<u64>>>()?;
        (!bytes.is_empty() || is_own_namespace).then(|| bytes.iter().sum())
    }

    pub fn read(&self) -> Telemetry {
        let Ok(device) = self.device() else { return Telemetry::default() };
        let utilization = device.utilization_rates().ok();
        let throttles = device.current_throttle_reasons().map_or_else(
            |_| Vec::new(),
            |now| THROTTLES.iter().map(|(bit, name)| (*name, now.contains(*bit))).collect(),
        );
        Telemetry {
            memory_used: device.memory_info().ok().map(|memory| memory.used),
            gpu_percent: utilization.as_ref().map(|rates| rates.gpu),
            memory_percent: utilization.as_ref().map(|rates| rates.memory),
            temperature_celsius: device.temperature(TemperatureSensor::Gpu).ok(),
            power_milliwatt: device.power_usage().ok(),
            power_limit_milliwatt: device.enforced_power_limit().ok(),
            sm_clock_mhz: device.clock_info(Clock::SM).ok(),
            memory_clock_mhz: device.clock_info(Clock::Memory).ok(),
            throttles,
        }
    }

    fn device(&self) -> Result<nvml_wrapper::Device<'_>, NvmlError> {
        self.nvml.device_by_uuid(self.uuid.as_str())
    }
}
