//! The arithmetic instructions of one thread. Registers are bit patterns of the register's width.
//!
//! Source: PTX ISA 8.8, chapters 9.7.1 to 9.7.9.

use std::cmp::Ordering::{self, Equal, Greater, Less};
use std::convert::identity;

use half::{bf16, f16};

/// From operands in their order to the result; `None` if the ISA promises none.
pub type Function = fn([u64; 4]) -> Option<u64>;

/// The number of operands, and the function of them.
type Known = Option<(usize, Function)>;

fn of(count: usize, function: Function) -> Known {
    Some((count, function))
}

fn word(x: u64) -> u32 {
    x as u32
}

fn signed_word(x: u64) -> i32 {
    word(x).cast_signed()
}

fn half_word(x: u64) -> u16 {
    x as u16
}

fn signed_half_word(x: u64) -> i16 {
    half_word(x).cast_signed()
}

/// Compares two floats; `None` if one is NaN.
fn order(x: [u64; 4]) -> Option<Ordering> {
    float(x[0]).partial_cmp(&float(x[1]))
}

fn float(x: u64) -> f32 {
    f32::from_bits(word(x))
}

fn bits(x: f32) -> Option<u64> {
    Some(u64::from(x.to_bits()))
}

/// Subnormal numbers become zeros of their sign.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0_f32.copysign(x) } else { x }
}

macro_rules! words {
    ($a:ident, $b:ident => $result:expr) => {
        of(2, |x| {
            let ($a, $b) = (word(x[0]), word(x[1]));
            Some(u64::from($result))
        })
    };
}

macro_rules! longs {
    ($a:ident, $b:ident => $result:expr) => {
        of(2, |x| {
            let ($a, $b) = (x[0], x[1]);
            Some($result)
        })
    };
}

macro_rules! floats {
    ($a:ident, $b:ident => $result:expr) => {
        of(2, |x| {
            let ($a, $b) = (float(x[0]), float(x[1]));
            bits($result)
        })
    };
}

/// The function of an instruction whose operands and result are numbers, by its name with all qualifiers.
pub fn function(name: &str) -> Known {
    let parts: Vec<&str> = name.split('.').collect();
    match parts[..] {
        ["setp", how, of] => comparison(how, of),
        ["cvt", to, from] if is_integer(to) && is_integer(from) => integer_conversion(to, from),
        ["selp", "f32" | "b32" | "u32" | "s32" | "b64" | "u64" | "s64" | "b16" | "u16"] => {
            of(3, |x| Some(if x[2] == 0 { x[1] } else { x[0] }))
        }
        _ => integer(name).or_else(|| long(name)).or_else(|| real(name)).or_else(|| conversion(name)),
    }
}

/// On 16 and 32 bits, and on predicates.
fn integer(name: &str) -> Known {
    match name {
        "mov.u16" | "mov.b16" | "mov.s16" => of(1, |x| Some(x[0] & 0xffff)),
        "mov.u32" | "mov.b32" | "mov.s32" | "mov.f32" => of(1, |x| Some(u64::from(word(x[0])))),
        "mov.pred" => of(1, |x| Some(x[0] & 1)),
        "and.pred" => of(2, |x| Some(x[0] & x[1] & 1)),
        "or.pred" => of(2, |x| Some((x[0] | x[1]) & 1)),
        "xor.pred" => of(2, |x| Some((x[0] ^ x[1]) & 1)),
        "not.pred" => of(1, |x| Some(!x[0] & 1)),
        "and.b16" => of(2, |x| Some(x[0] & x[1] & 0xffff)),
        "or.b16" => of(2, |x| Some((x[0] | x[1]) & 0xffff)),
        "xor.b16" => of(2, |x| Some((x[0] ^ x[1]) & 0xffff)),
        "add.s16" | "add.u16" => of(2, |x| Some(x[0].wrapping_add(x[1]) & 0xffff)),
        "sub.s16" | "sub.u16" => of(2, |x| Some(x[0].wrapping_sub(x[1]) & 0xffff)),
        "mul.lo.s16" | "mul.lo.u16" => of(2, |x| Some(x[0].wrapping_mul(x[1]) & 0xffff)),
        "shl.b16" => of(2, |x| Some(x[0].checked_shl(word(x[1])).unwrap_or(0) & 0xffff)),
        "shr.u16" => of(2, |x| Some((x[0] & 0xffff).checked_shr(word(x[1])).unwrap_or(0))),
        "and.b32" => words!(a, b => a & b),
        "or.b32" => words!(a, b => a | b),
        "xor.b32" => words!(a, b => a ^ b),
        "not.b32" => of(1, |x| Some(u64::from(!word(x[0])))),
        "neg.s32" => of(1, |x| Some(u64::from(word(x[0]).wrapping_neg()))),
        "add.s32" | "add.u32" => words!(a, b => a.wrapping_add(b)),
        "sub.s32" | "sub.u32" => words!(a, b => a.wrapping_sub(b)),
        "mul.lo.s32" | "mul.lo.u32" => words!(a, b => a.wrapping_mul(b)),
        "mul.hi.u32" => words!(a, b => ((u64::from(a) * u64::from(b)) >> 32) as u32),
        "mad.lo.s32" | "mad.lo.u32" => {
            of(3, |x| Some(u64::from(word(x[0]).wrapping_mul(word(x[1])).wrapping_add(word(x[2])))))
        }
        "div.u32" => of(2, |x| word(x[0]).checked_div(word(x[1])).map(u64::from)),
        "rem.u32" => of(2, |x| word(x[0]).checked_rem(word(x[1])).map(u64::from)),
        "min.u32" => words!(a, b => a.min(b)),
        "max.u32" => words!(a, b => a.max(b)),
        "min.s32" => words!(a, b => a.cast_signed().min(b.cast_signed()).cast_unsigned()),
        "max.s32" => words!(a, b => a.cast_signed().max(b.cast_signed()).cast_unsigned()),
        // Amounts beyond the width shift everything out.
        "shl.b32" => words!(a, b => a.checked_shl(b).unwrap_or(0)),
        "shr.u32" | "shr.b32" => words!(a, b => a.checked_shr(b).unwrap_or(0)),
        "shr.s32" => words!(a, b => (a.cast_signed() >> b.min(31)).cast_unsigned()),
        "bfi.b32" => of(4, |x| Some(u64::from(word(insert(x, 32))))),
        "prmt.b32" => of(3, |x| Some(u64::from(permute(word(x[0]), word(x[1]), word(x[2]))))),
        _ => None,
    }
}

/// With a result of 64 bits.
fn long(name: &str) -> Known {
    match name {
        "mov.u64" | "mov.b64" | "mov.s64" | "cvta.to.global.u64" | "cvta.to.shared.u64" => {
            of(1, |x| Some(x[0]))
        }
        "cvta.global.u64" | "cvta.shared.u64" => of(1, |x| Some(x[0])),
        "add.s64" | "add.u64" => longs!(a, b => a.wrapping_add(b)),
        "sub.s64" | "sub.u64" => longs!(a, b => a.wrapping_sub(b)),
        "mul.lo.s64" | "mul.lo.u64" => longs!(a, b => a.wrapping_mul(b)),
        "mad.lo.s64" | "mad.lo.u64" => of(3, |x| Some(x[0].wrapping_mul(x[1]).wrapping_add(x[2]))),
        "and.b64" => longs!(a, b => a & b),
        "or.b64" => longs!(a, b => a | b),
        "xor.b64" => longs!(a, b => a ^ b),
        "not.b64" => of(1, |x| Some(!x[0])),
        "neg.s64" => of(1, |x| Some(x[0].wrapping_neg())),
        "min.u64" => longs!(a, b => a.min(b)),
        "max.u64" => longs!(a, b => a.max(b)),
        "shl.b64" => longs!(a, b => a.checked_shl(word(b)).unwrap_or(0)),
        "shr.u64" | "shr.b64" => longs!(a, b => a.checked_shr(word(b)).unwrap_or(0)),
        "shr.s64" => longs!(a, b => (a.cast_signed() >> word(b).min(63)).cast_unsigned()),
        "mul.wide.u16" => of(2, |x| Some((x[0] & 0xffff) * (x[1] & 0xffff))),
        "mul.wide.u32" => of(2, |x| Some(u64::from(word(x[0])) * u64::from(word(x[1])))),
        "mul.wide.s32" => of(2, |x| Some(wide(word(x[0])).wrapping_mul(wide(word(x[1]))))),
        "mad.wide.u32" => of(3, |x| Some((u64::from(word(x[0])) * u64::from(word(x[1]))).wrapping_add(x[2]))),
        "bfi.b64" => of(4, |x| Some(insert(x, 64))),
        _ => None,
    }
}

/// On f32.
fn real(name: &str) -> Known {
    match name {
        "add.f32" | "add.rn.f32" => floats!(a, b => a + b),
        "sub.f32" | "sub.rn.f32" => floats!(a, b => a - b),
        "mul.f32" | "mul.rn.f32" => floats!(a, b => a * b),
        "add.ftz.f32" => floats!(a, b => flush(flush(a) + flush(b))),
        "sub.ftz.f32" => floats!(a, b => flush(flush(a) - flush(b))),
        "mul.ftz.f32" => floats!(a, b => flush(flush(a) * flush(b))),
        "div.rn.f32" => floats!(a, b => a / b),
        // The maximum of a number and NaN is the number.
        "max.f32" => floats!(a, b => a.max(b)),
        "min.f32" => floats!(a, b => a.min(b)),
        "max.NaN.f32" => floats!(a, b => if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }),
        "fma.rn.f32" => of(3, |x| bits(float(x[0]).mul_add(float(x[1]), float(x[2])))),
        "fma.rn.ftz.f32" => {
            of(3, |x| bits(flush(flush(float(x[0])).mul_add(flush(float(x[1])), flush(float(x[2]))))))
        }
        "fma.rm.f32" => of(3, |x| bits(fused_down(float(x[0]), float(x[1]), float(x[2])))),
        "neg.f32" => of(1, |x| bits(-float(x[0]))),
        "abs.f32" => of(1, |x| bits(float(x[0]).abs())),
        "rcp.rn.f32" => of(1, |x| bits(1.0 / float(x[0]))),
        "sqrt.rn.f32" => of(1, |x| bits(float(x[0]).sqrt())),
        "ex2.approx.f32" => of(1, |x| bits(power_of_two(float(x[0])))),
        "ex2.approx.ftz.f32" => of(1, |x| bits(flush(power_of_two(flush(float(x[0])))))),
        "cvt.sat.f32.f32" => of(1, |x| bits(if float(x[0]) > 0.0 { float(x[0]).min(1.0) } else { 0.0 })),
        _ => None,
    }
}

/// Between floats of several widths, and from integers to them.
fn conversion(name: &str) -> Known {
    match name {
        "cvt.f32.f16" => of(1, |x| bits(f16::from_bits(x[0] as u16).to_f32())),
        "cvt.rn.f16.f32" => of(1, |x| Some(u64::from(f16::from_f32(float(x[0])).to_bits()))),
        "cvt.rn.bf16.f32" => of(1, |x| Some(u64::from(bf16::from_f32(float(x[0])).to_bits()))),
        // The first operand into the upper half.
        "cvt.rn.f16x2.f32" => of(2, |x| {
            let [upper, lower] = [x[0], x[1]].map(|x| u64::from(f16::from_f32(float(x)).to_bits()));
            Some(upper << 16 | lower)
        }),
        "cvt.rn.bf16x2.f32" => of(2, |x| {
            let [upper, lower] = [x[0], x[1]].map(|x| u64::from(bf16::from_f32(float(x)).to_bits()));
            Some(upper << 16 | lower)
        }),
        "cvt.rn.f32.u32" => of(1, |x| bits(word(x[0]) as f32)),
        "cvt.rn.f32.s32" => of(1, |x| bits(word(x[0]).cast_signed() as f32)),
        _ => None,
    }
}

fn is_integer(kind: &str) -> bool {
    matches!(kind, "u8" | "s8" | "u16" | "s16" | "u32" | "s32" | "u64" | "s64")
}

/// Signed numbers are extended by their sign, others by zeros. Both are truncated.
fn integer_conversion(to: &str, from: &str) -> Known {
    macro_rules! from_to {
        ($to:ident) => {
            match from {
                "u8" => of(1, |x| Some(x[0] as u8 as $to as u64)),
                "u16" => of(1, |x| Some(x[0] as u16 as $to as u64)),
                "u32" => of(1, |x| Some(x[0] as u32 as $to as u64)),
                "u64" | "s64" => of(1, |x| Some(x[0] as $to as u64)),
                "s8" => of(1, |x| Some(x[0] as i8 as $to as u64)),
                "s16" => of(1, |x| Some(x[0] as i16 as $to as u64)),
                "s32" => of(1, |x| Some(x[0] as i32 as $to as u64)),
                _ => None,
            }
        };
    }
    match to {
        "u16" | "s16" => from_to!(u16),
        "u32" | "s32" => from_to!(u32),
        "u64" | "s64" => from_to!(u64),
        _ => None,
    }
}

fn comparison(how: &str, of_type: &str) -> Known {
    macro_rules! compare {
        ($of:expr) => {
            match how {
                "eq" => of(2, |x| Some(u64::from($of(x[0]) == $of(x[1])))),
                "ne" => of(2, |x| Some(u64::from($of(x[0]) != $of(x[1])))),
                "lt" => of(2, |x| Some(u64::from($of(x[0]) < $of(x[1])))),
                "le" => of(2, |x| Some(u64::from($of(x[0]) <= $of(x[1])))),
                "gt" => of(2, |x| Some(u64::from($of(x[0]) > $of(x[1])))),
                "ge" => of(2, |x| Some(u64::from($of(x[0]) >= $of(x[1])))),
                _ => None,
            }
        };
    }
    match (of_type, how) {
        ("u16" | "b16", _) => compare!(half_word),
        ("s16", _) => compare!(signed_half_word),
        ("u32" | "b32", _) => compare!(word),
        ("s32", _) => compare!(signed_word),
        ("u64" | "b64", _) => compare!(identity),
        ("s64", _) => compare!(u64::cast_signed),
        // True for NaN too, which is what unequal is in Rust.
        ("f32", "neu") => of(2, |x| Some(u64::from(float(x[0]) != float(x[1])))),
        ("f32", "ne") => of(2, |x| Some(u64::from(float(x[0]) < float(x[1]) || float(x[0]) > float(x[1])))),
        ("f32", "ltu") => of(2, |x| Some(u64::from(matches!(order(x), None | Some(Less))))),
        ("f32", "leu") => of(2, |x| Some(u64::from(order(x) != Some(Greater)))),
        ("f32", "gtu") => of(2, |x| Some(u64::from(matches!(order(x), None | Some(Greater))))),
        ("f32", "geu") => of(2, |x| Some(u64::from(order(x) != Some(Less)))),
        ("f32", "equ") => of(2, |x| Some(u64::from(matches!(order(x), None | Some(Equal))))),
        ("f32", "nan") => of(2, |x| Some(u64::from(float(x[0]).is_nan() || float(x[1]).is_nan()))),
        ("f32", "num") => of(2, |x| Some(u64::from(!float(x[0]).is_nan() && !float(x[1]).is_nan()))),
        ("f32", _) => compare!(float),
        _ => None,
    }
}

fn wide(x: u32) -> u64 {
    i64::from(x.cast_signed()).cast_unsigned()
}

/// Puts the lowest bits of the first operand into the second. The other two operands are the position and the number of bits.
fn insert(x: [u64; 4], width: u32) -> u64 {
    let (at, count) = (word(x[2]) & 0xff, word(x[3]) & 0xff);
    if at >= width || count == 0 {
        return x[1];
    }
    let mask = (u64::MAX >> (64 - count.min(64))) << at;
    (x[1] & !mask) | ((x[0] << at) & mask)
}

/// Picks four of eight bytes, each by a nibble, whose highest bit instead repeats the byte's sign.
fn permute(low: u32, high: u32, pick: u32) -> u32 {
    let bytes = (u64::from(high) << 32 | u64::from(low)).to_le_bytes();
    let byte = |i: u32| {
        let nibble = pick >> (4 * i) & 0xf;
        let byte = bytes[(nibble & 7) as usize];
        if nibble & 8 == 0 { byte } else { if byte & 0x80 == 0 { 0 } else { 0xff } }
    };
    u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)])
}

/// `a * b + c` rounded towards minus infinity.
fn fused_down(a: f32, b: f32, c: f32) -> f32 {
    // Exact: two times 24 bits.
    let product = f64::from(a) * f64::from(b);
    let sum = product + f64::from(c);
    // The rounding error of the sum (Knuth's TwoSum).
    let of_c = sum - product;
    let lost = (product - (sum - of_c)) + (f64::from(c) - of_c);
    let nearest = sum as f32;
    if f64::from(nearest) > sum || f64::from(nearest) == sum && lost < 0.0 {
        nearest.next_down()
    } else {
        nearest
    }
}

/// 2^x with the largest error that the ISA allows: a relative 2^-22, up or down by the operand's last bit.
fn power_of_two(x: f32) -> f32 {
    let error = if x.to_bits() & 1 == 0 { 1.0 } else { -1.0 } * 2.0_f64.powi(-22);
    let exact = f64::from(x).exp2();
    // The ISA lists these as exact.
    if x == 0.0 || x.is_infinite() { exact as f32 } else { (exact * (1.0 + error)) as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs an instruction on these operands, padded with zeros.
    fn run(name: &str, operands: &[u64]) -> Option<u64> {
        let (count, function) = function(name).unwrap_or_else(|| panic!("{name} is not known"));
        assert_eq!(count, operands.len(), "{name}");
        function(std::array::from_fn(|i| operands.get(i).copied().unwrap_or(0)))
    }

    #[test]
    fn integers_wrap_shift_and_divide_as_the_isa_says() {
        assert_eq!(run("sub.s32", &[1, 2]), Some(0xffff_ffff));
        assert_eq!(run("shl.b32", &[1, 32]), Some(0));
        assert_eq!(run("shr.u64", &[u64::MAX, 64]), Some(0));
        assert_eq!(run("shr.s32", &[0x8000_0000, 40]), Some(0xffff_ffff));
        assert_eq!(run("mul.wide.s32", &[0xffff_ffff, 2]), Some((-2_i64).cast_unsigned()));
        assert_eq!(run("mul.wide.u32", &[0xffff_ffff, 2]), Some(0x1_ffff_fffe));
        assert_eq!(run("div.u32", &[7, 0]), None);
        assert_eq!(run("cvt.u64.s32", &[0xffff_fffe]), Some((-2_i64).cast_unsigned()));
        assert_eq!(run("cvt.u16.u64", &[0x12_3456]), Some(0x3456));
        assert_eq!(run("setp.lt.s32", &[0xffff_ffff, 0]), Some(1));
        assert_eq!(run("setp.lt.u32", &[0xffff_ffff, 0]), Some(0));
    }

    #[test]
    fn bits_are_inserted_and_bytes_picked() {
        assert_eq!(run("bfi.b64", &[0xabcd, 0x1111_2222_3333_4444, 48, 16]), Some(0xabcd_2222_3333_4444));
        assert_eq!(run("bfi.b32", &[0xff, 0, 28, 8]), Some(0xf000_0000));
        assert_eq!(run("prmt.b32", &[0x3322_1100, 0x7766_5544, 0x7520]), Some(0x7755_2200));
        assert_eq!(run("prmt.b32", &[0x0000_8000, 0, 0x0009]), Some(0x0000_00ff));
    }

    #[test]
    fn floats_compare_and_round_as_the_isa_says() {
        let [one, nan] = [1.0_f32, f32::NAN].map(|x| u64::from(x.to_bits()));
        assert_eq!([run("setp.ltu.f32", &[nan, one]), run("setp.lt.f32", &[nan, one])], [Some(1), Some(0)]);
        assert_eq!([run("setp.ne.f32", &[nan, one]), run("setp.neu.f32", &[nan, one])], [Some(0), Some(1)]);
        assert_eq!(run("max.f32", &[nan, one]), Some(one));
        assert_eq!(run("cvt.sat.f32.f32", &[nan]), Some(0));
        assert_eq!(run("cvt.rn.f16x2.f32", &[one, 0]), Some(0x3c00_0000));
        assert_eq!(run("cvt.rn.bf16.f32", &[u64::from(1.003_f32.to_bits())]), Some(0x3f80));
        // 1 + 2^-30 is 1 towards minus infinity, 1 - 2^-30 the number below 1.
        let tiny = 2.0_f32.powi(-30);
        assert_eq!(fused_down(tiny, 1.0, 1.0), 1.0);
        assert_eq!(fused_down(-tiny, 1.0, 1.0), 1.0_f32.next_down());
        assert_eq!(fused_down(-(2.0_f32.powi(-80)), 1.0, 1.0), 1.0_f32.next_down());
    }

    #[test]
    fn an_approximation_is_off_by_no_more_than_it_may() {
        for i in 0_u16..2000 {
            let x = -f32::from(i) / 97.0;
            let (got, exact) = (f64::from(power_of_two(x)), f64::from(x).exp2());
            assert!((got / exact - 1.0).abs() <= 2.0_f64.powi(-22) * 1.3, "2^{x}");
        }
        assert_eq!(power_of_two(f32::NEG_INFINITY), 0.0);
        assert_eq!(power_of_two(0.0), 1.0);
    }
}
