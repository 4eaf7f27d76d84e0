//! Many passes while processes are killed at any moment: every job is answered once, item by item, and nothing is lost.

use std::collections::VecDeque;

use serde_json::json;
use vramq_inference::process::PassEnd;
use vramq_schemas::Output;

use crate::env::{Env, run};

const JOBS: usize = 300;
const ITEMS: usize = 4;
const KILLS: usize = 30;

#[tokio::test]
async fn every_item_is_answered_once_over_many_kills() {
    let env = Env::new();
    let pool = env.probe("instances = 3\nkill_s = 5").await;
    // Jobs, and how many items of each are answered: what a worker keeps.
    let mut waiting: VecDeque<(usize, usize)> = (0..JOBS).map(|job| (job, 0)).collect();
    let mut answers = vec![Vec::new(); JOBS];
    let (mut running, mut kills, mut crashes, mut ends) = (VecDeque::new(), 0, 0, 0usize);
    while !waiting.is_empty() || !running.is_empty() {
        while let Some((job, from)) = waiting.pop_front_if(|_| running.len() < 6) {
            let items: Vec<String> = (from..ITEMS).map(|item| format!("echo {job}/{item}")).collect();
            let items: Vec<&str> = items.iter().map(String::as_str).collect();
            running.push_back((job, from, run(&pool, &items)));
        }
        // Kills from outside hit the process at any moment, and many hit a pass.
        if kills < KILLS && ends % (JOBS / KILLS) == 0 {
            let pids: Vec<i32> = pool.status().slots.iter().filter_map(|slot| slot.pid).collect();
            if let Some(pid) = pids.get(kills % pids.len().max(1)) {
                // SAFETY: a number of a process of this test's own, which its keeper has not reaped unseen.
                unsafe { libc::kill(*pid, libc::SIGKILL) };
                kills += 1;
            }
        }
        let Some((job, from, pass)) = running.pop_front() else { break };
        let (outputs, end) = pass.finish().await;
        ends += 1;
        for (at, output) in outputs.iter().enumerate() {
            assert_eq!(*output, Output::Json(json!(format!("{job}/{}", from + at))));
            answers[job].push(from + at);
        }
        match end {
            PassEnd::Done { .. } => assert_eq!(from + outputs.len(), ITEMS),
            PassEnd::Crashed { .. } => {
                crashes += 1;
                // A kill between the last output and the end of the pass leaves nothing to do.
                if from + outputs.len() < ITEMS {
                    waiting.push_back((job, from + outputs.len()));
                }
            }
            // A kill before it began.
            PassEnd::NotRun { .. } => waiting.push_back((job, from)),
            other => panic!("{other:?}"),
        }
    }
    let all: Vec<usize> = (0..ITEMS).collect();
    // Outputs before a kill were kept, so no item was answered twice.
    assert!(answers.iter().all(|answer| *answer == all));
    assert_eq!(kills, KILLS);
    // A kill between passes costs none.
    assert!(crashes > 0 && crashes <= KILLS, "{crashes} passes crashed by {KILLS} kills");
    env.close(pool).await;
}
