//! Jobs that wait for passes, each in its model's batcher.

use super::batcher::Batcher;
use super::{Scheduler, Waiting};
use crate::ids::{ItemIndex, JobKey, ModelIndex};

impl Scheduler {
    /// How many jobs of a model wait.
    pub(crate) fn waiting(&self, model: ModelIndex) -> usize {
        self.batchers[model.0].waiting()
    }

    /// The cost of a job's waiting items.
    pub(crate) fn waiting_cost(&self, model: ModelIndex, job: JobKey) -> usize {
        self.batchers[model.0].cost_of(job)
    }

    pub(crate) fn push(&mut self, model: ModelIndex, job: Waiting) {
        self.catch_up_device_time(model);
        self.batchers[model.0].push(job);
    }

    /// More items of a job were prepared.
    pub(crate) fn extend(&mut self, model: ModelIndex, job: Waiting) {
        self.catch_up_device_time(model);
        self.batchers[model.0].extend(job);
    }

    /// A pass of a job fitted: see [`Batcher::relax`].
    pub(crate) fn relax(&mut self, model: ModelIndex, job: JobKey, hint: Option<u32>, exclusive: bool) {
        self.batchers[model.0].relax(job, hint, exclusive);
    }

    /// Puts items of a pass back, before all others: see [`Batcher::put_back`].
    pub(crate) fn put_back(
        &mut self,
        model: ModelIndex,
        jobs: Vec<Waiting>,
        items: impl IntoIterator<Item = (JobKey, ItemIndex, usize)>,
    ) {
        self.batchers[model.0].put_back(jobs, items);
    }

    /// Drops a job's waiting items.
    pub(crate) fn remove(&mut self, model: ModelIndex, job: JobKey) {
        self.batchers[model.0].remove(job);
    }

    /// A model that had nothing to run cannot claim the device time that others had meanwhile, even if the others have nothing waiting at
    /// this moment.
    fn catch_up_device_time(&mut self, model: ModelIndex) {
        if self.batchers[model.0].waiting() == 0 {
            let busy = (0..self.batchers.len()).filter(|other| self.batchers[*other].waiting() > 0);
            let least = busy.map(|other| self.device_time[other]).min_by(f64::total_cmp);
            let own = &mut self.device_time[model.0];
            *own = own.max(least.unwrap_or(self.clock));
        }
    }

    /// The jobs whose waiting items cost more than a pass.
    pub(crate) fn large(&self) -> Vec<JobKey> {
        self.batchers.iter().flat_map(Batcher::large).collect()
    }
}
