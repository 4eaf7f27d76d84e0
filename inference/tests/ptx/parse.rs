//! Parses PTX into kernels. NVRTC writes one statement per line; a line that the parser does not understand is an error, never
//! skipped. The forms of the instructions: `parse/instructions.rs`.
//!
//! Source: PTX ISA 8.8, chapters 4 to 6, and 9.7 for the forms of instructions.

mod instructions;

use std::collections::HashMap;

use anyhow::{Context as _, Result, bail, ensure};

use super::code::{Address, Instruction, Kernel, Operand, Operation, Register, SharedArray};
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

/// Reads a line between kernels. Returns the name of the kernel that begins there, if one does.
fn outside(line: &str, shared: &mut Vec<(String, usize)>) -> Result<Option<String>> {
    if let Some(name) = line.strip_prefix(".visible .entry ") {
        return Ok(Some(name.trim_end_matches('(').to_owned()));
    }
    if line.starts_with(".shared ") {
        shared.push(array(line)?);
        return Ok(None);
    }
    // The kernels contain the values of these constants.
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
    /// For each prefix: the first register, the number of registers, and their bits.
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

fn bytes_of(kind: &str) -> Result<usize> {
    match kind {
        "u16" | "s16" | "b16" | "f16" => Ok(2),
        "u32" | "s32" | "b32" | "f32" => Ok(4),
        "u64" | "s64" | "b64" => Ok(8),
        _ => bail!("an unknown type: {kind}"),
    }
}
