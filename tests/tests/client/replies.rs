//! Replies: parts, duplicates, forgeries, failures, strays; against a real broker.

use std::sync::Mutex;
use std::time::Duration;

use crate::common::worker::{self, Answer, Received, embed};
use crate::common::{Broker, in_time, job, until};
use lapin::types::FieldTable;
use vramq_producer::{
    Client, Embedding, Encoding, ItemProgress, JobError, JobFailed, Options, Output, Progress, Reason,
    SubmitOptions, Values,
};
use vramq_schemas::headers::TOKENS;
use vramq_schemas::{ReplyHeaders, ReplyKind, codec, fields};

const TEXTS: [&str; 5] = ["a", "bb", "ccc", "dddd", "eeeee"];

/// Within this time a part comes to its client, also on a busy machine.
const PART_COMES: Duration = Duration::from_secs(15);

fn expected() -> Vec<Output> {
    TEXTS.map(embed).to_vec()
}

/// Submits the five texts to a worker that answers so, in every encoding.
async fn ask(
    answer: impl Fn(&Received) -> Vec<Answer> + Send + Sync + Copy + 'static,
) -> Vec<(Result<Vec<Output>, JobError>, vramq_producer::Stats)> {
    let broker = Broker::new();
    let worker = worker::work(&broker, "m", answer).await;
    let mut results = Vec::new();
    for encoding in [Encoding::Bincode, Encoding::MessagePack, Encoding::Json] {
        let mut options = Options::new(broker.url());
        options.encoding = encoding;
        let client = Client::connect(options).await.unwrap();
        let pending = in_time(client.submit(job("m", &TEXTS), SubmitOptions::default())).await.unwrap();
        let result = in_time(pending.outputs()).await;
        // The next job works whatever became of this one, and its answer comes after all of this one's.
        let next = in_time(client.submit(job("m", &["next"]), SubmitOptions::default())).await.unwrap();
        drop(next.progress());
        let next = in_time(next.outputs()).await;
        assert!(matches!(next, Ok(_) | Err(JobError::InvalidReply(_))), "{next:?}");
        results.push((result, client.stats()));
        client.close().await;
    }
    worker.abort();
    results
}

#[tokio::test]
async fn parts_in_any_order_with_duplicates_and_overlaps() {
    let answers = ask(|received| match received.job.inputs.len() {
        5 => vec![
            received.part(3..5),
            received.part(3..5),
            received.part(1..2),
            received.part(0..3),
            // After the end.
            received.part(0..1),
        ],
        _ => vec![received.done()],
    })
    .await;
    for (result, stats) in answers {
        assert_eq!(result.unwrap(), expected());
        assert_eq!((stats.duplicate_items, stats.stray_replies), (3, 1));
    }
}

/// The first worker was lost after its second part, and another one had gone on behind the first.
#[tokio::test]
async fn tokens_of_overlapping_parts_are_counted_once() {
    let broker = Broker::new();
    let worker = worker::work(&broker, "m", |received| {
        let part = |items: std::ops::Range<usize>| {
            let tokens = items.clone().map(|item| item as u64 + 1).sum();
            let mut answer = received.part(items);
            let mut headers = answer.properties.headers().clone().unwrap();
            headers.insert(TOKENS.into(), fields::long(tokens));
            answer.properties = answer.properties.with_headers(headers);
            answer
        };
        vec![part(0..2), part(2..4), part(2..3), part(3..5)]
    })
    .await;
    let client = Client::connect(broker.url()).await.unwrap();
    let pending = in_time(client.submit(job("m", &TEXTS), SubmitOptions::default())).await.unwrap();
    let answer = in_time(pending.answer()).await.unwrap();
    assert_eq!((answer.outputs, answer.tokens), (expected(), Some(15)));
    client.close().await;
    worker.abort();
}

#[tokio::test]
async fn a_failed_job_keeps_what_was_answered() {
    let answers = ask(|received| {
        if received.job.inputs.len() < 5 {
            return vec![received.done()];
        }
        vec![
            received.part(1..3),
            received.failed(Reason::OutOfMemory, "does not fit even alone: 9 GiB asked"),
        ]
    })
    .await;
    for (result, _) in answers {
        let Err(JobError::Failed(JobFailed { reason, error, outputs })) = result else {
            panic!("{result:?}")
        };
        assert_eq!(reason, Reason::OutOfMemory);
        assert_eq!(error, "does not fit even alone: 9 GiB asked");
        assert_eq!(outputs, [None, Some(embed("bb")), Some(embed("ccc")), None, None]);
    }
}

/// As from a worker of a later version.
#[tokio::test]
async fn a_failure_of_an_unknown_reason_keeps_its_text() {
    let answers = ask(|received| {
        if received.job.inputs.len() < 5 {
            return vec![received.done()];
        }
        let mut failed = received.failed(Reason::StoreUnavailable, "it is too warm");
        // A letter of its name, or in bincode the number of the variant.
        let at = failed.body.windows(5).position(|word| word == b"store").unwrap_or(1);
        failed.body[at] = b'x';
        vec![received.part(1..3), failed]
    })
    .await;
    for (result, _) in answers {
        let Err(JobError::Failed(JobFailed { reason, error, outputs })) = result else {
            panic!("{result:?}")
        };
        assert_eq!((reason, error.as_str()), (Reason::Other, "it is too warm"));
        assert_eq!(outputs, [None, Some(embed("bb")), Some(embed("ccc")), None, None]);
    }
}

/// Replies that no worker sends: each makes another false claim.
#[tokio::test]
async fn forged_replies_fail_their_job_and_no_other() {
    fn claim(received: &Received, offset: u32, items: u32, items_total: u32, outputs: usize) -> Vec<Answer> {
        let headers = ReplyHeaders { offset, items, items_total, ..ReplyHeaders::default() };
        if received.job.inputs.len() < 5 {
            return vec![received.done()];
        }
        vec![received.outputs(ReplyKind::Part, &headers, vec![embed("x"); outputs])]
    }
    /// A vector that ends with an element that is no number.
    fn vector(received: &Received, last: f32) -> Vec<Answer> {
        let items = u32::try_from(received.job.inputs.len()).unwrap();
        let headers = ReplyHeaders { items, items_total: items, ..ReplyHeaders::default() };
        // As bytes: JSON has no such number.
        let wrong = Output::Embedding(Embedding { values: Values::F32(vec![0.5, last]), base64: true });
        vec![received.outputs(ReplyKind::Done, &headers, vec![wrong; received.job.inputs.len()])]
    }
    type Forger = fn(&Received) -> Vec<Answer>;
    let forgeries: [Forger; 10] = [
        |r| claim(r, 5, 1, 5, 1),
        |r| claim(r, u32::MAX, 1, 5, 1),
        |r| claim(r, 0, 1, u32::MAX, 1),
        |r| claim(r, 0, 2, 5, 1),
        |r| claim(r, 0, 6, 5, 6),
        |r| vec![r.answer("part", FieldTable::default(), Vec::new())],
        |r| vec![r.answer("result", ReplyHeaders::default().to_table(), Vec::new())],
        |r| vec![r.answer("failed", FieldTable::default(), b"\xff\xff".to_vec())],
        |r| vector(r, f32::NAN),
        |r| vector(r, f32::INFINITY),
    ];
    for forgery in forgeries {
        for (result, stats) in ask(forgery).await {
            assert!(matches!(result, Err(JobError::InvalidReply(_))), "{result:?}");
            assert_eq!(stats.reconnects, 0);
        }
    }
}

#[tokio::test]
async fn progress_follows_the_parts() {
    let broker = Broker::new();
    let (proceed, gate) = std::sync::mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let worker = worker::work(&broker, "m", move |received| {
        if received.job.inputs.len() < 5 {
            gate.lock().unwrap().recv().unwrap();
            return Vec::new();
        }
        vec![received.part(0..2), received.part(2..4)]
    })
    .await;
    let client = Client::connect(broker.url()).await.unwrap();
    let pending = in_time(client.submit(job("m", &TEXTS), SubmitOptions::default())).await.unwrap();
    let mut progress = pending.progress();
    let seen = in_time(progress.wait_for(|progress| progress.items_done == 4)).await.unwrap();
    assert_eq!(*seen, Progress { items_done: 4, items: 5, current: None });
    drop(seen);
    proceed.send(()).unwrap();
    drop(pending);
    client.close().await;
    worker.abort();
}

#[tokio::test]
async fn a_timeout_reports_progress_and_late_replies_are_dropped() {
    let broker = Broker::new();
    let late = Mutex::new(None);
    let worker = worker::work(&broker, "m", move |received| {
        let mut late = late.lock().unwrap();
        if received.text(0) == "a" {
            *late = Some(received.part(2..5));
            return vec![received.part(0..2)];
        }
        // The reply that the first job awaited in vain, then the answer, and the same answer again.
        late.take().into_iter().chain([received.done(), received.done()]).collect()
    })
    .await;
    let client = Client::connect(broker.url()).await.unwrap();
    let options = SubmitOptions { timeout: Some(PART_COMES), ..SubmitOptions::default() };
    let pending = in_time(client.submit(job("m", &TEXTS), options)).await.unwrap();
    let late = in_time(pending.outputs()).await.unwrap_err();
    assert!(matches!(late, JobError::Timeout { items_done: 2, items: 5, .. }), "{late:?}");
    let next = in_time(client.submit(job("m", &["x"]), SubmitOptions::default())).await.unwrap();
    assert_eq!(in_time(next.outputs()).await.unwrap(), [embed("x")]);
    until("late and repeated replies are strays", || (client.stats().stray_replies == 2).then_some(())).await;
    client.close().await;
    worker.abort();
}

#[tokio::test]
async fn closing_ends_what_is_awaited() {
    let broker = Broker::new();
    let worker = worker::work(&broker, "m", |_| Vec::new()).await;
    let client = Client::connect(broker.url()).await.unwrap();
    let pending = in_time(client.submit(job("m", &TEXTS), SubmitOptions::default())).await.unwrap();
    client.close().await;
    let closed = in_time(pending.outputs()).await;
    assert!(matches!(closed, Err(JobError::Closed)), "{closed:?}");
    client.close().await;
    assert_eq!(broker.queues("vramq.replies.client."), Vec::<String>::new());
    worker.abort();
}

/// The client's task ends with its runtime, and nobody has closed the client.
#[test]
fn a_runtime_that_ends_ends_what_is_awaited() {
    let runtime = || tokio::runtime::Runtime::new().unwrap();
    let (of_client, other) = (runtime(), runtime());
    let broker = Broker::new();
    let worker = other.block_on(worker::work(&broker, "m", |_| Vec::new()));
    let pending = of_client.block_on(async {
        let client = Client::connect(broker.url()).await.unwrap();
        in_time(client.submit(job("m", &TEXTS), SubmitOptions::default())).await.unwrap()
    });
    of_client.shutdown_background();
    let ended = other.block_on(in_time(pending.outputs()));
    assert!(matches!(ended, Err(JobError::Closed)), "{ended:?}");
    worker.abort();
}

/// The client ignores progress of items that have their output or that the job does not have, and progress that cannot be.
#[tokio::test]
async fn progress_is_asked_for_followed_and_never_the_end_of_a_job() {
    let broker = Broker::new();
    let worker = worker::work(&broker, "m", |received| {
        let mut params = received.job.params.clone();
        assert_eq!(params.take_progress(), Ok(true), "the job asks");
        let report = |item, fraction| {
            let report = ItemProgress { item, fraction, note: "half".to_owned() };
            let body = codec::encode(&report, received.encoding).unwrap();
            received.answer("progress", FieldTable::default(), body)
        };
        let broken = received.answer("progress", FieldTable::default(), b"nonsense".to_vec());
        vec![received.part(0..1), report(1, 0.5), report(0, 0.9), report(7, 0.5), report(1, 2.0), broken]
    })
    .await;
    let client = Client::connect(broker.url()).await.unwrap();
    let options = SubmitOptions { progress: true, ..SubmitOptions::default() };
    let pending = in_time(client.submit(job("m", &["a", "b"]), options)).await.unwrap();
    let progress = pending.progress();
    until("the four others are strays", || (client.stats().stray_replies == 4).then_some(())).await;
    let current = Some(ItemProgress { item: 1, fraction: 0.5, note: "half".to_owned() });
    assert_eq!(*progress.borrow(), Progress { items_done: 1, items: 2, current });
    drop(pending);
    client.close().await;
    worker.abort();
}
