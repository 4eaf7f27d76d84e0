//! The table `[files]`: where uploads are kept, how many bytes they may have, and for how long.

use std::path::{Path, PathBuf};
use std::time::Duration;

use vramq_program::no_folder_to_write;
use vramq_schemas::BODY_BYTES_MAX;

use super::table::Values;
use super::{FILES_MIB_MAX, MIB, place, seconds, share_of_key};
use crate::storage::Place;

/// MiB of one upload.
const FILE_MIB_MAX: u32 = 512;

/// One upload in the folder that the gateway has by default: a job takes its bytes along, and has no room for more.
const OWN_FILE_MIB_MAX: u32 = (BODY_BYTES_MAX / MIB) as u32;

/// All uploads in that folder: it is in somebody's home, and nobody has chosen it.
const OWN_FILES_MIB_MAX: u32 = 1024;

const FILES_S: u32 = 24 * 3600;

/// The folder that means that there are no uploads.
const OFF: &str = "off";

/// The place of uploads, with their limits of size and time.
#[derive(Clone, Debug)]
pub struct Files {
    pub place: Place,
    /// The place is the default, which workers do not have as a store. Without a home it is an empty path.
    pub is_own: bool,
    pub file_bytes: u64,
    pub total_bytes: u64,
    /// Bytes of all uploads of one caller.
    pub owner_bytes: u64,
    pub keep: Duration,
}

/// Reads `[files]`. `None`: no uploads.
pub(super) fn files(values: &mut Values, results: Option<&Place>, has_keys: bool) -> Option<Files> {
    let configured = place::apart(values, &place::FILES, results);
    let is_own = configured.is_none();
    if let Some(place) = configured.as_ref().filter(|place| !is_off(place)) {
        place::check_folder(values, &place::FILES, place, no_folder_to_write);
    }
    let place = match configured {
        Some(place) if is_off(&place) => None,
        Some(place) => Some(place),
        None => Some(Place::Folder(own_folder())),
    };
    // Without a home there is no folder, and so no uploads.
    if let Some(own @ Place::Folder(folder)) = place.as_ref().filter(|_| is_own)
        && !folder.as_os_str().is_empty()
    {
        place::check_apart(values, &place::FILES, own, results);
    }
    let (file_most, most) =
        if is_own { (OWN_FILE_MIB_MAX, OWN_FILES_MIB_MAX) } else { (FILE_MIB_MAX, FILES_MIB_MAX) };
    let file_mib = values.number("files.file_mib_max", file_most, 1);
    if is_own && file_mib > OWN_FILE_MIB_MAX {
        let what = format!(
            "is {file_mib}; without files.folder or files.url a job takes an upload along: {OWN_FILE_MIB_MAX} at most"
        );
        values.fault("files.file_mib_max", what);
    }
    let files_mib = values.number("files.mib_max", most, 1);
    let share_mib = share_of_key(files_mib, has_keys).max(file_mib);
    let owner_mib = values.number("files.mib_max_per_key", share_mib, 1);
    if owner_mib < file_mib {
        let what = format!("is {owner_mib}, less than a single file of files.file_mib_max");
        values.fault("files.mib_max_per_key", what);
    }
    let keep = seconds(values.number("files.keep_s", FILES_S, 1));
    let bytes = |mib: u32| u64::from(mib) * MIB as u64;
    let (file_bytes, total_bytes, owner_bytes) = (bytes(file_mib), bytes(files_mib), bytes(owner_mib));
    Some(Files { place: place?, is_own, file_bytes, total_bytes, owner_bytes, keep })
}

/// Whether the place means that there are no uploads.
fn is_off(place: &Place) -> bool {
    matches!(place, Place::Folder(folder) if folder == Path::new(OFF))
}

/// The default folder: the user's, for data that outlives a restart. All gateways of this user share it. Empty if
/// the environment has no absolute path to one.
fn own_folder() -> PathBuf {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let states = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
    states.map(|states| states.join("vramq/uploads")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::super::tests::KEYS;
    use super::*;

    fn files(text: &str) -> Files {
        Config::read(text, Vec::new()).unwrap().files.unwrap()
    }

    #[test]
    fn a_key_has_a_quarter_of_the_place_unless_the_file_says_otherwise() {
        for (text, owner_mib) in [
            ("[files]\nfolder = 'f'\nmib_max = 4096", 4096),
            ("[http]\nkeys = 'KEYS'\n[files]\nfolder = 'f'\nmib_max = 4096", 1024),
            ("[http]\nkeys = 'KEYS'\n[files]\nfolder = 'f'\nmib_max = 1024", 512),
            ("[http]\nkeys = 'KEYS'\n[files]\nfolder = 'f'\nmib_max_per_key = 600", 600),
        ] {
            let text = text.replace("KEYS", KEYS);
            assert_eq!(files(&text).owner_bytes, owner_mib * MIB as u64, "{text}");
        }
        // With no more than the bytes of a job in each file.
        assert!(files("").is_own && !files("[files]\nfolder = 'f'").is_own);
        assert_eq!((files("").file_bytes, files("").total_bytes), (16 * MIB as u64, 1024 * MIB as u64));
        assert!(Config::read("[files]\nfolder = 'off'", Vec::new()).unwrap().files.is_none());
        let large = |more: &str| Config::read(&format!("[files]\nfile_mib_max = 17\n{more}"), Vec::new());
        assert_eq!(large("").unwrap_err().0[0].key, "files.file_mib_max");
        assert!(large("folder = 'f'").is_ok() && large("folder = 'off'").is_ok());
        // Nobody has said what one caller may have.
        assert!(Config::read("[files]\nfolder = 'f'\nmib_max = 1", Vec::new()).is_ok());
        let small = "[files]\nfolder = 'f'\nfile_mib_max = 3\nmib_max_per_key = 2";
        let faults = Config::read(small, Vec::new()).unwrap_err().0;
        assert_eq!(faults.len(), 1);
        assert_eq!(faults[0].key, "files.mib_max_per_key");
    }

    #[test]
    fn results_are_kept_apart_from_the_default_folder() {
        let own = own_folder();
        let inside = own.join("results");
        let states = own.ancestors().nth(2).unwrap();
        for results in [&*own, &*inside, states] {
            let text = format!("[results]\nfolder = '{}'", results.display());
            let faults = Config::read(&text, Vec::new()).unwrap_err().0;
            assert_eq!((faults.len(), &*faults[0].key), (1, "files.folder"), "{text}");
            assert!(Config::read(&format!("{text}\n[files]\nfolder = 'off'"), Vec::new()).is_ok());
        }
    }
}
