//! Random histories of the account, without processes, device and clock: models whose programs load, run passes, are asked to end, and
//! leave memory behind that comes back later.

use proptest::prelude::*;

use super::tests::Unsteady;
use super::*;

const MIB: u64 = 1 << 20;
const TOTAL: u64 = 10_000 * MIB;

/// Snapshots of the device in a history: ten minutes.
const LOOKS: u32 = 6_000;

/// A program that waited longer than this, in snapshots, may stay for `BUSY_AFTER` before it is asked to end: its jobs must come back.
const PATIENCE: u32 = 50;

/// Each of these snapshots fails, or is as old as the one before.
const FAILED_EVERY: u32 = 11;
const OLD_EVERY: u32 = 7;

/// How often one-shot programs come, and go.
const ONCE_EVERY: u32 = 97;

/// How a model behaves. Times are in snapshots; a program runs for at least one.
#[derive(Clone, Copy, Debug)]
struct Model {
    /// What its program takes when it is loaded, in MiB.
    need: u64,
    load: u32,
    pass: u32,
    /// From the end of a job to the next one. With 0 there is always work.
    pause: u32,
    end: u32,
    /// How long its memory stays missing after its end.
    stays: u32,
}

fn models() -> impl Strategy<Value = Vec<Model>> {
    let times = (
        1..20_u32,
        1..30_u32,
        prop_oneof![Just(0_u32), 1..200_u32],
        1..10_u32,
        prop_oneof![Just(0_u32), 1..40_u32],
    );
    let model = (100..8_000_u64, times).prop_map(|(need, (load, pass, pause, end, stays))| Model {
        need,
        load,
        pass,
        pause,
        end,
        stays,
    });
    prop::collection::vec(model, 2..6)
}

/// The longest that a program may wait, in snapshots: see `entries.rs`. Here a pass and the end of a program are shorter than the time
/// after which another program is asked to end. Each step of a program begins with the next snapshot, and is seen at the one after it.
fn wait_max(models: &[Model]) -> u32 {
    let longest = |time: fn(&Model) -> u32| models.iter().map(time).max().unwrap_or(0) + 2;
    let (load, stays) = (longest(|model| model.load), longest(|model| model.stays));
    let pass_and_end = longest(|model| model.pass) + longest(|model| model.end);
    let busy_after = (BUSY_AFTER.as_millis() / LOOK.as_millis()) as u32 + 1;
    let count = models.len() as u32;
    let turn = load + busy_after + (count - 1) * pass_and_end + pass_and_end + stays;
    // A snapshot that fails or is old decides nothing.
    let snapshots = busy_after + count * turn;
    snapshots + snapshots.div_ceil(FAILED_EVERY) + snapshots.div_ceil(OLD_EVERY) + 2 * count
}

/// The place for a model's program.
#[derive(Debug)]
enum Place {
    Unloaded,
    Waiting {
        waiter: Waiter,
        since: u32,
    },
    /// It takes its memory step by step. `waited`: for how long it waited for that.
    Loading {
        reserved: Entry,
        entry: Entry,
        left: u32,
        waited: u32,
    },
    Idle(Entry),
    Busy {
        entry: Entry,
        left: u32,
    },
    Ending {
        entry: Entry,
        left: u32,
        claim: Claim,
        alone: bool,
    },
    /// `alone`: no other memory was missing when the claim was made, which would look like that of other processes.
    Withheld {
        claim: Claim,
        returning: Returning,
        left: u32,
        alone: bool,
    },
}

/// A device, and the models on it.
struct World {
    account: Arc<DeviceAccount>,
    start: Instant,
    at: u32,
    /// What other processes hold.
    others: u64,
    /// A one-shot program that runs, and what it holds then.
    once: Option<Entry>,
    once_bytes: u64,
    /// What the snapshot before showed.
    before: Option<Snapshot>,
    models: Vec<Model>,
    places: Vec<Place>,
    /// When each model has its next job.
    next_job: Vec<u32>,
    /// The longest that a program waited.
    longest: u32,
    jobs: Vec<u32>,
}

impl World {
    fn new(models: Vec<Model>, others: u64, once_bytes: u64) -> Self {
        let places = models.iter().map(|_| Place::Unloaded).collect();
        let (next_job, jobs) = (vec![0; models.len()], vec![0; models.len()]);
        let account = DeviceAccount::new(Arc::new(Unsteady::default()));
        Self {
            account,
            start: Instant::now(),
            at: 0,
            others,
            once: None,
            once_bytes,
            before: None,
            models,
            places,
            next_job,
            longest: 0,
            jobs,
        }
    }

    fn now(&self) -> Instant {
        self.start + LOOK * self.at
    }

    fn need(&self, model: usize) -> u64 {
        self.models[model].need * MIB
    }

    fn has_work(&self, model: usize) -> bool {
        self.next_job[model] <= self.at
    }

    /// Whether the model's program fits beside what nobody here can end.
    fn has_room(&self, model: usize) -> bool {
        self.need(model) + self.others + self.once_bytes <= TOTAL
    }

    fn reserved(&self) -> u64 {
        self.account.entries().reserved.values().sum()
    }

    /// One-shot programs are admitted as passes: into what is not promised to others.
    fn once_comes_or_goes(&mut self) {
        // Not at an old snapshot, which does not show it.
        let is_due = self.at.is_multiple_of(ONCE_EVERY) && !self.at.is_multiple_of(OLD_EVERY);
        if !is_due || self.once.take().is_some() {
            return;
        }
        if self.snapshot().reading.free - (self.reserved() - self.taken()) >= self.once_bytes {
            let once = self.account.enter_once(0);
            once.holds(self.once_bytes, false);
            self.once = Some(once);
        }
    }

    /// Bytes that are in use although their program has ended.
    fn left_behind(&self) -> u64 {
        let left = |(model, place): (usize, &Place)| match place {
            Place::Withheld { left: 1.., .. } => self.need(model),
            _ => 0,
        };
        self.places.iter().enumerate().map(left).sum()
    }

    /// Whether the snapshots of the device show how much that is: no memory was missing when a claim was made, so none seemed to be that of
    /// other processes.
    fn shows_what_is_missing(&self) -> bool {
        self.places.iter().all(|place| !matches!(place, Place::Withheld { left: 1.., alone: false, .. }))
    }

    /// What programs that are loading have taken so far.
    fn taken(&self) -> u64 {
        let taken = |(model, place): (usize, &Place)| match place {
            Place::Loading { left, .. } => {
                let load = u64::from(self.models[model].load);
                self.need(model) * (load - u64::from(*left)) / load
            }
            _ => 0,
        };
        self.places.iter().enumerate().map(taken).sum()
    }

    fn snapshot(&self) -> Snapshot {
        let held: u64 = self.account.entries().programs.values().map(|program| program.held).sum();
        let ours = held + self.taken();
        let used = self.others + ours + self.left_behind();
        Snapshot {
            reading: Reading { free: TOTAL - used, total: TOTAL, own: 0 },
            ours,
            staying: if self.once.is_some() { self.once_bytes } else { 0 },
            owed: 0,
            tells_apart: true,
            removed: self.account.entries().removed,
        }
    }

    /// A tenth of a second. The models come in this order.
    fn step(&mut self, order: impl Iterator<Item = usize>) {
        self.at += 1;
        self.once_comes_or_goes();
        for model in order {
            let place = std::mem::replace(&mut self.places[model], Place::Unloaded);
            self.places[model] = self.next(model, place);
            let reserved = self.reserved();
            assert!(
                reserved - self.taken() <= self.snapshot().reading.free,
                "more is reserved than there is: {:?}",
                self.places
            );
        }
        self.before = Some(self.snapshot());
    }

    fn next(&mut self, model: usize, place: Place) -> Place {
        match place {
            Place::Unloaded if self.has_work(model) => {
                Place::Waiting { waiter: self.account.waiter(), since: self.at }
            }
            Place::Unloaded => Place::Unloaded,
            Place::Waiting { waiter, since } => match self.ask(model, &waiter, since) {
                Some(reserved) => {
                    let (entry, waited) = (self.account.enter(0), self.at - since);
                    Place::Loading { reserved, entry, left: self.models[model].load, waited }
                }
                None => Place::Waiting { waiter, since },
            },
            Place::Loading { reserved, entry, left: 0, waited } => {
                drop(reserved);
                entry.holds(self.need(model), false);
                let now = self.now();
                entry.change(|program| {
                    program.loaded = Some(now);
                    program.kept_until = (waited > PATIENCE).then(|| now + BUSY_AFTER);
                });
                self.between_passes(model, entry)
            }
            Place::Loading { reserved, entry, left, waited } => {
                Place::Loading { reserved, entry, left: left - 1, waited }
            }
            Place::Idle(entry) => self.between_passes(model, entry),
            Place::Busy { entry, left: 0 } => {
                self.jobs[model] += 1;
                self.next_job[model] = self.at + self.models[model].pause;
                self.between_passes(model, entry)
            }
            Place::Busy { entry, left } => Place::Busy { entry, left: left - 1 },
            Place::Ending { entry, left: 0, claim, alone } => {
                let returning = entry.ended(claim, self.now());
                Place::Withheld { claim, returning, left: self.models[model].stays, alone }
            }
            Place::Ending { entry, left, claim, alone } => {
                Place::Ending { entry, left: left - 1, claim, alone }
            }
            Place::Withheld { claim, returning, left, alone } => self.reclaim(claim, returning, left, alone),
        }
    }

    /// A program ends if it was asked to, or runs its next pass, or is idle.
    fn between_passes(&self, model: usize, entry: Entry) -> Place {
        if entry.is_asked_to_end() {
            let held = self.need(model);
            let claim = Claim { alive: self.snapshot(), held, sure: held };
            let alone = self.left_behind() == 0;
            return Place::Ending { entry, left: self.models[model].end, claim, alone };
        }
        let (has_work, now) = (self.has_work(model), self.now());
        entry.change(|program| program.idle = (!has_work).then(|| program.idle.unwrap_or(now)));
        if has_work { Place::Busy { entry, left: self.models[model].pass } } else { Place::Idle(entry) }
    }

    /// An ended program's place is free when its memory is back, and not before.
    fn reclaim(&self, claim: Claim, returning: Returning, left: u32, alone: bool) -> Place {
        // The place itself is not in the list now.
        let mut snapshot = self.snapshot();
        if left > 0 {
            snapshot.reading.free -= claim.held;
        }
        let (is_missing, others_left) = (claim.missing(snapshot) > 0, self.left_behind() > 0);
        if !others_left && (alone || left == 0) {
            assert_eq!(
                is_missing,
                left > 0,
                "{left} snapshots before its memory returns: {claim:?} {snapshot:?}"
            );
        }
        if left == 0 && !is_missing {
            return Place::Unloaded;
        }
        Place::Withheld { claim, returning, left: left.saturating_sub(1), alone }
    }

    /// Asks for the memory of a model's program.
    fn ask(&mut self, model: usize, waiter: &Waiter, since: u32) -> Option<Entry> {
        let waited = self.at - since;
        if self.has_room(model) {
            self.longest = self.longest.max(waited);
        }
        let busy_too = LOOK * waited > BUSY_AFTER;
        let request = Request { bytes: self.need(model), busy_too };
        let snapshot = self.snapshot();
        let free = snapshot.reading.free.saturating_sub(self.account.entries().reserved.values().sum());
        let before = self.not_asked();
        let seen = match self.at {
            at if at.is_multiple_of(FAILED_EVERY) => None,
            at if at.is_multiple_of(OLD_EVERY) => self.before,
            _ => Some(snapshot),
        };
        let entry = self.account.reserve(waiter, request, seen, self.now());
        let after = self.not_asked();
        let newly: Vec<_> =
            before.iter().filter(|(id, ..)| !after.iter().any(|(other, ..)| other == id)).collect();
        assert!(newly.len() <= 1 && (entry.is_none() || newly.is_empty()), "{newly:?}");
        for (_, is_idle) in newly {
            assert!(*is_idle || busy_too, "a busy program is asked to end after {waited} snapshots");
            let idle = before.iter().any(|(_, is_idle)| *is_idle);
            assert!(*is_idle || !idle, "a busy program is asked to end beside an idle one");
            let in_time = snapshot.reading.free + snapshot.ours + self.left_behind();
            assert!(in_time >= request.bytes, "it is asked to end for too little");
            assert!(
                !self.shows_what_is_missing() || free + self.left_behind() < request.bytes,
                "it is asked to end although enough comes back"
            );
        }
        entry
    }

    /// The loaded programs that may be asked to end and were not: number, and whether it is idle.
    fn not_asked(&self) -> Vec<(u64, bool)> {
        let (entries, now) = (self.account.entries(), self.now());
        let may_end = |program: &Program| {
            !program.is_asked_to_end && program.kept_until.is_none_or(|until| until <= now)
        };
        let programs = entries.programs.iter().filter(|(_, program)| may_end(program));
        programs.map(|(id, program)| (*id, program.idle.is_some())).collect()
    }
}

/// Numbers that look random, for the order of the models.
fn numbers(mut seed: u64) -> impl FnMut() -> u64 {
    move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        seed >> 33
    }
}

proptest! {
    /// What is reserved is there. Programs end only for one that then fits, busy ones last. Missing memory withholds its place until it is
    /// back. No model with room waits for ever, although snapshots fail or are old, and one-shot programs come and go.
    #[test]
    fn models_take_turns_within_the_device(
        models in models(),
        others in 0..9_000_u64,
        once in prop_oneof![Just(0_u64), 1..2_000_u64],
        seed in any::<u64>(),
    ) {
        let count = models.len();
        let mut world = World::new(models, others * MIB, once * MIB);
        let mut number = numbers(seed);
        for _ in 0..LOOKS {
            let mut order: Vec<usize> = (0..count).collect();
            for at in (1..count).rev() {
                order.swap(at, number() as usize % (at + 1));
            }
            world.step(order.into_iter());
        }
        let (longest, most) = (world.longest, wait_max(&world.models));
        prop_assert!(longest <= most, "a program waited for {longest} snapshots instead of {most}");
        let starved = |model: &usize| world.has_room(*model) && world.jobs[*model] == 0;
        prop_assert!((0..count).all(|model| !starved(&model)), "{:?}", world.jobs);
    }
}
