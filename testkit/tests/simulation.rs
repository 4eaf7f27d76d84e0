//! Fleets of workers in a simulated world: hours of faults in seconds. Real cores, the model of RabbitMQ that is checked against the
//! real one (`broker_model`), and the rules that must hold at every step (`docs/simulation.md`).

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fs, thread};

use vramq_testkit::simulation::agenda::{HOUR, MILLI, MINUTE, Micros};
use vramq_testkit::simulation::plan::{DevicePlan, Fault, FaultKind, MIB, ModelPlan, Plan, Style};
use vramq_testkit::simulation::plan_file::PlanFile;
use vramq_testkit::simulation::sharing::Sharing;
use vramq_testkit::simulation::trace::Detail;
use vramq_testkit::simulation::{History, Sabotage, run, shrink};

/// Histories of an hour each that a plain `cargo test` runs. `make test` sets a larger number in `VRAMQ_TEST_HISTORIES`.
const HISTORIES: u64 = 100;

/// The least average number of jobs that end as withdrawn in a history. With fewer, the test would show nothing.
const WITHDRAWN_MIN: u64 = 5;

/// Seeds that once broke a rule, and what was wrong. When the generator of plans changes, a seed gives another history.
const REGRESSIONS: &[(u64, &str)] = &[
    (9, "a job was requeued while another pass still ran its items, and finished ones were left behind"),
    (20, "the same, and the items were computed twice"),
    (
        83,
        "two permits for the whole of a budget that was nothing; later: a sick device was charged to the jobs that it failed on",
    ),
    (4, "a pass beside an exclusive one"),
    (99, "passes beside a permit for the whole budget, which had grown"),
    (22, "consumers of large jobs, while jobs of consumers that had been stopped took all slots"),
    (11, "a model with less than a pass waited while another one had full passes"),
    (226, "a model's backlog had a claim on all time that another model had had before"),
    (28, "a caller whose next item did not fit kept others from the pass"),
    (19, "a large job whose inputs were being fetched went back to the queue of all jobs"),
    (523, "the first wait for memory of a job's next item was as long as the last one of the item before"),
    (18, "a further queue's closed channel kept runs of settled deliveries until the session's end"),
    (128, "a job that its caller withdrew while it was read was moved by a rule all the same"),
    (132, "the same, in another history"),
    (294, "an item that costs hundreds of passes held up all callers of its queue"),
    (902, "a large backlog on a device that leaks: the leak is a fault, and ends with the others"),
    (223, "a refused message was offered again too late, because its wait was capped before its jitter"),
    (2451, "a job that was lost with a worker, and then waited for its reply queue, forgot that crash"),
    (1022, "jobs with a hint had every second pass, whatever the weight of their queue"),
    (2116, "a worker without a session was told of missing memory: a fault of the world"),
    (2399, "an item was refused before a longer one raised the pass's limit: the rule was too strict"),
    (
        1792,
        "attempts that the broker delivers and does not confirm multiply a job that crashes workers: it has so many copies",
    ),
    (2053, "the same, in another history"),
];

/// The length of a sabotaged history, and the number of seeds that must find a sabotage.
const SABOTAGED: Micros = 30 * MINUTE;
const SABOTAGE_SEEDS: u64 = 400;

/// The number of histories with many large jobs and short turns.
const OF_LARGE_JOBS: u64 = 40;

/// The number of histories of each kind of flood. So many find every deliberate fault of shares.
const OF_FLOODS: u64 = 24;

/// Which parties are flooded at the same time and must share.
#[derive(Clone, Copy, Debug)]
enum Flooded {
    /// Two queues of a model. The second one has a larger weight.
    Queues,
    /// Two models of a device. The second one has a larger weight.
    Models,
    /// One queue, by two callers. One publishes first, and ten times as many jobs.
    Callers,
}

/// Runs something for every number, on as many threads as the machine has.
fn side_by_side(numbers: std::ops::Range<u64>, act: impl Fn(u64) + Sync) {
    let next = AtomicU64::new(numbers.start);
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= numbers.end {
                        break;
                    }
                    act(number);
                }
            });
        }
    });
}

fn must_hold(seed: u64, history: &History) {
    if let Some(violation) = &history.violation {
        panic!("seed {seed}: {violation}\nreplay it with: make sim SEED={seed}");
    }
}

#[test]
fn every_rule_holds_in_every_history() {
    let histories = match std::env::var("VRAMQ_TEST_HISTORIES") {
        Ok(number) => number.parse().expect("VRAMQ_TEST_HISTORIES is a number"),
        Err(_) => HISTORIES,
    };
    // Without a history no rule can break.
    assert!(histories > 0, "VRAMQ_TEST_HISTORIES is 0");
    let [jobs, withdrawn, handed_over, lasted] = std::array::from_fn(|_| AtomicU64::new(0));
    side_by_side(1..histories + 1, |seed| {
        let history = run(Plan::new(seed, HOUR), Detail::None);
        must_hold(seed, &history);
        assert!(history.jobs >= 1_000, "seed {seed}: {} jobs only", history.jobs);
        assert!(history.faults >= 10, "seed {seed}: {} faults only", history.faults);
        jobs.fetch_add(history.jobs as u64, Ordering::Relaxed);
        withdrawn.fetch_add(history.withdrawn as u64, Ordering::Relaxed);
        handed_over.fetch_add(history.handed_over as u64, Ordering::Relaxed);
        lasted.fetch_add(history.lasted, Ordering::Relaxed);
    });
    let hours = lasted.into_inner() / HOUR;
    assert!(hours >= histories, "{hours} hours");
    let withdrawn = withdrawn.into_inner();
    assert!(
        withdrawn >= WITHDRAWN_MIN * histories,
        "{withdrawn} jobs were withdrawn in {histories} histories"
    );
    let handed_over = handed_over.into_inner();
    println!(
        "{histories} histories, {hours} simulated hours, {} jobs, {withdrawn} of them withdrawn; {handed_over} times a large job \
         was handed over",
        jobs.into_inner()
    );
}

/// A history in which a caller publishes several large jobs at once, with turns of one pass.
fn of_large_jobs(seed: u64) -> Plan {
    const JOBS: usize = 40;
    let mut plan = Plan::new(seed, HOUR);
    for model in &mut plan.models {
        (model.slots_max, model.pass_cost_max, model.micros_per_cost) = (8, 1024, 300);
    }
    if let Some(caller) = plan.callers.first_mut() {
        (caller.style, caller.jobs_max) = (Style::Bulk, JOBS);
        caller.pause = HOUR * 7 / 10 / JOBS as u64;
    }
    Plan { large_turn: 100 * MILLI, large_at_once: 6, reply_outputs_max: None, ..plan }
}

#[test]
fn large_jobs_make_room_for_each_other() {
    let handed_over = AtomicU64::new(0);
    side_by_side(1..OF_LARGE_JOBS + 1, |seed| {
        let history = run(of_large_jobs(seed), Detail::None);
        assert_eq!(history.violation, None, "seed {seed}");
        handed_over.fetch_add(history.handed_over as u64, Ordering::Relaxed);
    });
    let handed_over = handed_over.into_inner();
    println!("{handed_over} times in {OF_LARGE_JOBS} histories");
    assert!(handed_over > 0, "no large job was handed over");
}

/// A history with floods from two callers at the same time, again and again.
fn of_floods(seed: u64, flooded: Flooded) -> Plan {
    const FLOODS: u64 = 5;
    const WEIGHTS: [u32; 2] = [1, 6];
    let (models, sharing, jobs) = match flooded {
        Flooded::Queues => (1, Sharing::of_queues(&WEIGHTS), [400, 400]),
        Flooded::Models => (2, Sharing::of_models(&WEIGHTS), [400, 400]),
        Flooded::Callers => (1, Sharing::default(), [400, 40]),
    };
    let mut plan = Plan::new(seed, SABOTAGED);
    let model = plan.models[0];
    plan.models = vec![ModelPlan { concurrent: false, ..model }; models];
    for model in &mut plan.models {
        (model.slots_max, model.pass_cost_max, model.micros_per_cost) = (32, 1024, 100);
    }
    plan.workers.truncate(1);
    plan.callers.truncate(jobs.len());
    for (number, caller) in plan.callers.iter_mut().enumerate() {
        (caller.number, caller.style, caller.model) = (number, Style::Steady, number % models);
    }
    let flood = |at: Micros, caller: usize| Fault {
        at,
        lasts: 0,
        kind: FaultKind::Flood { caller, jobs: jobs[caller] },
    };
    plan.faults = (1..=FLOODS)
        .flat_map(|number| [0, 1].map(|caller| flood(number * SABOTAGED * 7 / 10 / FLOODS, caller)))
        .collect();
    if let Flooded::Callers = flooded {
        hold_hundreds(&mut plan);
    }
    Plan { sharing, jobs_max: 100_000, ..plan }
}

/// Lets the worker hold hundreds of jobs, worth many passes. Shares of callers apply only to held jobs; at the broker the first job is the
/// first.
fn hold_hundreds(plan: &mut Plan) {
    // A worker holds what a fast device runs in half a second, if there is room. A pass takes a quarter of the smallest device.
    plan.devices = [16_384, 2_048].map(|mib| DevicePlan { total: mib * MIB }).into();
    plan.workers.iter_mut().for_each(|worker| worker.device = 0);
    for model in &mut plan.models {
        (model.slots_max, model.pass_cost_max, model.micros_per_cost) = (512, 256, 20);
    }
}

#[test]
fn a_flooded_caller_has_its_share() {
    side_by_side(1..OF_FLOODS + 1, |seed| {
        for flooded in [Flooded::Queues, Flooded::Models, Flooded::Callers] {
            let plan = of_floods(seed, flooded);
            let jobs = |fault: &Fault| match fault.kind {
                FaultKind::Flood { jobs, .. } => jobs,
                _ => 0,
            };
            let jobs: usize = plan.faults.iter().map(jobs).sum();
            let history = run(plan, Detail::None);
            assert_eq!(history.violation, None, "seed {seed}, {flooded:?}");
            assert!(jobs > 0 && history.jobs > jobs, "seed {seed}, {flooded:?}: {} jobs only", history.jobs);
        }
    });
}

#[test]
fn seeds_that_once_broke_a_rule_break_none() {
    for (seed, what) in REGRESSIONS {
        // The oldest seeds are from before withdrawals and references, others from before shares, and all from before full disks.
        let plan = Plan::new(*seed, HOUR);
        let before = Plan { withdrawn_percent: 0, referring_percent: 0, ..plan.clone().plain() };
        for plan in [before, plan.clone().plain(), plan.clone().with_empty_disks(), plan] {
            let history = run(plan, Detail::None);
            assert_eq!(history.violation, None, "seed {seed}: {what}");
        }
    }
}

/// Plans that `vramq-sim --save` wrote of histories that broke a rule. Plans with a deliberate fault still break it; the fault in the
/// others is fixed.
#[test]
fn plans_that_were_kept_break_their_rule_by_their_sabotage_alone() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/regressions");
    let files: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    assert!(!files.is_empty());
    side_by_side(0..files.len() as u64, |number| {
        let path = &files[usize::try_from(number).unwrap()];
        let PlanFile { broke, what, plan } = PlanFile::read(path).unwrap();
        let file = path.display();
        let rule = plan.sabotage.map(|_| broke.as_str());
        let violation = run(plan.clone(), Detail::None).violation;
        assert_eq!(violation.as_ref().map(|violation| violation.rule), rule, "{file}: {what}");
        let unchanged = run(Plan { sabotage: None, ..plan }, Detail::None).violation;
        assert_eq!(unchanged, None, "{file}: {what}");
    });
}

#[test]
fn a_seed_is_one_history() {
    let outline = |seed| {
        let history = run(Plan::new(seed, 20 * MINUTE), Detail::Last);
        (
            history.jobs,
            history.steps,
            history.lasted,
            history.trace.lines().map(str::to_owned).collect::<Vec<_>>(),
        )
    };
    assert_eq!(outline(3), outline(3));
    assert_ne!(outline(3), outline(4));
}

/// The floods that reveal a fault of shares, and the rule that must detect it. Shares matter for long only while both sides are flooded.
fn shown_by_floods(sabotage: Sabotage) -> Option<(Flooded, &'static str)> {
    match sabotage {
        Sabotage::QueueWeightsIgnored => {
            Some((Flooded::Queues, "queues of a model have its passes by weight"))
        }
        Sabotage::ModelWeightsIgnored => Some((Flooded::Models, "models have the device in turns")),
        Sabotage::CallersCountAsOne => Some((Flooded::Callers, "callers of a queue have equal shares")),
        _ => None,
    }
}

#[test]
fn every_fault_put_in_on_purpose_is_found() {
    let missed = std::sync::Mutex::new(Vec::new());
    side_by_side(0..Sabotage::ALL.len() as u64, |number| {
        let sabotage = Sabotage::ALL[usize::try_from(number).unwrap()];
        let floods = shown_by_floods(sabotage);
        // The floods of a regular run must be enough.
        let seeds = if floods.is_some() { OF_FLOODS } else { SABOTAGE_SEEDS };
        let found = (1..=seeds).find_map(|seed| {
            let plan = match floods {
                Some((flooded, _)) => of_floods(seed, flooded),
                None => Plan::new(seed, SABOTAGED),
            };
            let sabotaged = Plan { sabotage: Some(sabotage), ..plan.clone() };
            let violation = run(sabotaged, Detail::None).violation?;
            if let Some((_, rule)) = floods {
                assert_eq!(violation.rule, rule, "seed {seed}, {sabotage:?}: {violation}");
            }
            // Without the fault the same history must pass: a rule that always breaks would seem to detect every fault.
            let unchanged = run(plan, Detail::None).violation;
            assert_eq!(unchanged, None, "seed {seed} breaks a rule without {sabotage:?}");
            Some((seed, violation))
        });
        match found {
            Some((seed, violation)) => println!("{sabotage:?}: seed {seed}, {violation}"),
            None => missed.lock().unwrap().push(sabotage),
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "not found: {missed:?}");
}

#[test]
fn a_history_shrinks_to_what_breaks_the_rule() {
    let plan = Plan { sabotage: Some(Sabotage::PartSkipped), ..Plan::new(1, SABOTAGED) };
    let seeds = (1..=SABOTAGE_SEEDS)
        .map(|seed| Plan { seed, ..Plan { sabotage: plan.sabotage, ..Plan::new(seed, SABOTAGED) } });
    let found = seeds.into_iter().find_map(|plan| Some((plan.clone(), run(plan, Detail::None).violation?)));
    let (plan, violation) = found.expect("no seed finds it");
    let short = shrink(plan.clone());
    let again = run(short.clone(), Detail::None).violation.expect("the shorter history breaks no rule");
    assert_eq!(again.rule, violation.rule);
    let size = |plan: &Plan| plan.workers.len() + plan.callers.len() + plan.faults.len();
    assert!(size(&short) < size(&plan), "{short:?}");
}

/// The names of the rules that a source file checks: the first argument of each `fail(`.
fn rules_of(source: &str) -> Vec<String> {
    let calls = source.split(".fail(").skip(1);
    let names = calls.filter_map(|call| call.trim_start().strip_prefix('"')?.split('"').next());
    names.map(str::to_owned).collect()
}

#[test]
fn the_page_names_every_rule() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("../docs/simulation.md")).unwrap();
    let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut folders = vec![root.join("src/simulation")];
    let mut rules = Vec::new();
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            match path.is_dir() {
                true => folders.push(path),
                false => rules.extend(rules_of(&fs::read_to_string(path).unwrap())),
            }
        }
    }
    assert!(rules.len() > 50, "{rules:?}");
    let missing: Vec<_> = rules.iter().filter(|rule| !page.contains(*rule)).collect();
    assert!(missing.is_empty(), "docs/simulation.md does not have {missing:?}");
}
