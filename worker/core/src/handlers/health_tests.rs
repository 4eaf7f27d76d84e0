//! Tests of health probes: a job that fails on a sick device is blamed only if the device was well before.

use std::time::Duration;

use vramq_schemas::JobHeaders;

use super::test_worker::{Worker, replied, requeued};
use crate::action::{PassOrder, Route};
use crate::device::{OutOfMemory, PassError};
use crate::event::{PassResult, Source};
use crate::ids::{ItemIndex, JobKey};

/// A job that was lost with four workers. One more crash while it runs alone dead-letters it.
fn nearly_condemned() -> JobHeaders {
    JobHeaders { crashes: 4, ..JobHeaders::default() }
}

fn failed() -> PassResult {
    PassResult::Failed(PassError::Failed("the engine cannot run this".to_owned()))
}

impl Worker {
    fn probe(&mut self) -> PassOrder {
        let probe = self.pass();
        assert!(probe.items.is_empty(), "a probe has no items of jobs: {probe:?}");
        probe
    }

    /// The next pass: of jobs, or of a probe that is due within a minute.
    fn next_within_a_minute(&mut self) -> PassOrder {
        for _ in 0..60 {
            if let Some(pass) = self.passes().into_iter().next() {
                return pass;
            }
            self.now += Duration::from_secs(1);
            self.quiet_tick();
        }
        panic!("no pass in a minute")
    }

    /// The pass of the job alone.
    fn pass_of(&mut self, job: u64) -> PassOrder {
        let pass = self.pass();
        assert_eq!(pass.items, [(JobKey(job), ItemIndex(0))]);
        pass
    }

    /// The device is found sick: the worker stops its consumers, and requeues the job when they have ended.
    fn requeued_from_sick_device(&mut self, probe: &PassOrder) -> (JobHeaders, Route) {
        let actions = self.ends(probe, failed(), Vec::new());
        let actions = self.consumers_end(&actions);
        let [(_, headers, route)] = &requeued(&actions)[..] else { panic!("{actions:?}") };
        (headers.clone(), route.clone())
    }
}

#[test]
fn a_sick_device_is_found_before_a_quarantined_job_runs_on_it() {
    let mut worker = Worker::on_device();
    worker.job(1, 1, Source::Quarantine, nearly_condemned());
    let probe = worker.probe();
    let (headers, route) = worker.requeued_from_sick_device(&probe);
    assert_eq!((headers.crashes, headers.attempt, route), (4, 0, Route::Quarantine));
    assert!(headers.history.is_empty(), "{headers:?}");
}

#[test]
fn a_quarantined_job_that_makes_a_device_sick_that_was_well_is_charged() {
    let mut worker = Worker::on_device();
    worker.job(1, 1, Source::Quarantine, JobHeaders { crashes: 3, ..JobHeaders::default() });
    let probe = worker.probe();
    assert!(requeued(&worker.ends(&probe, PassResult::Done, Vec::new())).is_empty());
    let pass = worker.pass_of(1);
    worker.ends(&pass, failed(), vec![None]);
    let probe = worker.probe();
    let (headers, route) = worker.requeued_from_sick_device(&probe);
    assert_eq!((headers.crashes, route), (4, Route::Quarantine));
    assert_eq!(headers.history.last().map(|last| last.outcome.as_str()), Some("device-lost"));
}

/// Without a probe the job is at worst quarantined by mistake, so new jobs run without one.
#[test]
fn a_job_outside_the_quarantine_runs_without_a_probe_and_is_charged() {
    let mut worker = Worker::on_device();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let pass = worker.pass_of(1);
    worker.ends(&pass, failed(), vec![None]);
    let probe = worker.probe();
    let (headers, route) = worker.requeued_from_sick_device(&probe);
    assert_eq!((headers.crashes, route), (1, Route::Now));
}

#[test]
fn a_quarantined_job_whose_device_could_not_be_probed_runs_and_is_not_charged() {
    let mut worker = Worker::on_device();
    worker.job(1, 1, Source::Quarantine, nearly_condemned());
    let oom = OutOfMemory { asked: 2, free: 1, total: 2, foreign: 0 };
    let mut pass = worker.probe();
    while pass.items.is_empty() {
        let actions = worker.ends(&pass, PassResult::Failed(PassError::from(oom)), Vec::new());
        assert!(requeued(&actions).is_empty(), "{actions:?}");
        pass = worker.next_within_a_minute();
    }
    assert_eq!(pass.items, [(JobKey(1), ItemIndex(0))]);
    worker.ends(&pass, failed(), vec![None]);
    let probe = worker.probe();
    let (headers, _) = worker.requeued_from_sick_device(&probe);
    assert_eq!(headers.crashes, 4);
}

#[test]
fn a_probe_that_was_skipped_is_ordered_again() {
    let mut worker = Worker::on_device();
    worker.job(1, 1, Source::Quarantine, nearly_condemned());
    let probe = worker.probe();
    worker.ends(&probe, PassResult::Skipped, Vec::new());
    assert!(
        worker.next_within_a_minute().items.is_empty(),
        "the job runs although its device was not probed"
    );
}

#[test]
fn a_quarantined_job_of_a_program_needs_no_probe() {
    let mut worker = Worker::new();
    worker.job(1, 1, Source::Quarantine, nearly_condemned());
    worker.pass_of(1);
}

/// A probe concerns the device's own thread: it does not wait for a program's pass, and programs do not wait for it.
#[test]
fn a_program_goes_on_beside_a_probe() {
    let mut worker = Worker::beside_a_program();
    worker.job_of_program(1);
    worker.pass_of(1);
    worker.job(2, 1, worker.source(), JobHeaders::default());
    let pass = worker.pass_of(2);
    worker.ends(&pass, failed(), vec![None]);
    worker.job_of_program(3);
    worker.job(4, 1, worker.source(), JobHeaders::default());
    let started = worker.passes();
    let items: Vec<_> = started.iter().map(|pass| pass.items.clone()).collect();
    assert_eq!(
        items,
        [vec![], vec![(JobKey(3), ItemIndex(0))]],
        "the probe, and of the jobs only the program's"
    );
    worker.ends(&started[0], PassResult::Done, Vec::new());
    worker.pass_of(4);
}

/// A probe that ran out of memory shows nothing, because a program may hold the memory. The next probe runs alone.
#[test]
fn nothing_runs_beside_a_probe_after_one_that_ran_out_of_memory() {
    let mut worker = Worker::beside_a_program();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let pass = worker.pass_of(1);
    worker.ends(&pass, failed(), vec![None]);
    worker.job_of_program(2);
    let started = worker.passes();
    assert_eq!(started.len(), 2, "{started:?}");
    let oom = OutOfMemory { asked: 2, free: 1, total: 2, foreign: 0 };
    worker.ends(&started[0], PassResult::Failed(PassError::from(oom)), Vec::new());
    worker.job_of_program(3);
    for _ in 0..10 {
        worker.now += Duration::from_secs(1);
        worker.quiet_tick();
        assert!(worker.passes().is_empty(), "it waits for the program's pass");
    }
    worker.ends(&started[1], PassResult::Done, vec![Some(10)]);
    let probe = worker.probe();
    assert!(worker.passes().is_empty(), "nothing starts beside it");
    worker.ends(&probe, PassResult::Done, Vec::new());
    worker.pass_of(3);
}

#[test]
fn a_program_finishes_its_pass_beside_a_device_that_is_given_up() {
    let mut worker = Worker::beside_a_program();
    worker.job_of_program(1);
    let long = worker.pass_of(1);
    worker.job(2, 1, worker.source(), JobHeaders::default());
    let pass = worker.pass_of(2);
    worker.ends(&pass, failed(), vec![None]);
    while !worker.wants_restart() {
        let probe = worker.next_within_a_minute();
        assert!(probe.items.is_empty(), "a sick device runs no jobs: {probe:?}");
        let mut actions = worker.ends(&probe, failed(), Vec::new());
        actions.extend(worker.consumers_end(&actions));
        let is_of_program = |(job, ..): &(JobKey, JobHeaders, Route)| *job == JobKey(1);
        assert!(!requeued(&actions).iter().any(is_of_program), "{actions:?}");
    }
    let actions = worker.ends(&long, PassResult::Done, vec![Some(10)]);
    assert_eq!(replied(&actions), [(JobKey(1), 1, true)]);
}
