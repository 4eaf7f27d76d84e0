//! Waits for the end of another gateway's job. Either that gateway stores the end, or this one takes the replies because that gateway is
//! gone.

use std::time::{Duration, SystemTime};

use tokio::time::sleep;
use vramq_producer::JobError;

use crate::adoption::{AdoptedQueue, NotAdopted};
use crate::job_task::{End, JOB_MAX, StoreUnreadable, Task};
use crate::jobs::in_time::in_time;
use crate::jobs::record::{KEPT_LEAST, Record};

/// The first interval between looks for the job's end. Short, because callers wait.
const LOOK_FIRST: Duration = Duration::from_millis(100);
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// How long a job is awaited beyond [`JOB_MAX`], when its own gateway stores the failure.
const BEYOND: Duration = Duration::from_secs(60);
const _: () = assert!(KEPT_LEAST.as_secs() > JOB_MAX.as_secs() + BEYOND.as_secs());

/// Follows the job until its end is known.
pub(super) async fn life(task: &Task, record: &Record) -> End {
    let Some(adoption) = &task.app.adoption else { return End::Unknown };
    let mut pause = LOOK_FIRST;
    loop {
        if let Some(state) = task.stored_end().await {
            return End::Stored(state);
        }
        if is_unrecorded(task, record).await {
            return end_of_unrecorded(task, record).await;
        }
        let left = left(record);
        if left.is_zero() {
            return End::Answered(Err(late(record)), None);
        }
        match adoption.adopt(&record.reply_queue).await {
            Ok(None) => {}
            Ok(Some(queue)) => {
                if let Some(end) = replies(task, record, &queue, left).await {
                    return end;
                }
                adoption.forget(&record.reply_queue);
            }
            Err(NotAdopted::Lost) => return End::Answered(Err(JobError::ReplyQueueLost), None),
            Err(error) => {
                tracing::warn!(queue = record.reply_queue, %error, "cannot adopt the reply queue of another gateway: trying again");
            }
        }
        sleep(pause).await;
        pause = (2 * pause).min(LOOK_EVERY);
    }
}

/// The end by the replies in an adopted queue. `None` if another gateway consumes the queue first, or the time is over.
async fn replies(task: &Task, record: &Record, queue: &AdoptedQueue, left: Duration) -> Option<End> {
    let awaited = queue.client.await_published(&record.message_id, record.items, left).await;
    let pending = awaited
        .inspect_err(|error| tracing::debug!(%error, "cannot wait for the replies in an adopted queue"))
        .ok()?;
    match task.follow(pending, &queue.client).await {
        // Even after a timeout the store is asked before the job fails.
        End::Answered(
            Err(
                JobError::Closed
                | JobError::Disconnected(_)
                | JobError::ReplyQueueLost
                | JobError::Timeout { .. },
            ),
            _,
        ) => None,
        end => Some(end),
    }
}

/// The stored end of a job whose record is gone: its gateway stores the end just before it removes the record. Reads again while the store
/// fails.
async fn end_of_unrecorded(task: &Task, record: &Record) -> End {
    loop {
        match task.read_end().await {
            Ok(end) => return end.map_or(End::Unknown, End::Stored),
            Err(StoreUnreadable) if left(record).is_zero() => return End::Unknown,
            Err(StoreUnreadable) => sleep(LOOK_EVERY).await,
        }
    }
}

/// Whether the job's gateway has removed the record: the job has ended.
async fn is_unrecorded(task: &Task, record: &Record) -> bool {
    let Some(results) = &task.app.results else { return true };
    let found = Record::find(results.storage(), &task.entry.owner, &record.id);
    matches!(in_time(&record.id, "cannot read a job's record", found).await, Some(Ok(None)))
}

/// How long the job is still awaited: somewhat longer than by its own gateway, which has stored an end and removed the record by then.
pub(super) fn left(record: &Record) -> Duration {
    (JOB_MAX + BEYOND).saturating_sub(age(record))
}

fn age(record: &Record) -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(Duration::from_millis(record.created_at_ms))
}

fn late(record: &Record) -> JobError {
    JobError::Timeout { after: JOB_MAX, items_done: 0, items: record.items }
}
