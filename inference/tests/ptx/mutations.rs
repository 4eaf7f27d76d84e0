//! Shows that the interpreter finds faults: shipped kernels with one change each, and small kernels with faults of other kinds. A
//! check that does not fail on these would prove nothing about the real kernels.

use super::attention::{self, Shape as Attention};
use super::fault::Fault;
use super::harness::{Text, on_texts, unpack};
use super::linear::{self, Shape as Linear, Wrong};
use super::memory::{Access, Space};
use super::rows::Pooling;
use super::{grid, norms, parse, rows};

/// A kernel of a text, to be changed.
struct Source {
    file: &'static str,
    /// What stands before all kernels.
    head: String,
    lines: Vec<String>,
}

impl Source {
    fn of(file: &'static str, kernel: &str) -> Self {
        let text = unpack(file);
        let (head, _) = text.split_once(".visible .entry ").unwrap();
        let element = file.split('-').next().unwrap();
        let start = text.find(&format!(".visible .entry {kernel}_{element}(")).unwrap();
        let end = start + text[start..].find("\n}").unwrap() + 2;
        Self { file, head: head.to_owned(), lines: text[start..end].lines().map(str::to_owned).collect() }
    }

    fn count(&self, instruction: &str) -> usize {
        self.lines.iter().filter(|line| line.trim().starts_with(instruction)).count()
    }

    /// The text in which `edit` has changed the `number`-th line with this instruction.
    fn with(&self, instruction: &str, number: usize, edit: impl Fn(&str) -> String) -> Text {
        let places = self.lines.iter().enumerate().filter(|(_, line)| line.trim().starts_with(instruction));
        let (at, line) = places.skip(number).map(|(at, line)| (at, line.clone())).next().unwrap();
        let mut lines = self.lines.clone();
        lines[at] = edit(&line);
        assert_ne!(lines[at], line, "nothing is changed");
        Text::changed(self.file, format!("{}{}\n", self.head, lines.join("\n"))).unwrap()
    }

    fn without(&self, instruction: &str, number: usize) -> Text {
        self.with(instruction, number, |_| String::new())
    }
}

/// The fault that a check found.
fn fault(result: Result<(), Wrong>) -> Fault {
    match result {
        Err(Wrong::Act(report)) => report.fault,
        other => panic!("no fault: {other:?}"),
    }
}

fn is_off(result: &Result<(), Wrong>) -> bool {
    matches!(result, Err(Wrong::Numbers(_)))
}

/// More steps than stages, the last one in the stage where the result is put together; and edges on all sides.
const SMALL: Linear = Linear { rows: 70, inner: 160, columns: 72 };
const LARGE: Linear = Linear { rows: 140, inner: 160, columns: 136 };

fn run_linear(text: &Text) -> Result<(), Wrong> {
    linear::check(text, linear::small(text.element), SMALL, false, true)
}

/// Two tiles of keys that need no masks, and one that does.
fn run_attention(text: &Text) -> Result<(), Wrong> {
    attention::check(text, &Attention::plain(&[150, 3], 1, 32))
}

/// One tile of keys.
fn run_short_attention(text: &Text) -> Result<(), Wrong> {
    attention::check(text, &Attention::plain(&[60], 1, 32))
}

/// Runs a kernel at sizes at which each of its barriers counts.
fn run(kernel: &str, text: &Text) -> Result<(), Wrong> {
    match kernel {
        "linear_small" => run_linear(text),
        "linear_small_gelu" => linear::check(text, linear::small(text.element), SMALL, true, true),
        "linear_large" => linear::check(text, linear::LARGE, LARGE, false, true),
        "linear_large_gelu" => linear::check(text, linear::LARGE, LARGE, true, true),
        "attention_32" => run_attention(text),
        "embed" => norms::embed(text, 384, false).map_err(Wrong::Act),
        "add_norm" => norms::add_norm(text, 1, 384, false, "x").map(drop).map_err(Wrong::Act),
        // Two stripes of columns, so that the second one's parts come where the first one's were.
        "pool" => rows::pool(text, &[20], 384, Pooling::Mean, true).map(drop).map_err(Wrong::Act),
        _ => {
            let head = kernel.strip_prefix("attention_").and_then(|head| head.parse().ok());
            let head = head.unwrap_or_else(|| panic!("{kernel} has barriers, and no run here"));
            attention::check(text, &Attention::plain(&[150, 3], 1, head))
        }
    }
}

/// Of every kernel in turn.
fn no_barrier_can_go(text: &Text) {
    let mut seen = 0;
    for kernel in &text.kernels {
        let (name, _) = kernel.name.rsplit_once('_').unwrap();
        let source = Source::of(text.file, name);
        for number in 0..source.count("bar.sync") {
            let result = run(name, &source.without("bar.sync", number));
            let is_of_order = matches!(&result, Err(Wrong::Act(report)) if matches!(
                report.fault,
                Fault::Race { .. } | Fault::Unwritten { .. } | Fault::CopyUnderWay { .. }
            ));
            assert!(is_of_order, "{name} of {} without barrier {number}: {result:?}", text.file);
            seen += 1;
        }
    }
    assert_eq!(seen, text.text.matches("bar.sync").count(), "barriers of {}", text.file);
}
on_texts!(no_barrier_can_go);

#[test]
fn without_a_warps_barrier_attention_is_a_race() {
    for file in ["f16-80", "f32-75"] {
        let source = Source::of(file, "attention_32");
        let barriers = source.count("bar.warp.sync");
        assert!(barriers > 0);
        for number in 0..barriers {
            let text = source.without("bar.warp.sync", number);
            assert!(
                matches!(fault(run_short_attention(&text)), Fault::Race { .. }),
                "{file}: barrier {number}"
            );
        }
    }
}

#[test]
fn copies_that_are_not_waited_for_are_seen() {
    let linear = Source::of("f16-80", "linear_small").without("cp.async.wait_group", 0);
    assert!(matches!(fault(run_linear(&linear)), Fault::CopyUnderWay { .. }));
    let attention = Source::of("f16-80", "attention_32");
    for number in 0..attention.count("cp.async.wait_group") {
        let fault = fault(run_attention(&attention.without("cp.async.wait_group", number)));
        assert!(matches!(fault, Fault::CopyUnderWay { .. }), "wait {number}: {fault:?}");
    }
    // Leaves one group too many under way.
    let more = |line: &str| line.replace('2', "3");
    let late = Source::of("f16-80", "linear_small").with("cp.async.wait_group", 0, more);
    assert!(matches!(fault(run_linear(&late)), Fault::CopyUnderWay { .. }));
}

#[test]
fn fragments_in_other_places_are_other_numbers() {
    let swap = |line: &str| {
        // The registers of `a` follow those of the sum.
        let at = line.match_indices('{').nth(1).unwrap().0 + 1;
        let end = at + line[at..].find('}').unwrap();
        let mut registers: Vec<&str> = line[at..end].split(", ").collect();
        registers.swap(0, 1);
        format!("{}{}{}", &line[..at], registers.join(", "), &line[end..])
    };
    for file in ["f16-80", "f16-75", "bf16-80"] {
        let rows = Source::of(file, "linear_small").with("mma.sync", 0, swap);
        assert!(is_off(&run_linear(&rows)), "{file}");
    }
    let untransposed = |line: &str| line.replace(".trans", "");
    let turned =
        Source::of("f16-80", "attention_32").with("ldmatrix.sync.aligned.m8n8.x4.trans", 0, untransposed);
    assert!(is_off(&run_attention(&turned)));
}

#[test]
fn a_shuffle_from_another_lane_is_another_number() {
    let up = |line: &str| line.replace(".bfly", ".up");
    let source = Source::of("f16-80", "attention_32");
    for number in 0..source.count("shfl.sync") {
        assert!(is_off(&run_attention(&source.with("shfl.sync", number, up))), "shuffle {number}");
    }
}

#[test]
fn places_outside_of_arrays_and_odd_ones_are_seen() {
    // `chunk > chunks` instead of `chunk >= chunks`: the first thread behind the end goes on.
    let beyond =
        Source::of("f16-80", "bias_gelu").with("setp.ge.u32", 0, |line| line.replace(".ge.", ".gt."));
    let report = rows::bias_gelu(&beyond, 1, 8).unwrap_err();
    assert!(matches!(report.fault, Fault::OutOfBounds { space: "global", .. }), "{report}");
    let aside = |by: &'static str| move |line: &str| line.replace("];", &format!("{by}];"));
    let odd = Source::of("f16-80", "linear_small").with("ldmatrix", 0, aside("+2"));
    assert!(matches!(fault(run_linear(&odd)), Fault::Misaligned { .. }));
    let far = Source::of("f16-80", "linear_small").with("ldmatrix", 0, aside("+32768"));
    assert!(matches!(fault(run_linear(&far)), Fault::OutOfBounds { space: "shared", .. }));
}

#[test]
fn a_sum_without_a_first_value_is_found() {
    let source = Source::of("f16-80", "linear_small");
    let zero =
        source.lines.iter().find(|line| line.contains("mov.f32") && line.contains("0f00000000")).unwrap();
    let text = source.without(zero.trim(), 0);
    assert!(matches!(fault(run_linear(&text)), Fault::UnwrittenRegister { .. }));
}

/// Runs a body of one block of so many threads, with an array of 64 bytes to write at `%rd1`, and one in shared memory.
fn run_body(threads: u32, body: &str) -> Result<(), Fault> {
    let text = format!(
        ".version 7.4\n.target sm_80\n.address_size 64\n.visible .entry k(\n.param .u64 k_0\n)\n{{\n\
         .reg .pred %p<9>;\n.reg .b32 %r<9>;\n.reg .b64 %rd<9>;\n.shared .align 16 .b8 s[1024];\n\
         ld.param.u64 %rd1, [k_0];\nmov.u32 %r1, %tid.x;\n{body}\n$end:\nret;\n}}\n"
    );
    let kernels = parse::module(&text).unwrap();
    let mut global = Space::global();
    let address = global.add("to", vec![0; 64], Access::ReadWrite);
    grid::run(&kernels[0], (1, 1), threads, &[address], &mut global).map_err(|report| report.fault)
}

#[test]
fn an_operation_of_a_warp_needs_all_its_threads() {
    let half = "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra $end;\n";
    let shuffle = "shfl.sync.bfly.b32 %r2|%p2, %r1, 1, 31, -1;";
    assert_eq!(run_body(32, shuffle), Ok(()));
    let halved = run_body(32, &format!("{half}{shuffle}"));
    assert_eq!(halved, Err(Fault::WarpStuck { lanes: 0xffff_0000 }));
    // Half of the warp shuffles among itself, and takes from the other half.
    let own = "shfl.sync.bfly.b32 %r2|%p2, %r1, 1, 31, 0xffff0000;";
    assert_eq!(run_body(32, &format!("{half}{own}")), Ok(()));
    let from_others = "shfl.sync.bfly.b32 %r2|%p2, %r1, 16, 31, 0xffff0000;";
    assert_eq!(run_body(32, &format!("{half}{from_others}")), Err(Fault::Undefined));
    assert_eq!(run_body(32, &format!("{half}bar.sync 0;")), Err(Fault::Diverged { lanes: 0xffff_0000 }));
    // Threads that branch around a part of the code meet the others behind it.
    let around = "setp.lt.u32 %p1, %r1, 7;\n@%p1 bra $behind;\nadd.s32 %r1, %r1, 1;\n$behind:\nbar.sync 0;";
    assert_eq!(run_body(64, around), Ok(()));
}

#[test]
fn an_operation_of_a_block_needs_all_its_threads() {
    let one_warp = "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra $end;\nbar.sync 0;";
    assert_eq!(run_body(64, one_warp), Err(Fault::BarrierUnreached));
    let mut same = String::from("st.global.u32 [%rd1], %r1;");
    assert!(matches!(run_body(32, &same), Err(Fault::Race { .. })));
    same.insert_str(0, "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra $end;\n");
    assert_eq!(run_body(32, &same), Ok(()));
}

#[test]
fn copies_loops_and_divisions_without_end_are_seen() {
    let copy = "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra $end;\nmov.u32 %r2, s;\ncp.async.cg.shared.global [%r2], [%rd1], 16;";
    assert_eq!(run_body(32, copy), Err(Fault::CopyAtEnd));
    let own = format!("{copy}\nld.shared.u32 %r3, [%r2];");
    assert!(matches!(run_body(32, &own), Err(Fault::CopyUnderWay { .. })));
    let waited = format!("{copy}\ncp.async.commit_group;\ncp.async.wait_group 0;\nld.shared.u32 %r3, [%r2];");
    assert_eq!(run_body(32, &waited), Ok(()));
    // Zeros are copied without reading, so even the source may be unreadable.
    let zeros = |bytes: u32| {
        let body = waited.replace("[%rd1], 16;", "[%rd2], 16, %r4;");
        run_body(32, &format!("mov.u64 %rd2, 16;\nmov.u32 %r4, {bytes};\n{body}"))
    };
    assert_eq!(zeros(0), Ok(()));
    assert!(matches!(zeros(16), Err(Fault::OutOfBounds { space: "global", .. })));
    assert_eq!(zeros(17), Err(Fault::Undefined));
    assert!(matches!(run_body(32, "$again:\nbra.uni $again;"), Err(Fault::Endless { .. })));
    assert_eq!(run_body(32, "div.u32 %r2, %r1, %r1;"), Err(Fault::Undefined));
    assert!(matches!(run_body(32, "ld.shared.u32 %r2, [s];"), Err(Fault::Unwritten { .. })));
    assert!(matches!(run_body(32, "add.s32 %r2, %r3, 1;"), Err(Fault::UnwrittenRegister { .. })));
}
