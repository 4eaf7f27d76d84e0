//! Measures how soon a worker that joins another one has its share of a backlog of large jobs.

use std::fmt;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use tokio::time::{sleep, timeout};
use vramq_schemas::topology::jobs_queue;

use crate::end_to_end::{Caller, job, publish};
use crate::process;
use crate::share::{self, Link, MODEL, Setup};

/// Texts of a job: more than a pass, and few enough that a worker could hold every job of the backlog in its slots.
const JOB_TEXTS: usize = 400;
const JOBS: usize = 100;

/// How long the first worker is alone.
const ALONE: Duration = Duration::from_secs(4);

/// Length of a window. The windows follow each other, and begin when the second worker consumes.
const WINDOW: Duration = Duration::from_secs(5);
const WINDOWS: usize = 4;

/// How long the second worker may load.
const CONSUMING_MAX: Duration = Duration::from_secs(60);

/// How often it is asked whether the second worker consumes.
const LOOK: Duration = Duration::from_millis(20);

/// The second worker's part of the items that both workers ran in a window. 0.5 is its share.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Row {
    pub from_s: u64,
    pub to_s: u64,
    pub of_joined: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from_s, to_s, of_joined } = self;
        write!(
            f,
            "  a worker that joins: {of_joined:.2} of the items from {from_s:>2} to {to_s:>2} s (its share is 0.5)"
        )
    }
}

/// The items of two workers of one thread, from the moment that the second one consumes.
pub async fn run(setup: &Setup<'_>) -> anyhow::Result<Vec<Row>> {
    let link = Link::open(setup.url).await?;
    let ports = [process::free_port()?, process::free_port()?];
    let spawn = |at: usize| share::spawn(setup, at, &format!("127.0.0.1:{}", ports[at]));
    let mut served = vec![spawn(0)?];
    process::wait_for_consumer(&link.connection, &jobs_queue(MODEL)).await?;
    let texts: Vec<_> = setup.texts.iter().cycle().take(JOB_TEXTS).cloned().collect();
    publish(&link.channel, &link.queue, &vec![job(MODEL, &texts); JOBS], None, Caller::Unknown).await?;
    sleep(ALONE).await;
    served.push(spawn(1)?);
    let consuming = async {
        while process::get(ports[1], "/readyz").await.is_err() {
            sleep(LOOK).await;
        }
    };
    timeout(CONSUMING_MAX, consuming).await.context("the second worker does not consume")?;
    let items = async || -> anyhow::Result<[f64; 2]> {
        let [of_first, of_joined] = ports.map(|port| process::metric(port, "vramq_items_total"));
        Ok([of_first.await?, of_joined.await?])
    };
    let (mut rows, mut before) = (Vec::new(), items().await?);
    for window in 0..WINDOWS as u64 {
        sleep(WINDOW).await;
        let after = items().await?;
        let [of_first, of_joined] = [after[0] - before[0], after[1] - before[1]];
        anyhow::ensure!(of_first + of_joined > 0.0, "the backlog ended: the figures mean nothing");
        let (from_s, to_s) = (window * WINDOW.as_secs(), (window + 1) * WINDOW.as_secs());
        let row = Row { from_s, to_s, of_joined: of_joined / (of_first + of_joined) };
        println!("{row}");
        rows.push(row);
        before = after;
    }
    // The rest of the backlog is not needed.
    for child in &mut served {
        child.kill().await?;
    }
    share::forget(&link.channel).await?;
    link.connection.close(200, "done".into()).await?;
    Ok(rows)
}
