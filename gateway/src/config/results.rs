//! The table `[results]`: how many bytes of results are kept, for how long, and where besides the gateway's memory.

use std::time::Duration;

use vramq_program::no_folder_to_write;

use super::table::Values;
use super::{FILES_MIB_MAX, MIB, place, seconds, share_of_key};
use crate::storage::Place;

/// Results kept for `GET /v1/jobs/{id}`: half an hour of 100 jobs a second with 1 KiB each is 180 MiB.
const RESULTS_MIB_MAX: u32 = 256;
const RESULTS_S: u32 = 1800;

/// What is kept of jobs that have ended.
#[derive(Clone, Debug)]
pub struct Results {
    pub bytes: usize,
    pub keep: Duration,
    /// `None`: results are kept in memory only.
    pub store: Option<ResultSettings>,
}

/// The place of results, with their limits of size and time.
#[derive(Clone, Debug)]
pub struct ResultSettings {
    pub place: Place,
    /// Bytes of the results of all gateways together, as this gateway counts them.
    pub bytes_max: u64,
    /// Bytes of the results of one caller.
    pub owner_bytes_max: u64,
    pub keep: Duration,
}

/// Reads `[results]`.
pub(super) fn results(values: &mut Values, has_keys: bool) -> Results {
    let memory_mib = values.number("results.mib_max", RESULTS_MIB_MAX, 1);
    let keep = seconds(values.number("results.keep_s", RESULTS_S, 1));
    let place = place::place(values, &place::RESULTS);
    if let Some(place) = &place {
        place::check_folder(values, &place::RESULTS, place, no_folder_to_write);
    }
    let all_mib = values.number("results.folder_mib_max", FILES_MIB_MAX, 1);
    let share_mib = share_of_key(all_mib, has_keys).max(1);
    let owner_mib = values.number("results.folder_mib_max_per_key", share_mib, 1);
    let bytes = |mib: u32| u64::from(mib) * MIB as u64;
    let (bytes_max, owner_bytes_max) = (bytes(all_mib), bytes(owner_mib));
    let store = place.map(|place| ResultSettings { place, bytes_max, owner_bytes_max, keep });
    Results { bytes: memory_mib as usize * MIB, keep, store }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::super::tests::KEYS;
    use super::*;

    #[test]
    fn a_key_has_a_quarter_of_the_store_unless_the_file_says_otherwise() {
        for (text, owner_mib) in [
            ("[results]\nfolder = 'r'\nfolder_mib_max = 4096", 4096),
            ("[http]\nkeys = 'KEYS'\n[results]\nfolder = 'r'\nfolder_mib_max = 4096", 1024),
            ("[http]\nkeys = 'KEYS'\n[results]\nfolder = 'r'\nfolder_mib_max = 3", 1),
            ("[http]\nkeys = 'KEYS'\n[results]\nfolder = 'r'\nfolder_mib_max_per_key = 600", 600),
        ] {
            let text = text.replace("KEYS", KEYS);
            let results = Config::read(&text, Vec::new()).unwrap().results;
            assert_eq!(results.store.unwrap().owner_bytes_max, owner_mib * MIB as u64, "{text}");
        }
    }
}
