//! The emulation of a GPU fails kernels that a GPU would not run correctly: each has one mistake.

use std::process::Command;

use anyhow::{Result, ensure};
use vramq_tests::fake_cuda::mistakes;
use vramq_tests::setup::Failed;

/// Mistakes of tests/fake_cuda/emulation/mistakes.cpp, and what is said of them.
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

#[test]
fn the_emulation_finds_mistakes_of_kernels() -> Result<(), Failed> {
    Ok(noticed()?)
}

fn noticed() -> Result<()> {
    let program = mistakes()?;
    let run = |kernel: &str| Command::new(&program).arg(kernel).output();
    let right = run("right")?;
    ensure!(right.status.success() && right.stderr.is_empty(), "{right:?}");
    for (kernel, words) in MISTAKES {
        let output = run(kernel)?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1) && text.contains(words), "{kernel}: {text}");
        ensure!(text.contains(&format!("emulation: {kernel}, block (0, 0, 0)")), "{kernel}: {text}");
    }
    Ok(())
}
