//! Measures how long the device takes for work on its stream: one event before the work, and one after it.

use std::ptr::null_mut;

use cudarc::driver::sys::CUevent;

use super::{Code, CudaDevice, CudaError, calls};

/// Events that have a time (`CU_EVENT_DEFAULT`).
const WITH_TIME: u32 = 0;

/// Two events of a device. For one thread, and one measurement at a time.
#[derive(Debug)]
pub struct Timer<'a> {
    device: &'a CudaDevice,
    start: Event<'a>,
    end: Event<'a>,
}

impl<'a> Timer<'a> {
    /// # Errors
    /// See [`CudaDevice::failed`]. A driver may lack timed events: then nothing can be measured, but the device is fine.
    pub fn new(device: &'a CudaDevice) -> Result<Self, CudaError> {
        device.bind()?;
        let event = || Event::new(device).map_err(|code| device.failed("make an event", 0, code));
        Ok(Self { device, start: event()?, end: event()? })
    }

    /// What the stream is given from here on is measured.
    ///
    /// # Errors
    /// See [`CudaDevice::failed`].
    pub fn start(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: event and stream live as long as `self`, in the context that is bound.
        let recorded = unsafe { calls::cuEventRecord(self.start.event, self.device.stream()) };
        recorded.map_err(|code| self.device.failed("measure how long work takes", 0, code))
    }

    /// Waits for that work. The milliseconds that the device took, to half a microsecond.
    ///
    /// # Errors
    /// See [`CudaDevice::failed`]; the error of the work, too.
    pub fn stop(&self) -> Result<f32, CudaError> {
        let (start, end, mut ms) = (self.start.event, self.end.event, 0.0);
        // SAFETY: events and stream live as long as `self`, in one context, and the pointer is valid for a write.
        let measured = unsafe {
            calls::cuEventRecord(end, self.device.stream())
                .and_then(|()| calls::cuEventSynchronize(end))
                .and_then(|()| calls::cuEventElapsedTime(&raw mut ms, start, end))
        };
        measured.map(|()| ms).map_err(|code| self.device.failed("measure how long work takes", 0, code))
    }
}

/// An event with a time.
#[derive(Debug)]
struct Event<'a> {
    device: &'a CudaDevice,
    event: CUevent,
}

impl<'a> Event<'a> {
    /// The context is bound.
    fn new(device: &'a CudaDevice) -> Result<Self, Code> {
        let mut event = null_mut();
        // SAFETY: the pointer is valid for a write.
        unsafe { calls::cuEventCreate(&raw mut event, WITH_TIME) }?;
        Ok(Self { device, event })
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed only here; the driver keeps it until work that names it has ended. The device's next
        // call returns an error if there is one.
        let _ = self.device.set_current().and_then(|()| unsafe { calls::cuEventDestroy_v2(self.event) });
    }
}
