//! The table `[files]`: where uploads are kept, how many bytes they may have, and for how long.

use std::time::Duration;

use super::table::Values;
use super::{FILES_MIB_MAX, MIB, place, seconds, share_of_key};
use crate::storage::Place;

/// MiB of one upload.
const FILE_MIB_MAX: u32 = 512;

const FILES_S: u32 = 24 * 3600;

/// The place of uploads, with their limits of size and time.
#[derive(Clone, Debug)]
pub struct Files {
    pub place: Place,
    pub file_bytes: u64,
    pub total_bytes: u64,
    /// Bytes of all uploads of one caller.
    pub owner_bytes: u64,
    pub keep: Duration,
}

/// Reads `[files]`. `None`: no uploads.
pub(super) fn files(values: &mut Values, results: Option<&Place>, has_keys: bool) -> Option<Files> {
    let place = place::apart(values, &place::FILES, results);
    let file_mib = values.number("files.file_mib_max", FILE_MIB_MAX, 1);
    let files_mib = values.number("files.mib_max", FILES_MIB_MAX, 1);
    let share_mib = share_of_key(files_mib, has_keys).max(file_mib);
    let owner_mib = values.number("files.mib_max_per_key", share_mib, 1);
    if owner_mib < file_mib {
        let what = format!("is {owner_mib}, less than a single file of files.file_mib_max");
        values.fault("files.mib_max_per_key", what);
    }
    let keep = seconds(values.number("files.keep_s", FILES_S, 1));
    let bytes = |mib: u32| u64::from(mib) * MIB as u64;
    let (file_bytes, total_bytes, owner_bytes) = (bytes(file_mib), bytes(files_mib), bytes(owner_mib));
    Some(Files { place: place?, file_bytes, total_bytes, owner_bytes, keep })
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    fn files(text: &str) -> Files {
        Config::read(text, Vec::new()).unwrap().files.unwrap()
    }

    #[test]
    fn a_key_has_a_quarter_of_the_place_unless_the_file_says_otherwise() {
        for (text, owner_mib) in [
            ("[files]\nfolder = 'f'\nmib_max = 4096", 4096),
            ("[http]\nkeys = 'k'\n[files]\nfolder = 'f'\nmib_max = 4096", 1024),
            ("[http]\nkeys = 'k'\n[files]\nfolder = 'f'\nmib_max = 1024", 512),
            ("[http]\nkeys = 'k'\n[files]\nfolder = 'f'\nmib_max_per_key = 600", 600),
        ] {
            assert_eq!(files(text).owner_bytes, owner_mib * MIB as u64, "{text}");
        }
        // Without a limit for one caller, one is derived.
        assert!(Config::read("[files]\nfolder = 'f'\nmib_max = 1", Vec::new()).is_ok());
        let small = "[files]\nfolder = 'f'\nfile_mib_max = 3\nmib_max_per_key = 2";
        let faults = Config::read(small, Vec::new()).unwrap_err().0;
        assert_eq!(faults.len(), 1);
        assert_eq!(faults[0].key, "files.mib_max_per_key");
    }
}
