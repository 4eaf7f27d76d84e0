//! Replies that a client holds until its caller lets them go, and a client that adopts the reply queue of another one.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lapin::Connection;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use tokio::task::JoinHandle;
use vramq_producer::{Client, JobError, Options, Pending, SubmitOptions};

use crate::common::worker::{self, Answer, embed};
use crate::common::{Broker, in_time, job, until};

const TEXTS: [&str; 3] = ["a", "bb", "ccc"];

/// A worker that answers all items of a job except the third, whose part the test publishes.
struct Hesitant {
    last_part: Arc<Mutex<Option<Answer>>>,
    worker: JoinHandle<()>,
    connection: Connection,
}

impl Hesitant {
    async fn new(broker: &Broker) -> Self {
        let last_part = Arc::<Mutex<Option<Answer>>>::default();
        let kept = Arc::clone(&last_part);
        let worker = worker::work(broker, "m", move |received| match received.job.inputs.len() {
            3 => {
                *kept.lock().unwrap() = Some(received.part(2..3));
                vec![received.part(0..1), received.part(1..2)]
            }
            _ => vec![received.done()],
        });
        Self { last_part, worker: worker.await, connection: broker.connect().await }
    }

    /// Publishes the last part.
    async fn finish(&self, reply_queue: &str) {
        let Answer { properties, body } = self.last_part.lock().unwrap().take().unwrap();
        let channel = self.connection.create_channel().await.unwrap();
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let published = channel.basic_publish("".into(), reply_queue.into(), options, &body, properties);
        let confirm = published.await.unwrap().await.unwrap();
        assert!(confirm.is_ack(), "{confirm:?}");
    }
}

async fn holding(broker: &Broker) -> (Client, String) {
    let mut options = Options::new(broker.url());
    options.connection_name = "holds".to_owned();
    options.hold_replies = true;
    let client = Client::connect(options).await.unwrap();
    let queue = client.reply_queue().unwrap().to_owned();
    (client, queue)
}

async fn submit(client: &Client, id: &str, texts: &[&str]) -> Pending {
    let options = SubmitOptions { id: Some(id.to_owned()), ..SubmitOptions::default() };
    in_time(client.submit(job("m", texts), options)).await.unwrap()
}

async fn until_done(pending: &Pending, items: usize) {
    let mut progress = pending.progress();
    in_time(progress.wait_for(|progress| progress.items_done == items)).await.unwrap();
}

#[tokio::test]
async fn the_adopter_of_a_reply_queue_gets_all_replies_of_unfinished_jobs() {
    let broker = Broker::new();
    let worker = Hesitant::new(&broker).await;
    let (client, queue) = holding(&broker).await;
    let unfinished = submit(&client, "unfinished", &TEXTS).await;
    until_done(&unfinished, 2).await;
    // The job is answered, but its caller still holds the receipt.
    let answered = submit(&client, "answered", &["answered"]).await;
    let (answer, receipt) = in_time(answered.answer_with_receipt()).await;
    assert_eq!(answer.unwrap().outputs, [embed("answered")]);
    let let_go = submit(&client, "let-go", &["let go"]).await;
    assert_eq!(in_time(let_go.outputs()).await.unwrap(), [embed("let go")]);
    in_time(client.close()).await;
    drop(receipt);
    assert!(matches!(in_time(unfinished.outputs()).await, Err(JobError::Closed)));
    assert_eq!(broker.queues("vramq.replies.client."), std::slice::from_ref(&queue));

    let mut options = Options::new(broker.url());
    options.adopt = Some(queue.clone());
    let heir = Client::connect(options).await.unwrap();
    let within = Duration::from_secs(60);
    let answered = in_time(heir.await_published("answered", 1, within)).await.unwrap();
    assert_eq!(in_time(answered.outputs()).await.unwrap(), [embed("answered")]);
    // Its replies came before anybody asked for it.
    let unfinished = in_time(heir.await_published("unfinished", 3, within)).await.unwrap();
    until_done(&unfinished, 2).await;
    worker.finish(&queue).await;
    assert_eq!(in_time(unfinished.outputs()).await.unwrap(), TEXTS.map(embed));
    // Released replies do not come again.
    let let_go = in_time(heir.await_published("let-go", 1, Duration::from_millis(500))).await.unwrap();
    assert!(matches!(in_time(let_go.outputs()).await, Err(JobError::Timeout { items_done: 0, .. })));
    in_time(heir.close()).await;
    // The queue is another client's, which may come back.
    assert_eq!(broker.queues("vramq.replies.client."), [queue]);
    worker.worker.abort();
}

#[tokio::test]
async fn held_replies_come_again_after_a_lost_connection() {
    let broker = Broker::new();
    let worker = Hesitant::new(&broker).await;
    let (client, queue) = holding(&broker).await;
    let pending = submit(&client, "job", &TEXTS).await;
    until_done(&pending, 2).await;
    broker.cut("holds").await;
    until("both parts came again", || (client.stats().duplicate_items >= 2).then_some(())).await;
    worker.finish(&queue).await;
    assert_eq!(in_time(pending.outputs()).await.unwrap(), TEXTS.map(embed));
    in_time(client.close()).await;
    // Nobody needs it any more.
    assert_eq!(broker.queues("vramq.replies.client."), Vec::<String>::new());
    worker.worker.abort();
}

/// Its caller has the answer, and has not stored it yet.
#[tokio::test]
async fn replies_of_an_answered_job_stay_held_after_a_lost_connection() {
    let broker = Broker::new();
    let worker = Hesitant::new(&broker).await;
    let (client, queue) = holding(&broker).await;
    let (answer, receipt) =
        in_time(submit(&client, "answered", &["answered"]).await.answer_with_receipt()).await;
    assert_eq!(answer.unwrap().outputs, [embed("answered")]);
    broker.cut("holds").await;
    until("its reply came again", || (client.stats().stray_replies >= 1).then_some(())).await;
    // Behind the reply: it is settled by now.
    let next = submit(&client, "next", &["next"]).await;
    assert_eq!(in_time(next.outputs()).await.unwrap(), [embed("next")]);
    in_time(client.close()).await;
    drop(receipt);

    let mut options = Options::new(broker.url());
    options.adopt = Some(queue);
    let heir = Client::connect(options).await.unwrap();
    let answered = in_time(heir.await_published("answered", 1, Duration::from_secs(30))).await.unwrap();
    assert_eq!(in_time(answered.outputs()).await.unwrap(), [embed("answered")]);
    in_time(heir.close()).await;
    worker.worker.abort();
}

#[tokio::test]
async fn a_reply_queue_that_does_not_exist_is_not_adopted() {
    let broker = Broker::new();
    let mut options = Options::new(broker.url());
    options.adopt = Some("vramq.replies.client.none".to_owned());
    assert!(Client::connect(options).await.is_err());
    assert_eq!(broker.queues("vramq.replies.client."), Vec::<String>::new());
}
