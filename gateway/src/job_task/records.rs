//! Writes and removes the record of a job in the store of results, and reads the end that another gateway stored.

use std::time::{Duration, SystemTime};

use tokio::time::sleep;
use vramq_producer::Client;

use super::Task;
use crate::adoption::Adoption;
use crate::jobs::in_time::in_time;
use crate::jobs::record::{self, Record};
use crate::jobs::view::state_of;
use crate::jobs::{ResultStore, State};
use crate::off_runtime::off_runtime;

/// How often the removal of a record is tried. Until it is removed, other gateways take the job for unfinished.
const REMOVALS_MAX: usize = 3;

/// The pause between two attempts to remove a record.
const REMOVE_AGAIN: Duration = Duration::from_secs(5);

/// The store could not be read, so it is unknown whether it has the end.
#[derive(Debug)]
pub(crate) struct StoreUnreadable;

impl Task {
    /// The end that another gateway has stored. `None` once this gateway has withdrawn the job: then only the withdrawal is stored, and the
    /// job's own end is still to come. An end of an earlier run under the same name does not count.
    pub(crate) async fn stored_end(&self) -> Option<State> {
        self.read_end().await.ok().flatten()
    }

    /// Like [`stored_end`](Self::stored_end), with an error if the store cannot be read.
    pub(crate) async fn read_end(&self) -> Result<Option<State>, StoreUnreadable> {
        let entry = &self.entry;
        let Some((results, _)) = self.recorded().filter(|_| !entry.state().is_end()) else { return Ok(None) };
        let read =
            in_time(&entry.id, "cannot look for a job's end", results.read(&entry.owner, &entry.id)).await;
        let Some(written) = read.ok_or(StoreUnreadable)?.map_err(|_| StoreUnreadable)? else {
            return Ok(self.is_recorded_as_withdrawn(results).await.then_some(State::Withdrawn));
        };
        let created_ms = entry.created_ms;
        Ok(off_runtime(written.len(), move || state_of(&written, created_ms)).await)
    }

    /// Whether the job was withdrawn, and the stored withdrawal has expired. Asked of jobs that are older than results are kept.
    async fn is_recorded_as_withdrawn(&self, results: &ResultStore) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let age = now.saturating_sub(Duration::from_millis(self.entry.created_ms));
        if age < self.app.config.results.keep {
            return false;
        }
        let found = Record::find(results.storage(), &self.entry.owner, &self.entry.id);
        let found = in_time(&self.entry.id, "cannot read a job's record", found).await;
        matches!(found, Some(Ok(Some(record))) if record.withdrawn && self.is_own(&record))
    }

    /// Whether a record is of this run of the job: names are used again. Each run has a secret of its own.
    fn is_own(&self, record: &Record) -> bool {
        record.secret == self.entry.secret
    }

    /// The store that has the job's record while the job is unfinished; `None` if jobs are not recorded.
    pub(crate) fn recorded(&self) -> Option<(&ResultStore, &Adoption)> {
        self.app.results.as_ref().zip(self.app.adoption.as_ref()).filter(|_| self.kept)
    }

    /// Makes the job known to the other gateways. A job that cannot be recorded is known to this one alone.
    pub(crate) async fn put_record(&self, client: &Client) {
        let (Some((results, _)), Some(reply_queue)) = (self.recorded(), client.reply_queue()) else { return };
        let withdrawn = matches!(self.entry.state(), State::Withdrawn);
        let record = Record {
            id: self.entry.id.clone(),
            message_id: self.entry.message_id.clone(),
            model: self.entry.model.clone(),
            items: self.entry.items,
            created_at_ms: self.entry.created_ms,
            request_sha256: self.entry.fingerprint,
            secret: self.entry.secret.clone(),
            withdrawn,
            reply_queue: reply_queue.to_owned(),
        };
        let put = record.put(results.storage(), &self.entry.owner);
        if let Some(Err(error)) = in_time(&record.id, "cannot store a job's record", put).await {
            tracing::error!(
                job = record.id, %error,
                "cannot store a job's record: other gateways do not know the job until it has ended"
            );
        }
        if !withdrawn && matches!(self.entry.state(), State::Withdrawn) {
            self.record_withdrawal().await;
        }
    }

    /// Notes in the job's record that its caller has withdrawn it. A job without a record has ended, or is being published: then the record
    /// that is still to come says so. The job may end meanwhile, and its own gateway remove the record before this writes it again.
    pub(crate) async fn record_withdrawal(&self) {
        let Some((results, _)) = self.recorded() else { return };
        let (job, owner, storage) = (&self.entry.id, &self.entry.owner, results.storage());
        let noted = async {
            let found = Record::find(storage, owner, job).await?;
            let Some(record) = found.filter(|record| !record.withdrawn && self.is_own(record)) else {
                return Ok::<(), object_store::Error>(());
            };
            Record { withdrawn: true, ..record }.put(storage, owner).await?;
            if self.has_own_end(results).await? {
                record::remove(storage, owner, job).await?;
            }
            Ok(())
        };
        if let Some(Err(error)) = in_time(job, "cannot note a withdrawal in a job's record", noted).await {
            tracing::warn!(
                job, %error,
                "cannot note a withdrawal in a job's record: once its stored end has expired, gateways show the job as queued until it ends"
            );
        }
    }

    /// Whether this run's own end is stored, and not its withdrawal.
    async fn has_own_end(&self, results: &ResultStore) -> object_store::Result<bool> {
        let Some(written) = results.read(&self.entry.owner, &self.entry.id).await? else { return Ok(false) };
        let created_ms = self.entry.created_ms;
        let end = off_runtime(written.len(), move || state_of(&written, created_ms)).await;
        Ok(end.is_some_and(|end| !matches!(end, State::Withdrawn)))
    }

    /// Removes the record, because the job has ended. A later sweep removes a record that stays. A record of a later run stays: this one may
    /// have been withdrawn an hour ago, or its record may be gone although the store did not say so.
    pub(crate) async fn remove_record(&self) {
        let Some((results, _)) = self.recorded() else { return };
        let (job, owner, storage) = (&self.entry.id, &self.entry.owner, results.storage());
        for _ in 0..REMOVALS_MAX {
            let removed = async {
                match Record::find(storage, owner, job).await? {
                    Some(record) if self.is_own(&record) => record::remove(storage, owner, job).await,
                    _ => Ok(()),
                }
            };
            match in_time(job, "cannot remove the record of a job that has ended", removed).await {
                Some(Ok(())) => return,
                Some(Err(error)) => {
                    tracing::warn!(job, %error, "cannot remove the record of a job that has ended: trying again");
                }
                None => {}
            }
            sleep(REMOVE_AGAIN).await;
        }
    }
}
