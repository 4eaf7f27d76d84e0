//! Finds the fastest of the algorithms that cuBLASLt names for a product. The library orders them by the speed that it expects; here the
//! device's times decide.

use crate::device::cuda::{CudaError, Timer};

/// Products in one measurement: enough that the device, and not the calls, takes the time.
const IN_A_ROW: usize = 4;

/// Measurements of each algorithm, in turn, so that a change of the clock is no algorithm's own. The least counts: other work on the
/// device only makes times longer.
const ROUNDS: usize = 3;

/// The library's first algorithm stays unless another takes less than this part of its time. So measurements that differ by
/// chance do not give workers, and starts of one worker, different algorithms.
const WORTH_IT: f32 = 0.97;

/// The least milliseconds of each algorithm; infinite for one that is not usable. `run` gives the stream one product by the
/// algorithm of a number, or says that the library refuses it. `None`: the driver cannot measure.
///
/// # Errors
/// Those of `run`, and of the work.
pub(super) fn times(
    timer: &Timer<'_>,
    is_usable: &[bool],
    mut run: impl FnMut(usize) -> Result<bool, CudaError>,
) -> Result<Option<Vec<f32>>, CudaError> {
    let mut least = vec![f32::INFINITY; is_usable.len()];
    for _ in 0..ROUNDS {
        for (at, least) in least.iter_mut().enumerate().filter(|(at, _)| is_usable[*at]) {
            if measured(timer.start())?.is_none() {
                return Ok(None);
            }
            let mut is_taken = true;
            for _ in 0..IN_A_ROW {
                is_taken &= run(at)?;
            }
            let Some(ms) = measured(timer.stop())? else { return Ok(None) };
            if is_taken {
                *least = least.min(ms);
            }
        }
    }
    Ok(Some(least))
}

/// A driver that refuses to measure is no error: the library's order is used.
pub(super) fn measured<T>(result: Result<T, CudaError>) -> Result<Option<T>, CudaError> {
    match result {
        Err(error @ CudaError::Refused { .. }) => {
            tracing::info!(%error, "the driver measures no times: using the algorithms that cuBLASLt expects to be the fastest");
            Ok(None)
        }
        result => result.map(Some),
    }
}

/// The algorithm to use, by the times of all in the library's order.
pub(super) fn fastest(times: &[f32]) -> usize {
    let first = times.first().copied().unwrap_or(f32::INFINITY);
    let least = times.iter().enumerate().min_by(|(_, a), (_, b)| a.total_cmp(b));
    least.filter(|(_, time)| **time < first * WORTH_IT).map_or(0, |(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_algorithm_stays_unless_another_is_clearly_faster() {
        const NEVER: f32 = f32::INFINITY;
        let rows: [(&[f32], usize); 8] = [
            (&[], 0),
            (&[5.0], 0),
            (&[5.0, 2.0, 9.0], 1),
            (&[5.0, 4.0, 3.0, 3.0], 2),
            (&[5.0, 4.9], 0),
            (&[5.0, 4.8], 1),
            (&[NEVER, 7.0], 1),
            (&[NEVER, NEVER], 0),
        ];
        for (times, expected) in rows {
            assert_eq!(fastest(times), expected, "{times:?}");
        }
    }
}
