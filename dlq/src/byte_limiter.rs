//! Bounds the bytes that consumers have received and that are not processed yet.
//!
//! lapin buffers deliveries without a bound, and passes each to a delegate on the thread that reads the socket. A delegate that blocks
//! therefore stops the reading, and so the broker's sending.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lapin::Consumer;
use lapin::message::Delivery;
use tokio::sync::mpsc;

/// Bytes that may wait to be processed.
const BYTES_MAX: usize = 16 * 1024 * 1024;

/// The longest time for which the thread that reads the socket is blocked. That thread also sends the heartbeats.
const BLOCK_MAX: Duration = Duration::from_secs(1);

/// An estimate for properties and headers of a message.
const OVERHEAD: usize = 1024;

type Received = lapin::Result<Option<Delivery>>;

/// The deliveries of several consumers, in their order.
#[derive(Debug)]
pub(crate) struct Deliveries {
    limiter: Arc<ByteLimiter>,
    receiver: mpsc::UnboundedReceiver<Received>,
    sender: mpsc::UnboundedSender<Received>,
    /// Kept: dropping a consumer cancels it.
    consumers: Vec<Consumer>,
}

#[derive(Debug, Default)]
pub(crate) struct ByteLimiter {
    state: Mutex<State>,
    released: Condvar,
}

#[derive(Debug, Default)]
struct State {
    bytes: usize,
    is_enabled: bool,
}

impl ByteLimiter {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn acquire(&self, bytes: usize) {
        let is_full = |state: &mut State| state.is_enabled && state.bytes > BYTES_MAX;
        let state = self.released.wait_timeout_while(self.state(), BLOCK_MAX, is_full);
        state.unwrap_or_else(PoisonError::into_inner).0.bytes += bytes;
    }

    fn release(&self, bytes: usize) {
        self.state().bytes -= bytes;
        self.released.notify_one();
    }

    /// Disables the limiter while `run` takes a lock of the channel. lapin holds that lock while it calls a delegate, so a blocked delegate
    /// and the caller would wait for each other.
    pub(crate) fn bypass<T>(&self, run: impl FnOnce() -> T) -> T {
        self.set_enabled(false);
        let result = run();
        self.set_enabled(true);
        result
    }

    fn set_enabled(&self, is_enabled: bool) {
        self.state().is_enabled = is_enabled;
        self.released.notify_all();
    }
}

impl Deliveries {
    pub(crate) fn new() -> Self {
        // Bounded by the limiter, in bytes. A bounded channel would count messages.
        let (sender, receiver) = mpsc::unbounded_channel();
        Self { limiter: Arc::default(), receiver, sender, consumers: Vec::new() }
    }

    pub(crate) fn add(&mut self, consumer: Consumer) {
        let (limiter, sender) = (Arc::clone(&self.limiter), self.sender.clone());
        // Setting the delegate passes it the deliveries that have already arrived, on this thread. It must not block this thread, which is
        // the one that releases bytes.
        self.limiter.bypass(|| {
            consumer.set_delegate(move |received: Received| {
                limiter.acquire(size(&received));
                // An `Err`: the receiver was dropped. Closing the channel requeues the message.
                let _ = sender.send(received);
                std::future::ready(())
            });
        });
        self.consumers.push(consumer);
    }

    pub(crate) fn limiter(&self) -> Arc<ByteLimiter> {
        Arc::clone(&self.limiter)
    }

    /// The next delivery; `None` when the broker cancelled the consumer.
    ///
    /// Cancel safety: nothing is lost.
    pub(crate) async fn next(&mut self) -> Received {
        // There is always a sender: this struct's own.
        let received = self.receiver.recv().await.unwrap_or(Ok(None));
        self.limiter.release(size(&received));
        received
    }
}

impl Drop for Deliveries {
    /// Stops limiting, so that deliveries which still arrive pass and are dropped.
    fn drop(&mut self) {
        self.receiver.close();
        self.limiter.set_enabled(false);
    }
}

fn size(received: &Received) -> usize {
    match received {
        Ok(Some(delivery)) => delivery.data.len() + OVERHEAD,
        _ => 0,
    }
}
