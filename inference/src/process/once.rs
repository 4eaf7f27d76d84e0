//! One-shot programs: started for each item, by [templates](super::template::Template) of arguments. The items of a pass run one after the
//! other.

use tokio::sync::watch;

use super::aside::Aside;
use super::config::{Mode, ProcessConfig};
use super::cost::{Costs, Unit};
use super::once_item::Runner;
use super::once_memory::Left;
use super::outputs::PassOutputs;
use super::pass::{PassEnd, PassJob};
use super::pool::PoolOptions;
use super::revision_watch::RevisionWatch;

/// How a pass of a one-shot program ended.
pub(super) struct Ended {
    pub end: PassEnd,
    /// How many programs were started.
    pub started: u64,
    pub learnt: Learnt,
    /// What the last program leaves, if one was started.
    pub left: Option<Left>,
    /// No program was started for an item, because its files have this revision by now, and the worker serves another one.
    pub other_revision: Option<String>,
}

/// Runs a pass, item by item. It stops after the first program that does not exit, or whose memory is not free soon.
pub(super) async fn run(
    config: &ProcessConfig,
    options: &PoolOptions,
    revision: Option<&RevisionWatch>,
    aside: &Aside,
    job: &mut PassJob,
    closing: &mut watch::Receiver<bool>,
) -> Ended {
    let ended = |end| Ended { end, started: 0, learnt: Vec::new(), left: None, other_revision: None };
    let (Mode::Once(once), Some(revision)) = (&config.mode, revision) else {
        return ended(PassEnd::NotRun { reason: "the model is not one-shot".to_owned() });
    };
    let (mut learnt, mut outputs) = (Vec::new(), PassOutputs::default());
    let (mut started, mut left) = (0, None::<Left>);
    for index in 0..job.request.items.len() {
        let cost = Costs::new(&job.request.items[index]).of(config.vram.per);
        let declared = config.vram.declared_bytes(cost.unwrap_or(0.0));
        if let Some(left) = &left
            && !left.has_room(&options.account, declared).await
        {
            break;
        }
        let runner = Runner { config, options, once, revision, aside, index, declared };
        let ran = runner.run(job, closing, &mut outputs).await;
        started += u64::from(ran.left.is_some());
        left = ran.left;
        match ran.end {
            Ok(output) => job.events.output(index, output),
            Err(end) => return Ended { end, started, learnt, left, other_revision: ran.other_revision },
        }
        learnt.extend(cost.zip(ran.peak).filter(|_| config.vram.learn));
        if index + 1 == job.request.items.len() {
            let peak = learnt.iter().map(|(_, peak)| *peak).max();
            return Ended { started, learnt, left, ..ended(PassEnd::Done { peak }) };
        }
    }
    // The items that are left run in another pass.
    let reason = "the last program, or device memory that it held, is still there".to_owned();
    Ended { started, learnt, left, ..ended(PassEnd::NotRun { reason }) }
}

/// What items cost, and what their programs took of the device.
pub(super) type Learnt = Vec<(f64, u64)>;

/// The cost of a pass of a one-shot program: that of its largest item, since they run one after the other.
pub(super) fn pass_cost(items: &[Costs], unit: Unit) -> Option<f64> {
    items.iter().map(|costs| costs.of(unit)).try_fold(0.0, |most: f64, cost| Some(most.max(cost?)))
}
