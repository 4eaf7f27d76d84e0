"""Puts mutants into copies of source files, each behind a switch: for scripts/mutants."""

from dataclasses import dataclass, field
from pathlib import Path

# The environment variable with the number of the mutant that is switched on.
SWITCH = "VRAMQ_MUTANT"
# The environment variable with the file that gets a line for each mutant that a thread reaches: its number, and the thread's name.
RECORD = "VRAMQ_MUTANTS_REACHED"

SWITCH_MODULE = f"""//! Which mutant is switched on. In a run that records, which ones are reached, and by which test.
use std::cell::RefCell;
use std::collections::HashSet;
use std::io::Write;
use std::sync::LazyLock;

const RECORDS: u32 = u32::MAX;

pub(crate) fn is(number: u32) -> bool {{
    static ACTIVE: LazyLock<u32> = LazyLock::new(|| {{
        if std::env::var_os("{RECORD}").is_some() {{
            return RECORDS;
        }}
        std::env::var("{SWITCH}").ok().and_then(|number| number.parse().ok()).unwrap_or(0)
    }});
    *ACTIVE == number || (*ACTIVE == RECORDS && reached(number))
}}

#[cold]
fn reached(number: u32) -> bool {{
    thread_local!(static REACHED: RefCell<HashSet<u32>> = RefCell::default());
    let is_new = REACHED.try_with(|reached| reached.borrow_mut().insert(number)).unwrap_or(true);
    if is_new {{
        let thread = std::thread::current();
        let path = std::env::var_os("{RECORD}").unwrap();
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
        file.write_all(format!("{{number}} {{}}\\n", thread.name().unwrap_or("")).as_bytes()).unwrap();
    }}
    false
}}
"""

# Which of two sites with the same range is the outer one.
RANKS = {"FnValue": 0, "MatchArm": 1, "MatchArmGuard": 2, "BinaryOperator": 3, "UnaryOperator": 4}


@dataclass
class Site:
    """A place with one or more mutants of the same kind."""

    start: int
    end: int
    genre: str
    # The operator or the guard in the place.
    inner: tuple[int, int]
    # Number and replacement of each mutant.
    mutants: list = field(default_factory=list)
    children: list = field(default_factory=list)


def site_of(mutant, root, offset):
    """Where a mutant is put, or nothing if it cannot be switched."""
    start, end = offset(mutant["span"]["start"]), offset(mutant["span"]["end"])
    genre = mutant["genre"]
    if genre == "FnValue":
        # A function that returns `impl Iterator` returns one type.
        is_iterator = "::std::iter::" in mutant["replacement"]
        return None if is_iterator else Site(start, end, genre, (start, end))
    if genre == "MatchArm":
        # Its end may be that of the comma behind it.
        end = start + 1
    node = root.descendant_for_byte_range(start, end)
    if genre == "MatchArmGuard":
        return None if has_let(node) else Site(start, end, genre, (start, end))
    if genre == "MatchArm":
        arm = enclosing(node, {"match_arm"})
        pattern = arm and arm.child_by_field_name("pattern")
        guard = pattern and pattern.child_by_field_name("condition")
        if pattern is None or (guard is not None and has_let(guard)):
            return None
        inner = (guard.start_byte, guard.end_byte) if guard else (pattern.end_byte, pattern.end_byte)
        return Site(pattern.start_byte, pattern.end_byte, genre, inner)
    if genre in ("BinaryOperator", "UnaryOperator"):
        kinds = {"binary_expression", "compound_assignment_expr", "unary_expression", "let_chain"}
        whole = enclosing(node, kinds)
        if whole is None or whole.type == "let_chain" or has_let(whole):
            return None
        return Site(whole.start_byte, whole.end_byte, genre, (start, end))
    return None


def enclosing(node, kinds):
    while node is not None and node.type not in kinds:
        node = node.parent
    return node


def has_let(node):
    return node.type in ("let_condition", "let_chain") or any(has_let(child) for child in node.children)


class File:
    """A source file with the mutants that are put into its copy."""

    def __init__(self, source, target, parser):
        self.target = target
        self.source = source.read_bytes()
        self.root = parser.parse(self.source).root_node
        self.mutants = {}
        lines = self.source.decode().split("\n")
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line.encode()) + 1)
        self.lines = lines

    def offset(self, place):
        line, column = place["line"] - 1, place["column"] - 1
        return self.starts[line] + len(self.lines[line][:column].encode())

    def add(self, number, mutant):
        """Whether it can be switched."""
        site = site_of(mutant, self.root, self.offset)
        if site is not None:
            self.mutants[number] = (site, mutant["replacement"])
        return site is not None

    def write(self):
        sites = {}
        for number, (site, replacement) in sorted(self.mutants.items()):
            key = (site.start, site.end, site.genre, site.inner)
            place = sites.setdefault(key, Site(site.start, site.end, site.genre, site.inner))
            place.mutants.append((number, replacement))
        top, stack = [], []
        for site in sorted(sites.values(), key=lambda site: (site.start, -site.end, RANKS[site.genre])):
            while stack and stack[-1].end < site.end or stack and stack[-1].end <= site.start:
                stack.pop()
            (stack[-1].children if stack else top).append(site)
            stack.append(site)
        self.target.write_text(self.piece(0, len(self.source), top))

    def piece(self, start, end, sites):
        """The source between two places, with the sites in it."""
        text, at = [], start
        for site in sites:
            if start <= site.start and site.end <= end:
                text += [self.source[at : site.start].decode(), self.render(site)]
                at = site.end
        return "".join(text) + self.source[at:end].decode()

    def render(self, site):
        between = lambda start, end: self.piece(start, end, site.children)
        whole, (start, end) = between(site.start, site.end), site.inner
        switch = lambda number: f"crate::mutant_switch::is({number})"
        mark = lambda number: f"/*mutant {number}*/"
        if site.genre == "FnValue":
            early = (f"if {switch(n)} {{ return {value}; {mark(n)} }}\n" for n, value in site.mutants)
            return "".join(early) + whole
        if site.genre == "MatchArm":
            number = site.mutants[0][0]
            guard = f"!{switch(number)} {mark(number)}"
            if start == end:
                return f"{whole} if {guard}"
            return f"{between(site.start, start)}{guard} && ({between(start, end)})"
        if site.genre == "MatchArmGuard":
            always = "".join(f"{switch(n)} {mark(n)} || " for n, value in site.mutants if value == "true")
            never = "".join(f"!{switch(n)} {mark(n)} && " for n, value in site.mutants if value == "false")
            return f"({always}({never}({whole})))"
        before, after = between(site.start, start), between(end, site.end)
        instead = lambda value: flat(f"{before}{value}{after}")
        chain = (f"if {switch(n)} {{ {instead(value)} {mark(n)} }}\nelse " for n, value in site.mutants)
        return f"({''.join(chain)}{{ {whole} }})"


def flat(text):
    """On one line, so that the compiler's errors tell which mutant they are of."""
    return text if "//" in text else " ".join(text.split("\n"))
