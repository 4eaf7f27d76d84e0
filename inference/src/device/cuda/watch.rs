//! The thread that polls the driver about the device, so that no other thread waits for the driver: a faulty driver may not
//! answer for minutes.

use std::io;
use std::sync::{Arc, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::CudaDevice;
use super::nvml::Monitor;

/// Time between two readings of the memory: several for each check by the event loop.
const PERIOD: Duration = Duration::from_millis(250);

/// Readings of the memory for one of everything else.
const TELEMETRY_EVERY: u32 = 4;

/// Starts the thread. It ends when the device is dropped.
///
/// # Errors
/// The system has no thread to give.
pub(super) fn start(device: &Arc<CudaDevice>) -> io::Result<()> {
    let (watched, monitor) = (Arc::downgrade(device), device.monitor.clone());
    let name = format!("watch {}", device.found.name);
    thread::Builder::new().name(name).spawn(move || watch(&watched, monitor.as_deref())).map(drop)
}

fn watch(watched: &Weak<CudaDevice>, monitor: Option<&Monitor>) {
    let mut reading = 0u32;
    while let Some(device) = watched.upgrade() {
        device.trim_now();
        // The device keeps an error, which is its loss.
        let _ = device.read_by(|| device.in_pass());
        if let Some(monitor) = monitor.filter(|_| reading.is_multiple_of(TELEMETRY_EVERY)) {
            let telemetry = (monitor.read(), Instant::now());
            *device.telemetry.lock().unwrap_or_else(PoisonError::into_inner) = Some(telemetry);
        }
        reading = reading.wrapping_add(1);
        drop(device);
        thread::sleep(PERIOD);
    }
}
