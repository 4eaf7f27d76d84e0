//! A bound on what a consumer has been given and nobody has looked at yet.
//!
//! lapin puts deliveries into memory as fast as they come. It hands each to a delegate, on the thread that reads the socket: one
//! that waits there makes the broker wait, too.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lapin::Consumer;
use lapin::message::Delivery;
use tokio::sync::mpsc;

/// Bytes of letters that are here and not looked at yet, about.
const BYTES_MAX: usize = 16 * 1024 * 1024;

/// How long the thread that reads the socket may wait at a time: it also sends heartbeats.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Properties and headers take something, too.
const OVERHEAD: usize = 1024;

/// Deliveries in their order, from all consumers that were let in.
pub(super) struct Deliveries {
    limiter: Arc<ByteLimiter>,
    from: mpsc::UnboundedReceiver<lapin::Result<Option<Delivery>>>,
    to: mpsc::UnboundedSender<lapin::Result<Option<Delivery>>>,
    /// One that is dropped is cancelled.
    consumers: Vec<Consumer>,
}

#[derive(Default)]
pub(super) struct ByteLimiter {
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Default)]
struct State {
    bytes: usize,
    is_shut: bool,
}

impl ByteLimiter {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn acquire(&self, bytes: usize) {
        let mut state = self.state();
        if state.is_shut && state.bytes > BYTES_MAX {
            let waited = self
                .freed
                .wait_timeout_while(state, WAIT_MAX, |state| state.is_shut && state.bytes > BYTES_MAX);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.bytes += bytes;
    }

    fn release(&self, bytes: usize) {
        self.state().bytes -= bytes;
        self.freed.notify_one();
    }

    /// Does something that needs a lock of the channel's. lapin holds it while it hands a delivery over, so also while that
    /// waits here: the gate is open meanwhile, or both would wait for each other.
    pub(super) fn bypass<T>(&self, what: impl FnOnce() -> T) -> T {
        self.shut(false);
        let done = what();
        self.shut(true);
        done
    }

    fn shut(&self, is_shut: bool) {
        self.state().is_shut = is_shut;
        self.freed.notify_all();
    }
}

impl Deliveries {
    pub(super) fn new() -> Self {
        // The gate is its bound: in bytes, which a channel does not count.
        let (to, from) = mpsc::unbounded_channel();
        Self { limiter: Arc::default(), from, to, consumers: Vec::new() }
    }

    pub(super) fn admit(&mut self, consumer: Consumer) {
        let (limiter, to) = (Arc::clone(&self.limiter), self.to.clone());
        // What came before the delegate is handed over on this thread, which is the one that makes room: it must not wait.
        self.limiter.shut(false);
        consumer.set_delegate(move |delivery: lapin::Result<Option<Delivery>>| {
            limiter.acquire(size(&delivery));
            // Nobody listens any more: it goes back with the channel.
            let _ = to.send(delivery);
            std::future::ready(())
        });
        self.limiter.shut(true);
        self.consumers.push(consumer);
    }

    pub(super) fn limiter(&self) -> Arc<ByteLimiter> {
        Arc::clone(&self.limiter)
    }

    /// The next delivery; `None` when the consumer was cancelled.
    ///
    /// Cancel safety: nothing is lost.
    pub(super) async fn next(&mut self) -> lapin::Result<Option<Delivery>> {
        // There is a sender: this struct's own.
        let delivery = self.from.recv().await.unwrap_or(Ok(None));
        self.limiter.release(size(&delivery));
        delivery
    }
}

impl Drop for Deliveries {
    /// What is still to come is let through, and dropped.
    fn drop(&mut self) {
        self.from.close();
        self.limiter.shut(false);
    }
}

fn size(delivery: &lapin::Result<Option<Delivery>>) -> usize {
    match delivery {
        Ok(Some(delivery)) => delivery.data.len() + OVERHEAD,
        _ => 0,
    }
}
