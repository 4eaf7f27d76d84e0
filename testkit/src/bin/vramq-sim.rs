//! Simulates fleets of workers: many seeds in several processes, or one seed with its trace.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use vramq_testkit::simulation::agenda::{HOUR, Micros};
use vramq_testkit::simulation::plan::Plan;
use vramq_testkit::simulation::plan_file::PlanFile;
use vramq_testkit::simulation::trace::{Detail, Violation};
use vramq_testkit::simulation::{Sabotage, run, shrink};

const USAGE: &str = "\
usage: vramq-sim [--seed N | --plan FILE] [--seeds A..B] [--minutes M] [--processes P] [--hours H] [--sabotage NAME]
                 [--shrink] [--save FILE]

  --seed N         one history, with its trace
  --plan FILE      the history of a plan that was saved, with its trace
  --seeds A..B     the histories from A to B; without --seed, --plan and --seeds from 1 on
  --minutes M      no new history after so many minutes
  --processes P    so many processes, each with its part of the seeds
  --hours H        simulated hours in which callers publish and faults happen, in each history (default 1)
  --sabotage NAME  put a fault into every worker on purpose
  --shrink         cut a history that breaks a rule down before it is printed
  --save FILE      write the plan of a history that breaks a rule to a file; with --shrink, the shorter one";

#[derive(Clone, Debug)]
struct Options {
    seed: Option<u64>,
    plan: Option<PathBuf>,
    seeds: (u64, u64),
    minutes: Option<u64>,
    processes: u64,
    busy: Micros,
    sabotage: Option<Sabotage>,
    shrinks: bool,
    save: Option<PathBuf>,
    /// One of several processes: takes each nth seed.
    step: u64,
}

fn main() -> ExitCode {
    let Some(options) = options(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let planned = match &options.plan {
        Some(file) => match PlanFile::read(file) {
            Ok(PlanFile { plan, .. }) => Some(Plan { sabotage: options.sabotage.or(plan.sabotage), ..plan }),
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::from(2);
            }
        },
        None => options.seed.map(|seed| plan(seed, &options)),
    };
    let is_well = match planned {
        Some(plan) => one(plan, &options),
        None if options.processes > 1 => many(&options),
        None => series(&options),
    };
    if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn options(mut args: impl Iterator<Item = String>) -> Option<Options> {
    let mut options = Options {
        seed: None,
        plan: None,
        seeds: (1, u64::MAX),
        minutes: None,
        processes: 1,
        busy: HOUR,
        sabotage: None,
        shrinks: false,
        save: None,
        step: 1,
    };
    while let Some(name) = args.next() {
        if name == "--shrink" {
            options.shrinks = true;
            continue;
        }
        let value = args.next()?;
        match name.as_str() {
            "--seed" => options.seed = Some(value.parse().ok()?),
            "--plan" => options.plan = Some(value.into()),
            "--save" => options.save = Some(value.into()),
            "--seeds" => {
                let (from, to) = value.split_once("..")?;
                options.seeds = (from.parse().ok()?, to.trim_start_matches('=').parse().ok()?);
            }
            "--minutes" => options.minutes = Some(value.parse().ok()?),
            "--processes" => options.processes = value.parse().ok()?,
            "--hours" => options.busy = (value.parse::<f64>().ok()? * HOUR as f64) as Micros,
            "--step" => options.step = value.parse().ok()?,
            "--sabotage" => {
                options.sabotage =
                    Some(*Sabotage::ALL.iter().find(|sabotage| format!("{sabotage:?}") == value)?);
            }
            _ => return None,
        }
    }
    Some(options)
}

fn plan(seed: u64, options: &Options) -> Plan {
    Plan { sabotage: options.sabotage, ..Plan::new(seed, options.busy) }
}

/// Runs one history and prints its trace; with `shrinks`, that of a shorter history that breaks the same rule. Returns whether every rule
/// held, so that `git bisect run` can use the exit status.
fn one(mut plan: Plan, options: &Options) -> bool {
    if options.shrinks {
        plan = shrink(plan);
        println!("{plan:#?}");
    }
    let (seed, history) = (plan.seed, run(plan.clone(), Detail::Print));
    let Some(violation) = history.violation else {
        println!("seed {seed}: {} jobs, {} faults, every rule held", history.jobs, history.faults);
        return true;
    };
    println!("seed {seed}: {violation}");
    if let Some(path) = &options.save {
        save(plan, &violation, path);
    }
    false
}

fn save(plan: Plan, violation: &Violation, path: &Path) {
    let file = PlanFile { broke: violation.rule.to_owned(), what: violation.to_string(), plan };
    if let Err(error) = file.write(path) {
        eprintln!("the plan is not saved: {error}");
    }
}

/// Runs histories one after the other.
fn series(options: &Options) -> bool {
    let begun = Instant::now();
    let limit = options.minutes.map(|minutes| Duration::from_secs(60 * minutes));
    let (mut histories, mut bad, mut lasted): (u64, u64, Micros) = (0, 0, 0);
    let (mut jobs, mut handed_over): (usize, usize) = (0, 0);
    let mut seed = options.seeds.0;
    while seed <= options.seeds.1 && limit.is_none_or(|limit| begun.elapsed() < limit) {
        let history = run(plan(seed, options), Detail::None);
        histories += 1;
        jobs += history.jobs;
        handed_over += history.handed_over;
        lasted += history.lasted;
        if let Some(violation) = history.violation {
            bad += 1;
            println!("seed {seed}: {violation}");
        }
        seed += options.step;
    }
    let (hours, seconds) = (lasted as f64 / HOUR as f64, begun.elapsed().as_secs_f64());
    println!(
        "{histories} histories, {hours:.0} simulated hours, {jobs} jobs, {handed_over} times a large one was handed over, in {seconds:.1} s: \
         {:.1} hours/s; {bad} broke a rule",
        hours / seconds
    );
    bad == 0
}

/// Runs several processes, each with its part of the seeds.
fn many(options: &Options) -> bool {
    let Ok(program) = std::env::current_exe() else { return false };
    let own: Vec<String> = std::env::args().skip(1).collect();
    let children: Vec<_> = (0..options.processes)
        .filter_map(|number| {
            let (from, to) = (options.seeds.0 + number, options.seeds.1);
            let mut command = Command::new(&program);
            command.args(&own).args(["--processes", "1", "--step", &options.processes.to_string()]);
            command.args(["--seeds", &format!("{from}..{to}")]).spawn().ok()
        })
        .collect();
    let mut is_well = children.len() as u64 == options.processes;
    for mut child in children {
        is_well &= child.wait().is_ok_and(|status| status.success());
    }
    is_well
}
