//! Parses PTX into kernels. NVRTC writes one statement per line; a line that the parser does not understand is an error, never
//! skipped.
//!
//! Source: PTX ISA 8.8, chapters 4 to 6, and 9.7 for the forms of instructions.

use std::collections::HashMap;

use anyhow::{Context as _, Result, bail, ensure};

use super::arithmetic;
use super::code::{
    Address, Half, Instruction, Kernel, Operand, Operation, Register, SharedArray, Shuffle, Special,
    StateSpace,
};
use super::memory::Space;

/// All kernels of a text.
pub fn module(text: &str) -> Result<Vec<Kernel>> {
    let mut kernels = Vec::new();
    let mut shared = Vec::new();
    let mut now: Option<Draft> = None;
    for (i, line) in text.lines().enumerate() {
        let line = line.split("//").next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let number = i + 1;
        let read = match &mut now {
            None => outside(line, &mut shared).map(|name| now = name.map(|name| Draft::new(name, &shared))),
            Some(_) if line == "}" => now.take().map_or(Ok(()), |draft| {
                kernels.push(draft.finish()?);
                Ok(())
            }),
            Some(draft) => draft.line(line, number),
        };
        read.with_context(|| format!("line {number}: {line}"))?;
    }
    ensure!(now.is_none(), "the text ends within a kernel");
    Ok(kernels)
}

/// A line between kernels. The name of the kernel that it begins.
fn outside(line: &str, shared: &mut Vec<(String, usize)>) -> Result<Option<String>> {
    if let Some(name) = line.strip_prefix(".visible .entry ") {
        return Ok(Some(name.trim_end_matches('(').to_owned()));
    }
    if line.starts_with(".shared ") {
        shared.push(array(line)?);
        return Ok(None);
    }
    // Constants of the source, which the kernels have as numbers.
    let known = [".version ", ".target ", ".address_size 64", ".global "];
    ensure!(known.iter().any(|start| line.starts_with(start)), "not understood");
    Ok(None)
}

/// Name and bytes of `.shared .align 128 .b8 NAME[BYTES];`.
fn array(line: &str) -> Result<(String, usize)> {
    let (name, bytes) = line.trim_end_matches("];").split_once('[').context("an array has a size")?;
    let words: Vec<&str> = name.split_whitespace().collect();
    let [".shared", ".align", align, ".b8", name] = words[..] else { bail!("an array of another form") };
    ensure!(align.parse::<u64>()? <= 256, "aligned to more than the interpreter gives");
    Ok((name.to_owned(), bytes.parse()?))
}

/// A kernel that is being read.
struct Draft {
    name: String,
    parameters: Vec<(String, usize)>,
    threads_max: u32,
    /// Arrays of the module and of this kernel.
    known: HashMap<String, SharedArray>,
    addresses: Space,
    shared: Vec<SharedArray>,
    /// Of each prefix: the first register, how many, and how many bits.
    registers: HashMap<String, (usize, usize, u32)>,
    count: usize,
    code: Vec<Instruction>,
    labels: HashMap<String, usize>,
    /// Branches to labels that are resolved at the end.
    branches: Vec<(usize, String)>,
}

impl Draft {
    fn new(name: String, shared: &[(String, usize)]) -> Self {
        let mut draft = Self {
            name,
            parameters: Vec::new(),
            threads_max: 1024,
            known: HashMap::new(),
            addresses: Space::shared(),
            shared: Vec::new(),
            registers: HashMap::new(),
            count: 0,
            code: Vec::new(),
            labels: HashMap::new(),
            branches: Vec::new(),
        };
        for (name, bytes) in shared {
            draft.add_array(name.clone(), *bytes);
        }
        draft
    }

    fn add_array(&mut self, name: String, bytes: usize) {
        let address = self.addresses.add(&name, vec![0; bytes], super::memory::Access::Write);
        self.known.insert(name.clone(), SharedArray { name, bytes, address });
    }

    fn line(&mut self, line: &str, number: usize) -> Result<()> {
        if let Some(parameter) = line.strip_prefix(".param ") {
            let (kind, name) =
                parameter.trim_end_matches(',').split_once(' ').context("a parameter has a name")?;
            self.parameters.push((name.to_owned(), bytes_of(kind.trim_start_matches('.'))?));
        } else if let Some(threads) = line.strip_prefix(".maxntid ") {
            ensure!(threads.ends_with(", 1, 1"), "a block of several dimensions");
            self.threads_max = threads.trim_end_matches(", 1, 1").parse()?;
        } else if let Some(registers) = line.strip_prefix(".reg ") {
            self.declare(registers.trim_end_matches(';'))?;
        } else if line.starts_with(".shared ") {
            let (name, bytes) = array(line)?;
            self.add_array(name, bytes);
        } else if let Some(label) = line.strip_suffix(':') {
            self.labels.insert(label.to_owned(), self.code.len());
        } else if !(matches!(line, ")" | "{")
            || line.starts_with(".minnctapersm ")
            || line.starts_with(".pragma "))
        {
            let statement = line.strip_suffix(';').context("not understood")?;
            self.statement(statement, number)?;
        }
        Ok(())
    }

    /// `.b32 %r<57>`.
    fn declare(&mut self, line: &str) -> Result<()> {
        let (kind, name) = line.split_once(char::is_whitespace).context("registers have a name")?;
        let bits = match kind {
            ".pred" => 1,
            kind => bytes_of(kind.trim_start_matches('.'))? as u32 * 8,
        };
        let (prefix, count) =
            name.trim().trim_end_matches('>').split_once('<').context("registers have a number")?;
        let count = count.parse()?;
        self.registers.insert(prefix.to_owned(), (self.count, count, bits));
        self.count += count;
        Ok(())
    }

    fn statement(&mut self, statement: &str, line: usize) -> Result<()> {
        let (guard, rest) = match statement.strip_prefix('@') {
            None => (None, statement),
            Some(guarded) => {
                let (predicate, rest) =
                    guarded.split_once(char::is_whitespace).context("a guard without instruction")?;
                let negated = predicate.starts_with('!');
                (Some((self.register(predicate.trim_start_matches('!'))?, !negated)), rest)
            }
        };
        let (name, operands) = rest.trim().split_once(char::is_whitespace).unwrap_or((rest.trim(), ""));
        let operands = split(operands);
        let operation = self.operation(name, &operands)?;
        self.code.push(Instruction { guard, operation, line, text: statement.to_owned() });
        Ok(())
    }

    fn operation(&mut self, name: &str, operands: &[&str]) -> Result<Operation> {
        let parts: Vec<&str> = name.split('.').collect();
        match (&parts[..], operands) {
            (["ret"], []) => Ok(Operation::Return),
            (["bra"] | ["bra", "uni"], [label]) => {
                self.branches.push((self.code.len(), (*label).to_owned()));
                Ok(Operation::Branch { to: usize::MAX })
            }
            (["bar", "sync"], ["0"]) => Ok(Operation::Barrier),
            (["bar", "warp", "sync"], [members]) => {
                Ok(Operation::WarpBarrier { members: self.operand(members)? })
            }
            (["ld", "param", _], [to, from]) => {
                let wanted = from.trim_matches(['[', ']']);
                let number = self
                    .parameters
                    .iter()
                    .position(|(name, _)| name == wanted)
                    .context("no such parameter")?;
                ensure!(bytes_of(parts[2])? == self.parameters[number].1, "a part of a parameter");
                Ok(Operation::Parameter { to: self.register(to)?, number })
            }
            (["ld", space, rest @ ..], [to, from]) => {
                let rest = rest.strip_prefix(&["nc"]).unwrap_or(rest);
                let (count, kind) = vector(rest)?;
                let to: Vec<Register> =
                    list(to).into_iter().map(|to| self.register(to)).collect::<Result<_>>()?;
                ensure!(to.len() == count, "{count} numbers into {} registers", to.len());
                let address = self.address(from)?;
                let (space, bytes) = (state_space(space)?, bytes_of(kind)?);
                Ok(Operation::Load { space, to, bytes, signed: kind.starts_with('s'), address })
            }
            (["st", space, rest @ ..], [to, from]) => {
                let (count, kind) = vector(rest)?;
                let from: Vec<Operand> =
                    list(from).into_iter().map(|from| self.operand(from)).collect::<Result<_>>()?;
                ensure!(from.len() == count, "{count} numbers from {} registers", from.len());
                Ok(Operation::Store {
                    space: state_space(space)?,
                    from,
                    bytes: bytes_of(kind)?,
                    address: self.address(to)?,
                })
            }
            (["mov", kind], [to, from]) if to.starts_with('{') || from.starts_with('{') => {
                self.vector_move(kind, to, from)
            }
            (["mov", _], [to, from]) if special(from).is_some() => {
                let which = special(from).context("checked")?;
                Ok(Operation::Special { to: self.register(to)?, which })
            }
            (["cp" | "ldmatrix" | "mma" | "shfl", ..], _) => self.warp_operation(name, operands),
            _ => self.compute(name, operands),
        }
    }

    /// What several lanes do together, and copies.
    fn warp_operation(&mut self, name: &str, operands: &[&str]) -> Result<Operation> {
        match (name, operands) {
            ("cp.async.cg.shared.global" | "cp.async.ca.shared.global", [to, from, "16", read @ ..]) => {
                let read = match read {
                    [] => Operand::Number(16),
                    [read] => self.operand(read)?,
                    _ => bail!("too many operands"),
                };
                Ok(Operation::Copy { to: self.address(to)?, from: self.address(from)?, read })
            }
            ("cp.async.commit_group", []) => Ok(Operation::CommitCopies),
            ("cp.async.wait_group", [left]) => Ok(Operation::WaitForCopies { left: left.parse()? }),
            (
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
                | "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
                | "ldmatrix.sync.aligned.m8n8.x2.shared.b16"
                | "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16",
                [to, from],
            ) => {
                let to: Vec<Register> =
                    list(to).into_iter().map(|to| self.register(to)).collect::<Result<_>>()?;
                let count = if name.contains(".x4.") { 4 } else { 2 };
                ensure!(to.len() == count, "{} registers", to.len());
                let transposed = name.contains(".trans.");
                Ok(Operation::LoadMatrices { to, address: self.address(from)?, transposed })
            }
            (_, [to, a, b, sum]) if name.starts_with("mma.") => {
                let (inner, kind) = match name {
                    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" => (16, Half::F16),
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" => (16, Half::Bf16),
                    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32" => (8, Half::F16),
                    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32" => (8, Half::Bf16),
                    _ => bail!("an unknown shape or type"),
                };
                let to: Vec<Register> =
                    list(to).into_iter().map(|to| self.register(to)).collect::<Result<_>>()?;
                let [a, b, sum] = [a, b, sum].map(|from| {
                    list(from).into_iter().map(|from| self.operand(from)).collect::<Result<Vec<Operand>>>()
                });
                let (a, b, sum) = (a?, b?, sum?);
                ensure!(
                    [to.len(), a.len(), b.len(), sum.len()] == [4, inner / 4, inner / 8, 4],
                    "registers of fragments"
                );
                Ok(Operation::Multiply { inner, kind, to, a, b, sum })
            }
            (_, [to, value, lane, clamp, members])
                if name.starts_with("shfl.sync.") && name.ends_with(".b32") =>
            {
                let how = match name.split('.').nth(2) {
                    Some("bfly") => Shuffle::Butterfly,
                    Some("up") => Shuffle::Up,
                    Some("down") => Shuffle::Down,
                    Some("idx") => Shuffle::Index,
                    _ => bail!("an unknown shuffle"),
                };
                let (to, inside) = to.split_once('|').map_or((*to, None), |(to, inside)| (to, Some(inside)));
                let [value, lane, clamp, members] =
                    [value, lane, clamp, members].map(|from| self.operand(from));
                let (value, lane, clamp, members) = (value?, lane?, clamp?, members?);
                let inside = inside.map(|inside| self.register(inside)).transpose()?;
                Ok(Operation::Shuffle { how, to: self.register(to)?, inside, value, lane, clamp, members })
            }
            _ => bail!("an unknown instruction"),
        }
    }

    fn compute(&mut self, name: &str, operands: &[&str]) -> Result<Operation> {
        let (count, function) = arithmetic::function(name).context("an unknown instruction")?;
        let [to, from @ ..] = operands else { bail!("no operands") };
        ensure!(from.len() == count, "{} operands instead of {count}", from.len());
        if let ["cvt", kind, "u8" | "s8" | "u16" | "s16" | "u32" | "s32" | "u64" | "s64"] =
            name.split('.').collect::<Vec<_>>()[..]
        {
            // A wider register would have to be filled by the sign.
            ensure!(self.bits(to)? == bytes_of(kind)? as u32 * 8, "a register of another width");
        }
        let from = from.iter().map(|from| self.operand(from)).collect::<Result<_>>()?;
        Ok(Operation::Compute { function, to: self.register(to)?, from })
    }

    fn vector_move(&mut self, kind: &str, to: &str, from: &str) -> Result<Operation> {
        let bits = bytes_of(kind)? as u32 * 8;
        if from.starts_with('{') {
            let from: Vec<Operand> =
                list(from).into_iter().map(|from| self.operand(from)).collect::<Result<_>>()?;
            let bits = bits / from.len() as u32;
            return Ok(Operation::Join { to: self.register(to)?, from, bits });
        }
        let to: Vec<Option<Register>> = list(to)
            .into_iter()
            .map(|to| if to == "_" { Ok(None) } else { self.register(to).map(Some) })
            .collect::<Result<_>>()?;
        let bits = bits / to.len() as u32;
        Ok(Operation::Split { to, from: self.operand(from)?, bits })
    }

    fn place(&self, name: &str) -> Result<(Register, u32)> {
        let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let (first, count, bits) =
            *self.registers.get(prefix).with_context(|| format!("no register {name}"))?;
        let number: usize = name[prefix.len()..].parse().with_context(|| format!("no register {name}"))?;
        ensure!(number < count, "register {name} was not declared");
        Ok((first + number, bits))
    }

    fn register(&self, name: &str) -> Result<Register> {
        Ok(self.place(name)?.0)
    }

    fn bits(&self, name: &str) -> Result<u32> {
        Ok(self.place(name)?.1)
    }

    /// A register, a number, or the address of an array.
    fn operand(&mut self, text: &str) -> Result<Operand> {
        if text.starts_with('%') {
            return Ok(Operand::Register(self.register(text)?));
        }
        if let Some(array) = self.known.get(text) {
            if !self.shared.iter().any(|used| used.name == array.name) {
                self.shared.push(array.clone());
            }
            return Ok(Operand::Number(array.address));
        }
        let number = match text.get(..2) {
            Some("0f" | "0F") => u64::from(u32::from_str_radix(&text[2..], 16)?),
            Some("0x" | "0X") => u64::from_str_radix(&text[2..], 16)?,
            _ if text.starts_with('-') => text.parse::<i64>()?.cast_unsigned(),
            _ => text.parse().with_context(|| format!("no number: {text}"))?,
        };
        Ok(Operand::Number(number))
    }

    /// `[%rd1+16]`.
    fn address(&mut self, text: &str) -> Result<Address> {
        let inside = text
            .strip_prefix('[')
            .and_then(|text| text.strip_suffix(']'))
            .context("an address is in brackets")?;
        let (base, offset) = inside.split_once('+').unwrap_or((inside, "0"));
        Ok(Address { base: self.operand(base)?, offset: offset.parse()? })
    }

    fn finish(mut self) -> Result<Kernel> {
        for (at, label) in &self.branches {
            let to = *self.labels.get(label).with_context(|| format!("no label {label}"))?;
            self.code[*at].operation = Operation::Branch { to };
        }
        Ok(Kernel {
            name: self.name,
            parameters: self.parameters.into_iter().map(|(_, bytes)| bytes).collect(),
            threads_max: self.threads_max,
            shared: self.shared,
            registers: self.count,
            code: self.code,
        })
    }
}

/// At commas, but not at those within braces.
fn split(operands: &str) -> Vec<&str> {
    let mut depth = 0;
    let at_commas = move |c: char| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    };
    operands.split(at_commas).map(str::trim).filter(|operand| !operand.is_empty()).collect()
}

/// The members of a vector, or the one operand.
fn list(operand: &str) -> Vec<&str> {
    operand.trim_matches(['{', '}']).split(',').map(str::trim).collect()
}

/// How many numbers of which type: `v4.u32`, or `u32`.
fn vector<'a>(parts: &[&'a str]) -> Result<(usize, &'a str)> {
    match parts {
        ["v2", kind] => Ok((2, *kind)),
        ["v4", kind] => Ok((4, *kind)),
        [kind] => Ok((1, *kind)),
        _ => bail!("an unknown instruction"),
    }
}

fn state_space(name: &str) -> Result<StateSpace> {
    match name {
        "global" => Ok(StateSpace::Global),
        "shared" => Ok(StateSpace::Shared),
        _ => bail!("an unknown state space"),
    }
}

fn bytes_of(kind: &str) -> Result<usize> {
    match kind {
        "u16" | "s16" | "b16" | "f16" => Ok(2),
        "u32" | "s32" | "b32" | "f32" => Ok(4),
        "u64" | "s64" | "b64" => Ok(8),
        _ => bail!("an unknown type: {kind}"),
    }
}

fn special(name: &str) -> Option<Special> {
    Some(match name {
        "%tid.x" => Special::Thread,
        "%ntid.x" => Special::Threads,
        "%ctaid.x" => Special::BlockAcross,
        "%ctaid.y" => Special::BlockDown,
        "%nctaid.x" => Special::BlocksAcross,
        "%nctaid.y" => Special::BlocksDown,
        "%laneid" => Special::Lane,
        "%tid.y" | "%tid.z" | "%ctaid.z" => Special::Zero,
        "%ntid.y" | "%ntid.z" | "%nctaid.z" => Special::One,
        _ => return None,
    })
}
