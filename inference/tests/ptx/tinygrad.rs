//! The maps of fragments against those of tinygrad, a third party that emulates the same instructions.

use std::path::Path;
use std::process::Command;

use super::assembler::tools;
use super::fragments;

#[test]
#[ignore = "needs tinygrad: scripts/setup cuda-tools"]
fn fragments_are_those_of_tinygrad() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ptx/tinygrad_fragments.py");
    let source = tools().join("tinygrad/ops_python.py");
    assert!(source.exists(), "{} is not there: run scripts/setup cuda-tools", source.display());
    let output = Command::new("python3").arg(script).arg(source).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut lines = 0;
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [inner, matrix, place @ ..] = &words[..] else { panic!("{line}") };
        let numbers: Vec<usize> = place.iter().map(|word| word.parse().unwrap()).collect();
        let [row, column, lane, element] = numbers[..] else { panic!("{line}") };
        let held = match *matrix {
            "a" => fragments::a(inner.parse().unwrap(), lane, element),
            "b" => fragments::b(lane, element),
            _ => fragments::sum(lane, element),
        };
        assert_eq!(held, (row, column), "{line}");
        lines += 1;
    }
    // Of both shapes: all of `a`, of `b` and of the sum.
    assert_eq!(lines, (256 + 128 + 128) + (128 + 64 + 128));
}
