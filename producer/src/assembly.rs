//! Puts the parts of one job together, in any order, and drops duplicates and forgeries. Pure.

use vramq_schemas::{ItemProgress, Output, ReplyHeaders};

/// The outputs of one job as far as they have come. Its memory is bounded by the job's own number of inputs,
/// whatever a reply claims.
#[derive(Debug)]
pub(crate) struct Assembly {
    outputs: Vec<Option<Output>>,
    done: usize,
}

/// What a part changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Added {
    /// Items that were already answered; their first answer counts.
    pub(crate) duplicates: usize,
    /// Whether every item is answered now.
    pub(crate) complete: bool,
}

impl Assembly {
    pub(crate) fn new(items: usize) -> Self {
        Self { outputs: vec![None; items], done: 0 }
    }

    pub(crate) fn done(&self) -> usize {
        self.done
    }

    /// Whether an item is answered.
    pub(crate) fn has(&self, item: u32) -> bool {
        self.outputs.get(item as usize).is_some_and(Option::is_some)
    }

    /// Whether a progress report is plausible: the job has the item, and the item is not answered yet.
    pub(crate) fn expects(&self, report: &ItemProgress) -> bool {
        (0.0..=1.0).contains(&report.fraction)
            && self.outputs.get(report.item as usize).is_some_and(Option::is_none)
    }

    /// Takes a part in. Items that are there already are dropped.
    ///
    /// # Errors
    /// When headers and body contradict each other or the job; nothing of the part is taken then.
    pub(crate) fn add(&mut self, headers: &ReplyHeaders, outputs: Vec<Output>) -> Result<Added, String> {
        let total = self.outputs.len();
        if headers.items_total as usize != total {
            return Err(format!("it is for a job of {} items, and the job has {total}", headers.items_total));
        }
        if headers.items as usize != outputs.len() {
            return Err(format!("its headers say {} items, and it holds {}", headers.items, outputs.len()));
        }
        let offset = headers.offset as usize;
        let places =
            offset.checked_add(outputs.len()).and_then(|end| self.outputs.get_mut(offset..end)).ok_or_else(
                || format!("it holds {} items from {offset} on, the job has {total}", outputs.len()),
            )?;
        let mut duplicates = 0;
        for (place, output) in places.iter_mut().zip(outputs) {
            if place.is_some() {
                duplicates += 1;
            } else {
                *place = Some(output);
                self.done += 1;
            }
        }
        Ok(Added { duplicates, complete: self.done == total })
    }

    /// One entry for every input.
    pub(crate) fn into_outputs(self) -> Vec<Option<Output>> {
        self.outputs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(offset: u32, items: u32, items_total: u32) -> ReplyHeaders {
        ReplyHeaders { offset, items, items_total, ..ReplyHeaders::default() }
    }

    fn outputs(names: &[&str]) -> Vec<Output> {
        names.iter().map(|name| Output::Uri((*name).to_owned())).collect()
    }

    fn added(duplicates: usize, complete: bool) -> Result<Added, String> {
        Ok(Added { duplicates, complete })
    }

    #[test]
    fn parts_come_in_any_order_and_overlap() {
        let mut assembly = Assembly::new(5);
        assert_eq!(assembly.add(&headers(3, 2, 5), outputs(&["d", "e"])), added(0, false));
        assert_eq!(assembly.add(&headers(3, 2, 5), outputs(&["x", "x"])), added(2, false));
        assert_eq!(assembly.add(&headers(0, 1, 5), outputs(&["a"])), added(0, false));
        assert_eq!(assembly.add(&headers(0, 4, 5), outputs(&["x", "b", "c", "x"])), added(2, true));
        let all = assembly.into_outputs().into_iter().map(Option::unwrap);
        assert_eq!(all.collect::<Vec<_>>(), outputs(&["a", "b", "c", "d", "e"]));
    }

    #[test]
    fn forged_headers_change_nothing() {
        let mut assembly = Assembly::new(2);
        for forged in [
            headers(2, 1, 2),
            headers(u32::MAX, 1, 2),
            headers(0, 1, 3),
            headers(0, 1, 0),
            headers(0, 2, 2),
            headers(0, u32::MAX, 2),
        ] {
            assert!(assembly.add(&forged, outputs(&["x"])).is_err(), "{forged:?}");
        }
        assert!(assembly.add(&headers(1, 2, 2), outputs(&["x", "x"])).is_err());
        assert_eq!(assembly.done(), 0);
        assert_eq!(assembly.into_outputs(), [None, None]);
    }

    #[test]
    fn reports_are_believed_on_items_that_are_still_to_come() {
        let mut assembly = Assembly::new(2);
        assembly.add(&headers(0, 1, 2), outputs(&["a"])).unwrap();
        let report = |item, fraction| ItemProgress { item, fraction, note: String::new() };
        assert!(assembly.expects(&report(1, 0.5)) && assembly.expects(&report(1, 1.0)));
        for forged in [report(0, 0.5), report(2, 0.5), report(1, 1.5), report(1, f64::NAN)] {
            assert!(!assembly.expects(&forged), "{forged:?}");
        }
    }

    #[test]
    fn an_empty_part_completes_nothing() {
        let mut assembly = Assembly::new(1);
        assert_eq!(assembly.add(&headers(1, 0, 1), Vec::new()), added(0, false));
    }
}
