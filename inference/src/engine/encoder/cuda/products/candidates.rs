//! Finds the fastest of the algorithms that cuBLASLt names for a product. The library orders them by the speed that it expects; here the
//! device's times decide.

use crate::device::cuda::{CudaError, Timer};

/// Products in one measurement: enough that the device takes the time, and not the calls.
const IN_A_ROW: usize = 4;

/// Measurements of each algorithm. The algorithms take turns, so that a change of the clock affects all. The least time counts,
/// because other work on the device only makes times longer.
const ROUNDS: usize = 3;

/// Another algorithm replaces the library's first only if it takes less than this part of the first one's time. So chance does not
/// give different algorithms to workers, or to two starts of a worker.
const WORTH_IT: f32 = 0.97;

/// The least time of each algorithm in milliseconds; infinite for one that is not usable. `run` enqueues one product by the
/// algorithm with this index, and returns false if the library refuses it. `None`: the driver cannot measure.
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

/// `None` if the driver refuses to measure: then the library's order is used.
pub(super) fn measured<T>(result: Result<T, CudaError>) -> Result<Option<T>, CudaError> {
    match result {
        Err(error @ CudaError::Refused { .. }) => {
            tracing::info!(%error, "the driver measures no times: using the algorithms that cuBLASLt expects to be the fastest");
            Ok(None)
        }
        result => result.map(Some),
    }
}

/// The index of the algorithm to use. `times` are in the library's order.
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
