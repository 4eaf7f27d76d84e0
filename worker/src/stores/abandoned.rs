//! Counts work on threads that its jobs have given up. In a folder that hangs such work does not end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

/// How many pieces of work go on although their jobs have given them up.
#[derive(Debug, Default)]
pub struct Abandoned(watch::Sender<usize>);

/// A piece of work of a job on a thread.
#[derive(Debug)]
struct Work {
    abandoned: Arc<Abandoned>,
    /// The job or the thread is done with it. Changes only while the count is locked.
    is_left: AtomicBool,
}

/// The job waits for the work.
#[derive(Debug)]
pub struct OfJob(Arc<Work>);

/// The thread does the work.
#[derive(Debug)]
pub struct OfThread(Arc<Work>);

impl Abandoned {
    /// Work that begins. Its job keeps one half as long as it waits, and its thread the other one until it is done.
    pub fn begin(self: &Arc<Self>) -> (OfJob, OfThread) {
        let work = Arc::new(Work { abandoned: Arc::clone(self), is_left: AtomicBool::new(false) });
        (OfJob(Arc::clone(&work)), OfThread(work))
    }

    pub fn count(&self) -> usize {
        *self.0.borrow()
    }

    /// Waits until so many are counted.
    pub async fn reaches(&self, most: usize) {
        let mut counts = self.0.subscribe();
        // An `Err` means that the sender is gone, and it is here.
        drop(counts.wait_for(|count| *count >= most).await);
    }
}

impl Work {
    /// The job or the thread is done with the work. `change` is what the count then becomes, given whether the other one was done before.
    fn leave(&self, change: impl FnOnce(usize, bool) -> usize) {
        self.abandoned.0.send_if_modified(|count| {
            let before = *count;
            *count = change(before, self.is_left.swap(true, Ordering::Relaxed));
            *count != before
        });
    }
}

impl Drop for OfJob {
    fn drop(&mut self) {
        self.0.leave(|count, is_done| count + usize::from(!is_done));
    }
}

impl Drop for OfThread {
    fn drop(&mut self) {
        self.0.leave(|count, was_given_up| count.saturating_sub(usize::from(was_given_up)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_counts_from_when_its_job_gives_it_up_until_its_thread_ends() {
        let abandoned = Arc::new(Abandoned::default());
        let (of_job, of_thread) = abandoned.begin();
        let (waits, hangs) = abandoned.begin();
        drop(of_thread);
        assert_eq!(abandoned.count(), 0, "the work has ended, and its job does not know yet");
        drop((of_job, waits));
        assert_eq!(abandoned.count(), 1);
        drop(hangs);
        assert_eq!(abandoned.count(), 0);
    }
}
