//! Shared by the tests: the embedded PTX, launches of its kernels, and the tolerance of results.

use std::collections::HashMap;
use std::fmt;
use std::io::Read as _;

use flate2::read::GzDecoder;
use half::{bf16, f16};

use super::code::Kernel;
use super::fault::Report;
use super::memory::{Access, Space};
use super::{grid, parse};

/// The type that a text's matrices are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F32,
    F16,
    Bf16,
}

impl Element {
    pub fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// Elements of 16 bytes, which kernels read at a time where rows are multiples of them.
    pub fn chunk(self) -> usize {
        16 / self.bytes()
    }

    /// The nearest number of this type.
    pub fn round(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            Self::F16 => f16::from_f32(x).to_f32(),
            Self::Bf16 => bf16::from_f32(x).to_f32(),
        }
    }

    fn encode(self, numbers: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Self::F16 => numbers.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
            Self::Bf16 => numbers.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        }
    }

    fn decode(self, bytes: &[u8]) -> Vec<f64> {
        match self {
            Self::F32 => bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
            Self::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f64()).collect(),
            Self::Bf16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f64()).collect(),
        }
    }

    /// How far results may be from the exact ones, relative to their size, if they are rounded to elements once; and for attention,
    /// whose weights are rounded too. In f32 only the order of sums and the exponential differ.
    pub fn bounds(self) -> Bounds {
        match self {
            Self::F32 => Bounds { once: 2e-6, attention: 3e-6 },
            Self::F16 => Bounds { once: 4e-4, attention: 5e-4 },
            // bf16 has three bits less than f16.
            Self::Bf16 => Bounds { once: 8.0 * 4e-4, attention: 8.0 * 5e-4 },
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub once: f64,
    pub attention: f64,
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

/// One of the texts that come with the program.
#[derive(Debug)]
pub struct Text {
    pub file: &'static str,
    pub element: Element,
    pub text: String,
    pub kernels: Vec<Kernel>,
}

macro_rules! packed {
    ($file:literal) => {
        ($file, include_bytes!(concat!("../../src/engine/encoder/kernels/ptx/", $file, ".ptx.gz")))
    };
}

/// All of them, as `scripts/kernels` makes them.
const PACKED: [(&str, &[u8]); 4] =
    [packed!("f32-75"), packed!("f16-75"), packed!("f16-80"), packed!("bf16-80")];

pub const FILES: [&str; 4] = ["f32-75", "f16-75", "f16-80", "bf16-80"];

/// The PTX of a file.
pub fn unpack(file: &str) -> String {
    let (_, packed) = PACKED.iter().find(|(name, _)| *name == file).unwrap();
    let mut text = String::new();
    GzDecoder::new(*packed).read_to_string(&mut text).unwrap();
    text
}

impl Text {
    pub fn of(file: &'static str) -> Self {
        Self::changed(file, unpack(file)).unwrap()
    }

    /// A text that somebody has changed.
    pub fn changed(file: &'static str, text: String) -> anyhow::Result<Self> {
        let element = match file.split('-').next() {
            Some("f32") => Element::F32,
            Some("f16") => Element::F16,
            _ => Element::Bf16,
        };
        let kernels = parse::module(&text)?;
        Ok(Self { file, element, text, kernels })
    }

    /// A kernel by its name without the type.
    pub fn launch(&self, name: &str) -> Launch<'_> {
        let full = format!("{name}_{}", self.element);
        let kernel = self.kernels.iter().find(|kernel| kernel.name == full);
        let kernel = kernel.unwrap_or_else(|| panic!("{} has no {full}", self.file));
        Launch {
            kernel,
            element: self.element,
            global: Space::global(),
            arguments: Vec::new(),
            addresses: HashMap::new(),
        }
    }
}

/// A kernel and its arguments, in the order of its signature.
#[derive(Debug)]
pub struct Launch<'k> {
    kernel: &'k Kernel,
    element: Element,
    global: Space,
    arguments: Vec<(u64, usize)>,
    addresses: HashMap<&'static str, u64>,
}

impl<'k> Launch<'k> {
    fn array(mut self, name: &'static str, bytes: Vec<u8>, access: Access) -> Self {
        let address = self.global.add(name, bytes, access);
        self.addresses.insert(name, address);
        self.arguments.push((address, 8));
        self
    }

    /// An input of elements.
    pub fn elements(self, name: &'static str, numbers: &[f32]) -> Self {
        let bytes = self.element.encode(numbers);
        self.array(name, bytes, Access::Read)
    }

    /// Elements that are read and written.
    pub fn in_place(self, name: &'static str, numbers: &[f32]) -> Self {
        let bytes = self.element.encode(numbers);
        self.array(name, bytes, Access::ReadWrite)
    }

    /// An input that is f32 whatever the elements are.
    pub fn floats(self, name: &'static str, numbers: &[f32]) -> Self {
        self.array(name, Element::F32.encode(numbers), Access::Read)
    }

    pub fn words(self, name: &'static str, numbers: &[u32]) -> Self {
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.array(name, bytes, Access::Read)
    }

    /// Room for elements, full of NaN.
    pub fn output(self, name: &'static str, count: usize) -> Self {
        let bytes = vec![0xff; count * self.element.bytes()];
        self.array(name, bytes, Access::Write)
    }

    /// Room for f32.
    pub fn float_output(self, name: &'static str, count: usize) -> Self {
        self.array(name, vec![0xff; count * 4], Access::Write)
    }

    /// An earlier argument, used again.
    pub fn again(mut self, name: &'static str) -> Self {
        self.arguments.push((self.addresses[name], 8));
        self
    }

    pub fn null(mut self) -> Self {
        self.arguments.push((0, 8));
        self
    }

    pub fn number(mut self, number: usize) -> Self {
        self.arguments.push((u64::from(u32::try_from(number).unwrap()), 4));
        self
    }

    pub fn flag(self, is: bool) -> Self {
        self.number(usize::from(is))
    }

    pub fn float(mut self, number: f32) -> Self {
        self.arguments.push((u64::from(number.to_bits()), 4));
        self
    }

    /// # Errors
    /// What the kernel did wrong.
    pub fn run(mut self, blocks: (usize, usize), threads: usize) -> Result<Results, Report> {
        let sizes: Vec<usize> = self.arguments.iter().map(|(_, bytes)| *bytes).collect();
        assert_eq!(sizes, self.kernel.parameters, "arguments of {}", self.kernel.name);
        let threads = u32::try_from(threads).unwrap();
        assert!(
            threads <= self.kernel.threads_max && threads.is_multiple_of(32),
            "threads of {}",
            self.kernel.name
        );
        let arguments: Vec<u64> = self.arguments.iter().map(|(bits, _)| *bits).collect();
        let blocks = (u32::try_from(blocks.0).unwrap(), u32::try_from(blocks.1).unwrap());
        grid::run(self.kernel, blocks, threads, &arguments, &mut self.global)?;
        Ok(Results { global: self.global, element: self.element })
    }
}

/// The memory after a kernel has run.
#[derive(Debug)]
pub struct Results {
    global: Space,
    element: Element,
}

impl Results {
    /// Elements, all of which have been written.
    pub fn elements(&self, name: &str) -> Vec<f64> {
        self.numbers(name, self.element)
    }

    pub fn floats(&self, name: &str) -> Vec<f64> {
        self.numbers(name, Element::F32)
    }

    fn numbers(&self, name: &str, element: Element) -> Vec<f64> {
        let (bytes, is_written) = self.global.contents(name).unwrap();
        assert!(is_written, "{name} was not written everywhere");
        element.decode(bytes)
    }
}

/// Numbers between -1 and 1 that are elements, the same for the same seed (SplitMix64; Steele et al. 2014).
pub fn numbers(element: Element, seed: u64, count: usize) -> Vec<f32> {
    let one = |i: usize| {
        let mut z = seed
            .wrapping_mul(0x2545_f491_4f6c_dd1d)
            .wrapping_add((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let unit = ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32;
        element.round(2.0 * unit - 1.0)
    };
    (0..count).map(one).collect()
}

/// Checks the error of all results together (relative, by root mean square), and that of the worst result, relative to the largest.
/// The worst may be twice the bound. With fewer than 32 numbers, whose errors do not average out, the bounds are a quarter larger.
pub fn is_close(got: &[f64], want: &[f64], bound: f64) -> Result<(), String> {
    assert_eq!(got.len(), want.len());
    let bound = if want.len() < 32 { 1.25 * bound } else { bound };
    let square = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>().sqrt();
    let (error, size) =
        (square(&mut got.iter().zip(want).map(|(got, want)| got - want)), square(&mut want.iter().copied()));
    let worst = got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f64::max);
    let largest = want.iter().map(|x| x.abs()).fold(0.0, f64::max);
    if error <= bound * size && worst <= 2.0 * bound * largest {
        Ok(())
    } else {
        Err(format!(
            "off by {:.2e} and at worst {:.2e}, the bound is {bound:.1e}",
            error / size,
            worst / largest
        ))
    }
}

/// `x Φ(x)`.
pub fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2))
}

/// The error function by its series (Abramowitz and Stegun 7.1.6), which has no cancellation; beyond 6 it is 1 in f64.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while f64::abs(term) > 1e-18 {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

/// Makes a test for each text from a function of one text: `on_texts!(name)` for `fn name(text: &Text)`.
macro_rules! on_texts {
    ($name:ident: $($file:ident = $text:literal),+) => {
        mod $name {
            $(
                #[test]
                fn $file() {
                    super::$name(&super::Text::of($text));
                }
            )+
        }
    };
    ($name:ident) => {
        on_texts!($name: f32_75 = "f32-75", f16_75 = "f16-75", f16_80 = "f16-80", bf16_80 = "bf16-80");
    };
}
pub(crate) use on_texts;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_function_is_right() {
        // Of the table in Abramowitz and Stegun, 7.1.
        for (x, value) in [(0.0, 0.0), (0.5, 0.520_499_877_8), (1.0, 0.842_700_792_9), (2.0, 0.995_322_265_0)]
        {
            assert!((erf(x) - value).abs() < 1e-10 && (erf(-x) + value).abs() < 1e-10);
        }
    }

    /// The kernels that the tests here run. One more in a text needs a test of its own.
    const TESTED: [&str; 13] = [
        "embed",
        "add_norm",
        "rotate",
        "linear_small",
        "linear_small_gelu",
        "attention_16",
        "attention_32",
        "attention_64",
        "attention_128",
        "attention_256",
        "pool",
        "bias_gelu",
        "gate",
    ];

    #[test]
    fn every_kernel_of_every_text_is_understood_and_tested() {
        for file in FILES {
            let text = Text::of(file);
            let large: &[&str] =
                if text.element == Element::F32 { &[] } else { &["linear_large", "linear_large_gelu"] };
            let tested = TESTED.iter().chain(large);
            let mut tested: Vec<String> = tested.map(|name| format!("{name}_{}", text.element)).collect();
            let mut found: Vec<String> = text.kernels.iter().map(|kernel| kernel.name.clone()).collect();
            tested.sort();
            found.sort();
            assert_eq!(found, tested, "{file}");
            assert_eq!(text.text.matches(".entry ").count(), found.len(), "{file}");
        }
    }

    #[test]
    fn an_unknown_line_is_an_error() {
        let text = unpack("f16-80");
        let changed = text.replacen("ret;", "frobnicate.b32 \t%r1, %r2;\n\tret;", 1);
        let error = format!("{:#}", Text::changed("f16-80", changed).unwrap_err());
        assert!(error.contains("frobnicate") && error.contains("unknown instruction"), "{error}");
    }

    #[test]
    fn closeness_is_of_the_worst_too() {
        assert!(is_close(&[1.0, 2.0], &[1.0, 2.0], 1e-9).is_ok());
        let mut got = vec![1.0; 100_000];
        let want = got.clone();
        got[7] = 1.001;
        assert!(is_close(&got, &want, 4e-4).is_err());
        assert!(is_close(&[f64::NAN], &[1.0], 1.0).is_err());
    }
}
