//! Finds out whether a program was built with the patched crates of `third-party/`. A program that is built outside of the workspace gets
//! the published crates, from crates.io or from a distribution.

use std::fmt;

use lapin::types::parsing::parse_field_table;
use vramq_schemas::headers::UNREADABLE;

/// Depth of nested tables: deeper than the patched crate reads, and shallow enough for the stack of the published one.
const NESTED_TABLES: usize = 64;

/// What the published lapin allows: a header of one frame. The patched one has a constant of the same name.
#[allow(dead_code, reason = "used in a build without the patch")]
const HEADER_FRAME_FACTOR: usize = 1;

/// A crate that the program has without its patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingPatch {
    Lapin,
    AmqProtocolTypes,
}

impl fmt::Display for MissingPatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, consequence) = match self {
            Self::Lapin => (
                "lapin",
                "a message whose headers fill a frame ends the connection each time it is delivered",
            ),
            Self::AmqProtocolTypes => (
                "amq-protocol-types",
                "a message with headers that are not UTF-8 ends the connection, and one with deeply nested headers the process",
            ),
        };
        write!(f, "built without the patch of {name} in third-party/: {consequence}")
    }
}

/// The patches that this program lacks. Programs that read untrusted messages log them at their start.
pub fn missing_patches() -> Vec<MissingPatch> {
    let has_lapin = header_frame_factor() > 1;
    let has_types = reads_any_name() && limits_nesting();
    [(has_lapin, MissingPatch::Lapin), (has_types, MissingPatch::AmqProtocolTypes)]
        .into_iter()
        .filter_map(|(has_patch, patch)| (!has_patch).then_some(patch))
        .collect()
}

/// lapin's constant if it has one, else the one above: names in an inner scope come first.
fn header_frame_factor() -> usize {
    #[allow(unused_imports, reason = "of no use in a build without the patch")]
    use lapin::*;
    HEADER_FRAME_FACTOR
}

/// Whether the name of a header may be other bytes than UTF-8.
fn reads_any_name() -> bool {
    let entry = [1, 0xff, b't', 1];
    parse_field_table(&sized(&entry)[..]).is_ok()
}

/// Whether tables within tables are kept as bytes instead of being read to any depth.
fn limits_nesting() -> bool {
    let nested = (0..NESTED_TABLES).fold(sized(&[]), |inner, _| {
        let entry = [&[1, b'n', b'F'], &inner[..]].concat();
        sized(&entry)
    });
    parse_field_table(&nested[..]).is_ok_and(|(_, table)| table.inner().contains_key(UNREADABLE))
}

/// The entries of a table behind their length.
fn sized(entries: &[u8]) -> Vec<u8> {
    // A few hundred bytes.
    let length = u32::try_from(entries.len()).unwrap_or(u32::MAX);
    [&length.to_be_bytes()[..], entries].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `scripts/check-published` builds and runs this without the patches, where each of them has to be missing.
    #[test]
    fn each_missing_patch_is_found() {
        let is_published = std::env::var_os("VRAMQ_TEST_PUBLISHED").is_some();
        let expected: &[_] =
            if is_published { &[MissingPatch::Lapin, MissingPatch::AmqProtocolTypes] } else { &[] };
        assert_eq!(missing_patches(), expected);
    }

    /// The published crate has both faults independently, so each probe must find its own.
    #[test]
    fn each_probe_sees_its_own_fault() {
        let is_patched = std::env::var_os("VRAMQ_TEST_PUBLISHED").is_none();
        assert_eq!((reads_any_name(), limits_nesting()), (is_patched, is_patched));
    }
}
