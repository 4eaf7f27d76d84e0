//! Measures with real passes how much of a model's work the device does in a second, and computes the value for scaling.

use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;
use vramq_core::device::{PassError, PassShape};
use vramq_schemas::{Input, Params};

use crate::engine::{Engine, Item};
use crate::model::Model;

/// How long passes are repeated: about ten passes on a CPU, and a doctor with several models still answers within seconds.
const MEASURE_MIN: Duration = Duration::from_secs(1);

/// The cost of an item: that of a short paragraph. Shorter texts run faster.
const ITEM_COST: usize = 64;

/// The wait of a job, in seconds, that the value for KEDA stands for. The value is proportional to this wait.
const WAIT_S: u32 = 30;

/// The result of the measurement. A job has `model.NAME.job_items` items, as for slots.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Throughput {
    job_items: usize,
    /// The cost of each item that ran: tokens, for an encoder.
    item_cost: usize,
    cost_per_s: f64,
    jobs_per_s: f64,
    /// KEDA's `value`, in messages per worker, at which a job waits about `wait_s` seconds.
    keda_value: u64,
    wait_s: u32,
}

impl Throughput {
    /// Runs full passes of at most `budget` bytes for a while. `None` for a model that takes neither texts nor pairs of texts.
    ///
    /// # Errors
    /// A pass fails.
    pub fn measure(model: &Model, budget: u64) -> Result<Option<Self>, PassError> {
        let engine = &*model.engine;
        let Some(item) = sample(engine) else { return Ok(None) };
        let cost = item.cost().max(1);
        let mut items = (model.pass_cost_max / cost).max(1);
        while items > 1 && engine.pass_bytes(PassShape { items, cost: items * cost, longest: cost }) > budget
        {
            items /= 2;
        }
        let pass = vec![item; items];
        // The first pass is a warm-up: it loads weights and allocates memory.
        engine.run(&pass)?;
        let (start, mut passes) = (Instant::now(), 0_u32);
        while passes == 0 || start.elapsed() < MEASURE_MIN {
            engine.run(&pass)?;
            passes += 1;
        }
        let items_per_s = f64::from(passes) * items as f64 / start.elapsed().as_secs_f64();
        Ok(Some(Self::new(model.job_shape.items, cost, items_per_s)))
    }

    fn new(job_items: usize, item_cost: usize, items_per_s: f64) -> Self {
        let jobs_per_s = items_per_s / job_items.max(1) as f64;
        Self {
            job_items,
            item_cost,
            cost_per_s: items_per_s * item_cost as f64,
            jobs_per_s,
            keda_value: ((jobs_per_s * f64::from(WAIT_S)).round() as u64).max(1),
            wait_s: WAIT_S,
        }
    }
}

/// An item that costs about [`ITEM_COST`], in the form that the model takes: a text, or a query with a document.
fn sample(engine: &dyn Engine) -> Option<Item> {
    let prepare = |words: usize| {
        let text = vec!["word"; words].join(" ");
        let pair = json!({"query": "word", "document": text});
        let first = |input| engine.prepare(&[input], &Params::default()).ok()?.pop();
        [Input::Text(text), Input::Json(pair.into())].into_iter().find_map(first)
    };
    let item = prepare(ITEM_COST)?;
    // Some tokenisers make several tokens of a word, and all add a few tokens.
    let more = item.cost().saturating_sub(ITEM_COST);
    let per_word = item.cost().div_ceil(ITEM_COST).max(1);
    match more {
        0 => Some(item),
        _ => prepare(ITEM_COST.saturating_sub(more.div_ceil(per_word)).max(1)).or(Some(item)),
    }
}

impl fmt::Display for Throughput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { job_items, item_cost, cost_per_s, jobs_per_s, keda_value, wait_s } = self;
        write!(
            f,
            "{jobs_per_s:.1} jobs/s of {job_items} items with {item_cost} tokens each ({cost_per_s:.0} tokens/s); KEDA value for \
             a wait of {wait_s} s: {keda_value} messages per worker"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_for_keda_is_what_a_worker_answers_within_the_wait() {
        let measured = Throughput::new(32, 64, 160.0);
        assert_eq!((measured.keda_value, measured.wait_s), (150, 30));
        assert_eq!(
            measured.to_string(),
            "5.0 jobs/s of 32 items with 64 tokens each (10240 tokens/s); KEDA value for a wait of 30 s: 150 messages per worker"
        );
        // A model that takes minutes for a job gets a worker for each job.
        assert_eq!(Throughput::new(32, 64, 0.1).keda_value, 1);
    }
}
