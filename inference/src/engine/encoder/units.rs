//! Chooses the units of the CPU that compute a model, and the element type.

use std::fmt;
use std::str::FromStr;

use super::config::Dims;
use super::matmul;
use super::simd::Level;
use super::tiles::{AmxAbsent, BLOCK, Parts, TileUnit, Tiles};

/// The type that a configuration asks for: `model.NAME.dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ComputeType {
    /// On the CPU as exact as f32, on the fastest units that are. On a CUDA device the type depends on the model: f16 for most.
    #[default]
    Auto,
    F32,
    /// On CUDA devices.
    F16,
    /// On CUDA devices, and on CPUs with AMX or AVX512-BF16.
    Bf16,
}

impl ComputeType {
    const ALL: [Self; 4] = [Self::Auto, Self::F32, Self::F16, Self::Bf16];

    /// In configurations.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for ComputeType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ComputeType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.as_str() == text)
            .ok_or_else(|| format!("is `{text}`; it must be `auto`, `f32`, `f16` or `bf16`"))
    }
}

/// A type that the CPU device does not compute in.
#[derive(Debug, thiserror::Error)]
pub enum TypeUnavailable {
    #[error(
        "dtype = \"f16\" is for CUDA devices; the CPU device takes \"auto\", \"f32\" and, with AMX or AVX512-BF16, \"bf16\""
    )]
    F16,
    #[error(
        "dtype = \"bf16\" needs AMX or AVX512-BF16 on the CPU device. There is no AVX512-BF16, and no AMX: {0}. \"auto\" and \"f32\" \
         need neither"
    )]
    Bf16(AmxAbsent),
}

/// The units that a model's operations run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuUnits {
    /// For all but the linear maps, and for these too where there are no tiles.
    pub(super) vectors: Level,
    /// For the linear maps.
    pub(super) tiles: Option<Tiles>,
}

impl CpuUnits {
    /// One vector unit for everything.
    pub fn vectors(level: Level) -> Self {
        Self { vectors: level, tiles: None }
    }

    /// Linear maps as AMX computes them, by a model of its tiles in plain Rust: slow, for tests.
    pub fn tile_model(level: Level, parts: Parts) -> Self {
        Self { vectors: level, tiles: Some(Tiles { unit: TileUnit::Model, parts }) }
    }

    /// AMX for the linear maps, and the best vector unit for the rest.
    ///
    /// # Errors
    /// Why there is no AMX.
    pub fn amx(parts: Parts) -> Result<Self, AmxAbsent> {
        let tiles = Tiles { unit: TileUnit::amx()?, parts };
        Ok(Self { vectors: Level::best(), tiles: Some(tiles) })
    }

    /// AVX512-BF16 for the linear maps, and the best vector unit for the rest. `None` if the CPU has none.
    pub fn avx512_bf16(parts: Parts) -> Option<Self> {
        let tiles = Tiles { unit: TileUnit::avx512_bf16()?, parts };
        Some(Self { vectors: Level::best(), tiles: Some(tiles) })
    }

    /// f32 elements that `inner` × `columns` weights take once packed.
    pub(super) fn packed_len(self, inner: usize, columns: usize) -> usize {
        match self.tiles {
            Some(tiles) => tiles.packed_bytes(inner, columns) / 4,
            None => matmul::packed_len(inner, columns, self.vectors.lanes()),
        }
    }

    /// Packs weights into [`packed_len`](Self::packed_len) elements. `source(row, column)` gives them.
    pub(super) fn pack(
        self,
        to: &mut [f32],
        (inner, columns): (usize, usize),
        source: impl Fn(usize, usize) -> f32,
    ) {
        match self.tiles {
            Some(tiles) => tiles.pack(bytemuck::cast_slice_mut(to), (inner, columns), source),
            None => {
                let (panel, lanes) = (self.vectors.panel_columns(), self.vectors.lanes());
                matmul::pack(to, (inner, columns), (panel, lanes), source);
            }
        }
    }

    /// Columns that lie together in packed weights: a share of the columns begins at a multiple of them.
    pub(super) fn panel_columns(self) -> usize {
        if self.tiles.is_some() { BLOCK } else { self.vectors.panel_columns() }
    }

    /// Rows that a thread's share of a product should be a multiple of.
    pub(super) fn grain_rows(self) -> usize {
        if self.tiles.is_some() { BLOCK } else { matmul::TILE_ROWS_MAX }
    }

    /// Bytes that a product of `rows` × `inner` works in.
    pub(super) fn product_scratch_bytes(self, rows: usize, inner: usize) -> usize {
        self.tiles.map_or(0, |tiles| tiles.scratch_bytes(rows, inner))
    }

    /// Bytes that a feed-forward of `rows` rows works in, where it is one operation.
    pub(super) fn feed_forward_scratch_bytes(self, rows: usize, dims: &Dims) -> usize {
        match self.tiles {
            Some(tiles) if Tiles::has_in_one(dims.is_gated, dims.feed_forward) => {
                tiles.feed_forward_scratch_bytes(rows, dims.hidden, dims.feed_forward)
            }
            _ => 0,
        }
    }
}

impl fmt::Display for CpuUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(Tiles { unit, parts }) = self.tiles else {
            return write!(f, "f32 on {}", self.vectors);
        };
        let parts = match parts {
            Parts::Split => "split bf16",
            Parts::Rounded => "bf16",
        };
        write!(f, "linear maps in {parts} on {unit}, the rest in f32 on {}", self.vectors)
    }
}

/// The units for a type, and what else the CPU has.
#[derive(Debug)]
pub(super) struct Chosen {
    pub units: CpuUnits,
    /// Why there is no AMX; `None` if there is.
    pub amx_absent: Option<AmxAbsent>,
    has_avx512_bf16: bool,
}

impl Chosen {
    /// Looks at the CPU, and checks AMX if it may be used.
    ///
    /// # Errors
    /// The CPU device does not compute in this type, here or anywhere.
    pub fn for_type(dtype: ComputeType) -> Result<Self, TypeUnavailable> {
        Self::with(dtype, CpuUnits::amx, || CpuUnits::avx512_bf16(Parts::Rounded))
    }

    fn with(
        dtype: ComputeType,
        amx: impl FnOnce(Parts) -> Result<CpuUnits, AmxAbsent>,
        avx512_bf16: impl FnOnce() -> Option<CpuUnits>,
    ) -> Result<Self, TypeUnavailable> {
        if dtype == ComputeType::F16 {
            return Err(TypeUnavailable::F16);
        }
        let vectors = CpuUnits::vectors(Level::best());
        let parts = if dtype == ComputeType::Bf16 { Parts::Rounded } else { Parts::Split };
        // Both are looked at in any case: people see what the machine has.
        let (amx, avx512_bf16) = (amx(parts), avx512_bf16());
        let has_avx512_bf16 = avx512_bf16.is_some();
        let (units, amx_absent) = match (dtype, amx) {
            (ComputeType::F32, amx) => (vectors, amx.err()),
            (_, Ok(units)) => (units, None),
            // Three products in split bf16 take longer on AVX512-BF16 than one in f32.
            (ComputeType::Auto, Err(absent)) => (vectors, Some(absent)),
            (_, Err(absent)) => match avx512_bf16 {
                Some(units) => (units, Some(absent)),
                None => return Err(TypeUnavailable::Bf16(absent)),
            },
        };
        Ok(Self { units, amx_absent, has_avx512_bf16 })
    }
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { units, amx_absent, has_avx512_bf16 } = self;
        write!(f, "{units}")?;
        let has_tiles = units.tiles.is_some();
        match amx_absent {
            Some(absent) => write!(f, "; no AMX: {absent}")?,
            None if has_tiles => {}
            None => write!(f, "; AMX is there, for dtype = \"auto\" or \"bf16\"")?,
        }
        match (amx_absent, has_avx512_bf16) {
            // The tiles are multiplied on it.
            (Some(_), true) if has_tiles => Ok(()),
            (Some(_), true) => write!(f, "; AVX512-BF16 is there, for dtype = \"bf16\""),
            (None, true) => write!(f, "; AVX512-BF16 is there"),
            (_, false) => write!(f, "; no AVX512-BF16"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a CPU without AVX512-BF16.
    fn chosen(dtype: ComputeType, amx: Result<(), AmxAbsent>) -> Result<Chosen, TypeUnavailable> {
        let vectors = Level::best();
        Chosen::with(dtype, |parts| amx.map(|()| CpuUnits::tile_model(vectors, parts)), || None)
    }

    fn absent() -> Result<(), AmxAbsent> {
        Err(AmxAbsent::NoInstructions("amx-tile"))
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for dtype in ComputeType::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        assert!("f64".parse::<ComputeType>().is_err());
    }

    #[test]
    fn tiles_are_taken_where_they_are() {
        let parts = |dtype| chosen(dtype, Ok(())).unwrap().units.tiles.map(|tiles| tiles.parts);
        assert_eq!(parts(ComputeType::Auto), Some(Parts::Split));
        assert_eq!(parts(ComputeType::Bf16), Some(Parts::Rounded));
        assert_eq!(parts(ComputeType::F32), None);
    }

    #[test]
    fn without_tiles_auto_is_f32_and_bf16_is_refused() {
        let auto = chosen(ComputeType::Auto, absent()).unwrap();
        assert_eq!(auto.units, CpuUnits::vectors(Level::best()));
        let absent_too = "; no AMX: the CPU has no amx-tile; no AVX512-BF16";
        assert!(auto.to_string().ends_with(absent_too), "{auto}");
        let refused = chosen(ComputeType::Bf16, absent()).unwrap_err().to_string();
        assert!(refused.contains("the CPU has no amx-tile"), "{refused}");
        let f32 = chosen(ComputeType::F32, absent()).unwrap();
        assert_eq!(f32.to_string(), auto.to_string());
    }

    #[test]
    fn the_units_of_the_machine_are_named_for_every_dtype() {
        let tiles = CpuUnits::tile_model(Level::best(), Parts::Rounded);
        let told = |dtype, dot: Option<CpuUnits>| {
            let chosen = Chosen::with(dtype, |_| Ok(tiles), || dot).unwrap();
            chosen.to_string().strip_prefix(&chosen.units.to_string()).unwrap().to_owned()
        };
        let there = "; AMX is there, for dtype = \"auto\" or \"bf16\"";
        assert_eq!(told(ComputeType::F32, Some(tiles)), format!("{there}; AVX512-BF16 is there"));
        assert_eq!(told(ComputeType::F32, None), format!("{there}; no AVX512-BF16"));
        assert_eq!(told(ComputeType::Auto, Some(tiles)), "; AVX512-BF16 is there");
        assert_eq!(told(ComputeType::Bf16, None), "; no AVX512-BF16");
    }

    #[test]
    fn avx512_bf16_is_taken_for_bf16_alone_and_where_there_is_no_amx() {
        let dot = CpuUnits::tile_model(Level::best(), Parts::Rounded);
        let with_dot = |dtype| Chosen::with(dtype, |_| Err(AmxAbsent::NotEnabled), || Some(dot)).unwrap();
        assert_eq!(with_dot(ComputeType::Bf16).units, dot);
        assert!(with_dot(ComputeType::Bf16).amx_absent.is_some());
        for dtype in [ComputeType::Auto, ComputeType::F32] {
            let chosen = with_dot(dtype);
            assert_eq!(chosen.units, CpuUnits::vectors(Level::best()));
            let text = chosen.to_string();
            assert!(text.ends_with("; AVX512-BF16 is there, for dtype = \"bf16\""), "{text}");
        }
        let bf16 = with_dot(ComputeType::Bf16).to_string();
        assert!(bf16.ends_with("; no AMX: the system does not enable its registers"), "{bf16}");
        let amx = CpuUnits::vectors(Level::best());
        let both = Chosen::with(ComputeType::Bf16, |_| Ok(amx), || Some(dot)).unwrap();
        assert_eq!(both.units, amx);
    }

    #[test]
    fn f16_is_for_gpus() {
        assert!(matches!(chosen(ComputeType::F16, Ok(())), Err(TypeUnavailable::F16)));
    }
}
