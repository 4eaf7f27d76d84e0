//! Measures how long the device takes for work on its stream: one event before the work, and one after it.

use super::context::{Event, EventKind};
use super::{CudaDevice, CudaError, calls};

/// Two events of a device. For one thread, and one measurement at a time.
#[derive(Debug)]
pub struct Timer<'a> {
    device: &'a CudaDevice,
    start: Event,
    end: Event,
}

impl<'a> Timer<'a> {
    /// # Errors
    /// See [`CudaDevice::failed`]. A driver may lack timed events: then nothing can be measured, but the device is fine.
    pub fn new(device: &'a CudaDevice) -> Result<Self, CudaError> {
        device.bind()?;
        let event = || {
            let made = Event::new(device.context(), EventKind::Timed);
            made.map_err(|code| device.failed("make an event", 0, code))
        };
        Ok(Self { device, start: event()?, end: event()? })
    }

    /// What the stream is given from here on is measured.
    ///
    /// # Errors
    /// See [`CudaDevice::failed`].
    pub fn start(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: event and stream live as long as `self`, in the context that is bound.
        let recorded = unsafe { calls::cuEventRecord(self.start.handle(), self.device.stream()) };
        recorded.map_err(|code| self.device.failed("measure how long work takes", 0, code))
    }

    /// Waits for that work. The milliseconds that the device took, to half a microsecond.
    ///
    /// # Errors
    /// See [`CudaDevice::failed`]; the error of the work, too.
    pub fn stop(&self) -> Result<f32, CudaError> {
        let (start, end, mut ms) = (self.start.handle(), self.end.handle(), 0.0);
        // SAFETY: events and stream live as long as `self`, in one context, and the pointer is valid for a write.
        let measured = unsafe {
            calls::cuEventRecord(end, self.device.stream())
                .and_then(|()| calls::cuEventSynchronize(end))
                .and_then(|()| calls::cuEventElapsedTime(&raw mut ms, start, end))
        };
        measured.map(|()| ms).map_err(|code| self.device.failed("measure how long work takes", 0, code))
    }
}
