//! Makes the products that passes will need while a model loads, and chooses their algorithms.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use cudarc::driver::sys::CUdeviceptr;
use vramq_core::units::Mib;

use super::buckets::{ROWS_MIN, bucket, buckets};
use super::{Product, Products, candidates, element_bytes, is_refusal};
use crate::device::cuda::cublaslt::Places;
use crate::device::cuda::{CudaDevice, CudaError, Timer};

/// What was done while a model loaded.
struct Warm {
    /// The most that there was room for.
    rows: usize,
    /// Products whose algorithms were timed.
    timed: usize,
    /// Of those, products with another algorithm than the library's first.
    reordered: usize,
}

/// How a product's algorithm was chosen.
enum Choice {
    /// The library has one only.
    OfOne,
    Timed {
        is_first: bool,
    },
    /// The driver measures no times, or the device has no room for the code of more algorithms than the first.
    NotTimed,
}

impl Products {
    /// Makes the products of `maps` for each bucket up to `rows`, and chooses their algorithms. The library loads code onto the
    /// device when an algorithm is first used. Afterwards that code is there and counted in the device's overhead, so no pass finds
    /// the device too full for it. If memory is short, the largest numbers of rows are left to the first passes.
    ///
    /// # Errors
    /// As for [`multiply`](Self::multiply), but that the device has no room.
    pub fn warm_up(&self, device: &Arc<CudaDevice>, maps: &[Product], rows: usize) -> Result<(), CudaError> {
        let (before, begun) = (device.overhead(), Instant::now());
        match self.multiply_each(device, maps, rows) {
            Ok(Warm { rows, timed, reordered }) => {
                let (code, ms) = (Mib(device.overhead() - before), begun.elapsed().as_millis());
                tracing::info!(rows, timed, reordered, %code, ms, "the kernels of matrix products are loaded");
                Ok(())
            }
            Err(CudaError::OutOfMemory(error)) => {
                tracing::warn!(%error, rows, "not enough memory to load the kernels of matrix products now: the first passes load them");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn multiply_each(
        &self,
        device: &Arc<CudaDevice>,
        maps: &[Product],
        rows: usize,
    ) -> Result<Warm, CudaError> {
        let widest = maps.iter().map(|map| map.inner.max(map.columns)).max().unwrap_or(0);
        let side_of = |rows: usize| rows * widest * element_bytes(self.data);
        let (most, scratch) = most_rows(rows, |rows| device.alloc(2 * side_of(rows)))?;
        let side = side_of(most);
        let (from, to) = (scratch.start(), scratch.start() + side as CUdeviceptr);
        let mut warm = Warm { rows: most, timed: 0, reordered: 0 };
        let mut timer = candidates::measured(Timer::new(device))?;
        for product in buckets(most).flat_map(|rows| maps.iter().map(move |map| Product { rows, ..*map })) {
            // SAFETY: both sides have room for as many rows of the widest map, and live until `scratch` is dropped, which waits
            // for the stream; weights and bias live longer.
            let is_taken = unsafe { self.multiply(device, &product, from, to) }?;
            let Some(ready) = timer.as_ref().filter(|_| is_taken) else { continue };
            // SAFETY: as above.
            match unsafe { self.choose(device, ready, &product, from, to) }? {
                Choice::OfOne => {}
                Choice::Timed { is_first } => {
                    warm.timed += 1;
                    warm.reordered += usize::from(!is_first);
                }
                Choice::NotTimed => timer = None,
            }
        }
        // The results of uninitialised numbers are not needed. It only matters that the products have run.
        drop(scratch);
        device.check().map(|()| warm)
    }

    /// Times the algorithms that a product's plan has, and uses the fastest from here on.
    ///
    /// # Safety
    /// As for [`multiply`](Self::multiply).
    ///
    /// # Errors
    /// As for [`multiply`](Self::multiply), but that the device has no room.
    unsafe fn choose(
        &self,
        device: &CudaDevice,
        timer: &Timer<'_>,
        product: &Product,
        from: CUdeviceptr,
        to: CUdeviceptr,
    ) -> Result<Choice, CudaError> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Some(plan)) = plans.get_mut(&self.key(product)) else { return Ok(Choice::OfOne) };
        let count = plan.algorithms();
        if count < 2 {
            return Ok(Choice::OfOne);
        }
        let places = Places { from, weights: product.weights, bias: product.bias, to };
        let mut run = |number: usize, rows: usize| -> Result<bool, CudaError> {
            plan.choose(number);
            // SAFETY: by this function's contract; the workspace lives as long as `self`, for this device's one stream.
            match unsafe { plan.run(&self.handle, rows, &places, self.workspace(), device.stream()) } {
                Ok(()) => Ok(true),
                Err(code) if is_refusal(code) => Ok(false),
                Err(code) => Err(device.failed("multiply matrices", 0, code)),
            }
        };
        // The first product of each algorithm loads its code, which stays. A pass may have any number of rows, so an algorithm that
        // does not take odd numbers is unusable.
        let odd = product.rows - 1;
        let tried =
            device.counting(|| (0..count).map(|number| run(number, odd)).collect::<Result<Vec<bool>, _>>());
        let timed = match tried {
            Ok(Ok(is_usable)) => candidates::times(timer, &is_usable, |number| run(number, product.rows)),
            Ok(Err(error)) | Err(error) => Err(error),
        };
        plan.choose(0);
        let times = match timed {
            Ok(Some(times)) => times,
            Ok(None) => return Ok(Choice::NotTimed),
            Err(CudaError::OutOfMemory(error)) => {
                tracing::info!(%error, "not enough memory to try other algorithms of matrix products than cuBLASLt's first ones");
                return Ok(Choice::NotTimed);
            }
            Err(error) => return Err(error),
        };
        let fastest = candidates::fastest(&times);
        plan.choose(fastest);
        let Product { inner, columns, rows, .. } = *product;
        tracing::debug!(
            inner,
            columns,
            rows,
            ?times,
            fastest,
            "algorithms of a matrix product, in milliseconds"
        );
        Ok(Choice::Timed { is_first: fastest == 0 })
    }
}

/// The bucket of `rows`, halved until `alloc` finds memory for it; and that memory.
fn most_rows<T>(rows: usize, alloc: impl Fn(usize) -> Result<T, CudaError>) -> Result<(usize, T), CudaError> {
    let mut most = bucket(rows);
    loop {
        match alloc(most) {
            Ok(memory) => return Ok((most, memory)),
            Err(CudaError::OutOfMemory(_)) if most > ROWS_MIN => most = (most / 2).max(ROWS_MIN),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::OutOfMemory;

    #[test]
    fn where_memory_is_short_fewer_rows_are_tried() {
        let oom = OutOfMemory { asked: 2, free: 1, total: 3, foreign: 0 };
        let of = |rows: usize, room: usize| {
            let alloc = |rows: usize| if rows <= room { Ok(()) } else { Err(CudaError::OutOfMemory(oom)) };
            most_rows(rows, alloc).map(|(most, ())| most)
        };
        assert_eq!([of(100, 128), of(5000, 8192), of(1, 64)].map(Result::ok), [128, 5120, 64].map(Some));
        assert_eq!([of(8192, 8191), of(8192, 300), of(8192, 64)].map(Result::ok), [4096, 256, 64].map(Some));
        // The bucket is 192, then 96. Half of 96 is less than is planned for, so 64 is tried.
        assert_eq!([of(150, 191), of(150, 64)].map(Result::ok), [96, 64].map(Some));
        assert!(matches!(of(8192, 63), Err(CudaError::OutOfMemory(_))));
    }
}
