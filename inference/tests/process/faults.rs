//! Programs that die, send false frames, hang or print too much: each fails only its own pass, and is replaced.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vramq_inference::process::keeper::Death;
use vramq_inference::process::protocol::FailureKind;
use vramq_inference::process::{PassEnd, Pool};

use crate::env::{Env, done, ended, is_alive, parent, pid, state, until};

async fn raw(env: &Env) -> Pool {
    env.start(env.config("raw.py", "")).await.unwrap()
}

/// Runs three items of which the first is a wish; the outputs before the end, and the end.
async fn wish(pool: &Pool, wish: Value) -> (usize, PassEnd) {
    let (outputs, end) = ended(pool, &[&wish.to_string(), "1", "2"]).await;
    (outputs.len(), end)
}

#[tokio::test]
async fn killed_at_every_frame_it_keeps_what_was_finished() {
    let env = Env::new();
    let pool = raw(&env).await;
    // The frames are progress, three outputs, done. Cut after: nothing, part of the length, part of the header, part of the blob.
    for frame in 0..5 {
        for cut in [0, 2, 20, 200] {
            let (outputs, end) = wish(&pool, json!({"die": frame, "cut": cut})).await;
            let PassEnd::Crashed { death, .. } = &end else {
                // 200 bytes are all of a small frame, and of the last one.
                assert!(
                    matches!(end, PassEnd::Done { .. }) && frame == 4 && cut == 200,
                    "{frame} {cut}: {end:?}"
                );
                continue;
            };
            assert_eq!(*death, Death::Killed(libc::SIGKILL), "{frame} {cut}");
            let whole = usize::from(cut == 200 && (1..4).contains(&frame));
            assert_eq!(outputs, usize::try_from(frame - 1).unwrap_or(0) + whole, "{frame} {cut}");
            assert_eq!(done(&pool, &["{}", "7"]).await, [json!({}), json!(7)]);
        }
    }
    env.close(pool).await;
}

#[tokio::test]
async fn frames_that_the_protocol_does_not_allow_end_the_process() {
    let env = Env::new();
    let pool = raw(&env).await;
    let output = |more: Value| {
        let mut header = json!({"type": "output", "pass": 1, "item": 0, "kind": "json"});
        header.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        header
    };
    for (instead, what) in [
        (json!({"bytes": "54726163656261636b"}), "header of"),
        (json!({"bytes": "ffffffff"}), "header of 4294967295 bytes"),
        (json!({"bytes": "020000007b5d"}), "not a known message"),
        (json!({"bytes": "00000000"}), "not a known message"),
        (json!({"header": {"type": "song"}}), "unknown variant `song`"),
        (
            json!({"header": {"type": "done", "pass": "PASS"}}),
            "done after 0 outputs for 3 items; item 0 has none",
        ),
        (json!({"header": {"type": "done", "pass": 999}}), "a frame of pass 999"),
        (json!({"header": {"type": "pong", "number": 1}}), "`ready` or `pong` while a pass runs"),
        (
            json!({"header": {"type": "done", "pass": "PASS"}, "blob": "x"}),
            "blobs in a frame that is not an output",
        ),
        (
            json!({"header": output(json!({"item": 1})), "blob": "1"}),
            "an output for item 1; item 0 of 3 is next",
        ),
        (json!({"header": output(json!({"item": 99})), "blob": "1"}), "an output for item 99"),
        (json!({"header": output(json!({"kind": "painting"})), "blob": "1"}), "unknown variant `painting`"),
        // After three outputs: the extra one may have been an earlier one.
        (
            json!({"instead": 4, "header": output(json!({"item": 3})), "blob": "1"}),
            "an output for item 3; item 3 of 3 is next",
        ),
    ] {
        let before = pool.status();
        let next_pass = before.slots[0].starts;
        let mut wished = instead.clone();
        wished.as_object_mut().unwrap().entry("instead").or_insert(json!(0));
        // The number of the pass is known to the test: passes count upwards from 1.
        let number = PASS.with(|pass| pass.replace(pass.get() + 2));
        if let Some(header) = wished.get_mut("header")
            && (header["pass"] == json!("PASS") || header["pass"] == json!(1))
        {
            header["pass"] = json!(number);
        }
        let (outputs, end) = wish(&pool, wished).await;
        let PassEnd::Protocol { fault, .. } = end else { panic!("{instead}: {end:?}") };
        assert!(fault.contains(what), "{instead}: {fault}");
        assert_eq!(outputs, 0);
        assert_eq!(done(&pool, &["{}"]).await, [json!({})]);
        assert_eq!(pool.status().slots[0].starts, next_pass + 1, "{instead}");
    }
    env.close(pool).await;
}

#[tokio::test]
async fn frames_whose_output_is_none_end_the_pass_alone() {
    let env = Env::new();
    let pool = raw(&env).await;
    let starts = pool.status().slots[0].starts;
    for (number, (more, blob, what)) in (1..).zip([
        (json!({}), Some("{"), "an output that is not JSON"),
        (json!({}), None, "an output with 0 blobs"),
        (json!({"kind": "embedding"}), Some("abc"), "an embedding of 3 bytes"),
        (json!({"file": "../../etc/passwd"}), None, "not the name of a file in the scratch folder"),
    ]) {
        let mut header = json!({"type": "output", "pass": number, "item": 1, "kind": "json"});
        header.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        // Frames of a pass: progress, three outputs, `done`.
        let mut instead = json!({"instead": 2, "header": header});
        if let Some(blob) = blob {
            instead["blob"] = json!(blob);
        }
        let (outputs, end) = wish(&pool, instead).await;
        let PassEnd::Failed { kind: FailureKind::Output, item: Some(1), detail, .. } = end else {
            panic!("{more}: {end:?}")
        };
        assert!(detail.contains(what), "{detail}");
        assert_eq!(outputs, 1);
    }
    assert_eq!(pool.status().slots[0].starts, starts);
    env.close(pool).await;
}

thread_local! {
    static PASS: std::cell::Cell<u64> = const { std::cell::Cell::new(1) };
}

#[tokio::test]
async fn a_process_that_speaks_unasked_is_replaced() {
    let env = Env::new();
    let pool = raw(&env).await;
    let (_, end) = wish(&pool, json!({"chatter": true})).await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    until("the process is ended", || pool.status().slots[0].pid.is_none()).await;
    assert_eq!(done(&pool, &["{}"]).await, [json!({})]);
    assert_eq!(pool.status().slots[0].starts, 2);
    env.close(pool).await;
}

/// As a thread reports it that a program did not wait for.
#[tokio::test]
async fn progress_of_a_pass_that_has_ended_is_ignored_within_reason() {
    let env = Env::new();
    let pool = raw(&env).await;
    let (outputs, end) = wish(&pool, json!({"late": 10})).await;
    assert!(matches!(end, PassEnd::Done { .. }) && outputs == 3, "{outputs}: {end:?}");
    let late = json!({"instead": 0, "header": {"type": "progress", "pass": 1, "item": 0, "fraction": 1}});
    let (outputs, end) = wish(&pool, late).await;
    assert!(matches!(end, PassEnd::Done { .. }) && outputs == 3, "{outputs}: {end:?}");
    assert_eq!(pool.status().slots[0].starts, 1);
    let (_, end) = wish(&pool, json!({"late": 2000})).await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    until("the process is ended", || pool.status().slots[0].pid.is_none()).await;
    env.close(pool).await;
}

/// Takes half a minute: the ping comes after ten seconds, and the process has twenty to answer, because a busy machine may have
/// swapped it out.
#[tokio::test]
async fn an_idle_process_that_does_not_answer_is_replaced() {
    let env = Env::new();
    let pool = env.probe("").await;
    let before = pid(&pool).await;
    // The process exists, but does not run.
    kill_process(Pid::from_raw(before).unwrap(), Signal::STOP).unwrap();
    until("the process is ended", || pool.status().slots[0].pid.is_none()).await;
    assert!(!is_alive(before));
    assert_ne!(pid(&pool).await, before);
    env.close(pool).await;
}

#[tokio::test]
async fn a_pass_that_takes_too_long_is_cancelled_and_then_killed() {
    let env = Env::new();
    // A long `kill_s`, so that even on a slow machine the process reads the cancel before it would be killed. `item_s` is long
    // enough that the first item is answered in time although the process stands still for some seconds.
    let pool = env.probe("item_s = 15\nkill_s = 600").await;
    let before = pid(&pool).await;
    let (outputs, end) = ended(&pool, &["echo a", "sleep 100"]).await;
    assert!(matches!(end, PassEnd::TimedOut { killed: false, .. }), "{end:?}");
    assert_eq!(outputs.len(), 1);
    assert_eq!(pid(&pool).await, before);
    env.close(pool).await;

    let pool = env.probe("item_s = 15\nkill_s = 0.5").await;
    let before = pid(&pool).await;
    let (outputs, end) = ended(&pool, &["echo a", "deaf"]).await;
    assert!(matches!(end, PassEnd::TimedOut { killed: true, .. }), "{end:?}");
    assert_eq!(outputs.len(), 1);
    assert!(!is_alive(before));
    assert_ne!(pid(&pool).await, before);
    env.close(pool).await;
}

#[tokio::test]
async fn each_output_has_its_own_time() {
    let env = Env::new();
    let pool = env.probe("item_s = 15").await;
    // Together the items take longer than one may, but each takes far less.
    let (outputs, end) = ended(&pool, &["sleep 3"; 6]).await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    assert_eq!(outputs.len(), 6);
    let (outputs, end) = ended(&pool, &["echo a", "sleep 100", "echo b"]).await;
    let PassEnd::TimedOut { limit, .. } = end else { panic!("{end:?}") };
    assert_eq!((outputs.len(), limit.as_secs()), (1, 15));
    env.close(pool).await;
}

#[tokio::test]
async fn a_pass_does_not_wait_for_a_process_that_does_not_end() {
    let env = Env::new();
    let pool = env.probe("item_s = 15\nkill_s = 0.5\nwithheld_s = 1").await;
    let keeper = Pid::from_raw(parent(pid(&pool).await)).unwrap();
    // The keeper kills nothing now, as if a driver hung.
    kill_process(keeper, Signal::STOP).unwrap();
    let (_, end) = ended(&pool, &["deaf"]).await;
    assert!(matches!(end, PassEnd::TimedOut { killed: true, .. }), "{end:?}");
    until("the slot is overdue", || pool.overdue().is_some()).await;
    assert_eq!(state(&pool, 0), "ending");
    kill_process(keeper, Signal::CONT).unwrap();
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    env.close(pool).await;
}

#[tokio::test]
async fn an_invalid_output_fails_the_pass_and_not_the_process() {
    let env = Env::new();
    let pool = env.probe("").await;
    let before = pid(&pool).await;
    for (value, what) in [
        ("'\\ud800'", "surrogates not allowed"),
        ("__import__('functools').reduce(lambda value, _: [value], range(200))", "nested deeper"),
        ("10 ** 30", "beyond 64 bits"),
        ("{1: 2, '1': 3}", "keys are texts"),
    ] {
        let (outputs, end) = ended(&pool, &["echo a", &format!("value {value}")]).await;
        let PassEnd::Failed { kind: FailureKind::Output, item: Some(1), detail, .. } = end else {
            panic!("{end:?}")
        };
        assert!(detail.contains(what), "{detail}");
        assert_eq!(outputs.len(), 1);
    }
    for (bytes, asked) in [("1.5e6", Some(1_500_000)), ("nan", None), ("-1", Some(0))] {
        let (_, end) = ended(&pool, &[&format!("oom_of {bytes}")]).await;
        let PassEnd::OutOfMemory { report, .. } = end else { panic!("{end:?}") };
        assert_eq!(report.asked, asked);
    }
    assert_eq!(pid(&pool).await, before);
    env.close(pool).await;
}

#[tokio::test]
async fn megabytes_on_standard_output_do_no_harm() {
    let env = Env::new();
    let pool = env.probe("").await;
    assert_eq!(done(&pool, &["print 20000000", "echo a"]).await, [json!(true), json!("a")]);
    let (_, end) = ended(&pool, &["exit 3"]).await;
    let PassEnd::Crashed { death: Death::Exited(3), stderr } = end else { panic!("{end:?}") };
    assert_eq!(stderr, "last words\n");
    let (_, end) = ended(&pool, &["print 20000000", "exit 3"]).await;
    let PassEnd::Crashed { death: Death::Exited(3), stderr } = end else { panic!("{end:?}") };
    assert!(stderr.len() <= 8 * 1024 && stderr.ends_with("printed\nlast words\n"), "{stderr}");
    env.close(pool).await;
}

#[tokio::test]
async fn a_device_that_is_lost_to_a_process_costs_a_restart() {
    let env = Env::new();
    let pool = env.probe("").await;
    let before = pid(&pool).await;
    let (_, end) = ended(&pool, &["lost"]).await;
    assert!(
        matches!(&end, PassEnd::Failed { kind: FailureKind::Device, detail, .. } if detail.contains("illegal memory access")),
        "{end:?}"
    );
    assert_ne!(pid(&pool).await, before);
    env.close(pool).await;
}
