//! The forms of instructions: each name with its operands becomes an operation, or an error.

use anyhow::{Context as _, Result, bail, ensure};

use super::{Draft, bytes_of};
use crate::arithmetic;
use crate::code::{Half, Operand, Operation, Register, Shuffle, Special, StateSpace};

impl Draft {
    /// The operation of an instruction with this name and these operands.
    pub(super) fn operation(&mut self, name: &str, operands: &[&str]) -> Result<Operation> {
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
            // A wider register would need an extension by the sign.
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
