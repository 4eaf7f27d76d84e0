//! What a loaded process holds of a device that does not tell processes apart: estimated from the memory that the device lost while the
//! process was loaded. Others may have taken or freed memory meanwhile.

/// If nothing but the difference is known of a process, this part of it counts as surely the process's: one half, so that others may have
/// taken as much meanwhile as the process itself.
const SURE_PART: u64 = 2;

/// What is known of a process that was just loaded, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Evidence {
    /// What the device lost meanwhile, if that is known.
    pub(super) taken: Option<u64>,
    /// What the configuration says that a process takes (`base_mib`).
    pub(super) declared: Option<u64>,
    /// What the program says that its weights take; 0 if it says nothing.
    pub(super) said: u64,
    /// The least that an earlier process of the model took.
    pub(super) earlier: Option<u64>,
}

/// The estimates that follow from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Estimate {
    /// What counts as the process's.
    pub(super) held: u64,
    /// What of this is the process's beyond doubt: so much must return when it ends. If this were too much, its slot would be withheld for
    /// as long as others keep what they took. If it is too little, the next process still starts only if the device has room for it.
    pub(super) sure: u64,
    /// What the next load is expected to need, if anything is known. Too much only delays it.
    pub(super) needed: Option<u64>,
}

impl Evidence {
    pub(super) fn estimate(self) -> Estimate {
        let Self { taken, declared, said, earlier } = self;
        let declared = declared.filter(|bytes| *bytes > 0);
        let said_any = Some(said).filter(|bytes| *bytes > 0);
        let least = [declared, said_any, earlier].into_iter().flatten().min();
        let held = taken.or(least).unwrap_or(0);
        Estimate {
            held,
            sure: least.unwrap_or(held / SURE_PART).min(held),
            needed: [taken.or(least), declared, said_any].into_iter().flatten().max(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_that_is_known_is_sure() {
        let estimate = |taken, declared, said, earlier| {
            let taken = Some(taken);
            let Estimate { held, sure, needed } = Evidence { taken, declared, said, earlier }.estimate();
            (held, sure, needed.unwrap())
        };
        // Nothing else is known.
        assert_eq!(estimate(800, None, 0, None), (800, 400, 800));
        // The program says what it holds, without its context.
        assert_eq!(estimate(800, None, 500, None), (800, 500, 800));
        // Others took 1,200 meanwhile.
        assert_eq!(estimate(2000, Some(800), 0, None), (2000, 800, 2000));
        assert_eq!(estimate(2000, None, 500, None), (2000, 500, 2000));
        assert_eq!(estimate(2000, None, 0, Some(800)), (2000, 800, 2000));
        // Others freed memory meanwhile, or what is declared or said is too much.
        assert_eq!(estimate(100, Some(800), 500, Some(800)), (100, 100, 800));
        assert_eq!(estimate(0, None, 500, None), (0, 0, 500));
        // A declaration of 0 says nothing.
        assert_eq!(estimate(800, Some(0), 0, None), (800, 400, 800));
    }

    #[test]
    fn without_a_difference_what_is_declared_said_or_known_from_earlier_loads_counts() {
        let estimate = |declared, said, earlier| {
            let evidence = Evidence { taken: None, declared, said, earlier };
            let Estimate { held, sure, needed } = evidence.estimate();
            (held, sure, needed)
        };
        assert_eq!(estimate(Some(800), 500, Some(600)), (500, 500, Some(800)));
        assert_eq!(estimate(None, 0, Some(600)), (600, 600, Some(600)));
        assert_eq!(estimate(None, 0, None), (0, 0, None));
    }
}
