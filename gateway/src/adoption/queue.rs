//! The reply queue of a gateway that is gone, consumed by this one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::interval;
use vramq_amqp::Depth;
use vramq_producer::Client;

use crate::broker::link::Link;

/// How often an adopted queue is looked at for another consumer.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// An adopted queue. Its replies stay unacknowledged until the end of their job is stored. So the next consumer gets all of them.
#[derive(Debug)]
pub struct AdoptedQueue {
    pub client: Client,
    left: AtomicBool,
}

impl AdoptedQueue {
    /// Starts to look for another consumer: the gateway that has come back, or a third one that adopted the queue at the same moment.
    pub fn new(client: Client, link: Arc<Link>, name: String) -> Arc<Self> {
        let this = Arc::new(Self { client, left: AtomicBool::new(false) });
        tokio::spawn(leave_to_others(Arc::downgrade(&this), link, name));
        this
    }

    /// Whether another gateway consumes the queue now.
    pub fn is_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }
}

/// Stops consuming the queue as soon as another one does: of two consumers neither gets all parts of a job. Ends with the queue's last job.
async fn leave_to_others(queue: Weak<AdoptedQueue>, link: Arc<Link>, name: String) {
    let mut looks = interval(LOOK_EVERY);
    loop {
        looks.tick().await;
        if queue.strong_count() == 0 {
            return;
        }
        let depth = link.queue(&name).await;
        let Some(queue) = queue.upgrade() else { return };
        if let Ok(Depth::Messages { consumers: 2.., .. }) = depth {
            tracing::info!(
                queue = name,
                "another gateway consumes the adopted reply queue, too: this gateway stops consuming it"
            );
            queue.left.store(true, Ordering::Release);
            queue.client.close().await;
            return;
        }
    }
}
