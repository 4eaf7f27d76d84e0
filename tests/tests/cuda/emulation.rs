//! The emulation of a GPU fails kernels that a GPU would not run correctly: each has one mistake.

use std::process::Command;

use anyhow::{Result, ensure};
use vramq_tests::fake_cuda::mistakes;
use vramq_tests::setup::Failed;

/// Mistakes of tests/fake_cuda/emulation/mistakes.cpp, and what is said of them. The first of two blocks has them.
const MISTAKES: [(&str, &str); 13] = [
    ("no_barrier", "read, while thread 0 writes it"),
    ("read_while_written", "written, while thread 32 reads it"),
    ("no_syncwarp", "read, while thread 30 writes it"),
    ("never_written", "read before it is written"),
    ("beyond_the_allocation", "in no allocation"),
    ("in_no_allocation", "in no allocation"),
    ("beyond_the_array", "in no array"),
    ("misaligned", "a misaligned access"),
    ("not_all_at_the_barrier", "ends while others wait for it"),
    ("not_all_lanes", "ends while others wait for it"),
    ("copy_not_waited_for", "read before it is written"),
    ("copy_left_behind", "ends with asynchronous copies under way"),
    ("copied_over_what_is_read", "read, while thread 60 writes it"),
];

/// A mistake that only the second block has.
const IN_SECOND: (u32, &str, &str) = (1, "written_by_another_block", "read before it is written");

#[test]
fn the_emulation_finds_mistakes_of_kernels() -> Result<(), Failed> {
    Ok(noticed()?)
}

fn noticed() -> Result<()> {
    let program = mistakes()?;
    let run = |kernel: &str| Command::new(&program).arg(kernel).output();
    let right = run("right")?;
    ensure!(right.status.success() && right.stderr.is_empty(), "{right:?}");
    let in_first = MISTAKES.map(|(kernel, words)| (0, kernel, words));
    for (block, kernel, words) in in_first.into_iter().chain([IN_SECOND]) {
        let output = run(kernel)?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1) && text.contains(words), "{kernel}: {text}");
        ensure!(text.contains(&format!("emulation: {kernel}, block ({block}, 0, 0)")), "{kernel}: {text}");
    }
    Ok(())
}
