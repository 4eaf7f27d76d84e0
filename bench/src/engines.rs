//! The names of the encoders that are compared.

/// The library whose vectors in f32 the others are compared with.
pub const REFERENCE: &str = "sentence-transformers";

/// The encoder as a worker runs it by default: on AMX in split bf16, where it is. The name may end with a type.
pub const OURS: &str = "vramq";
pub const OURS_F32: &str = "vramq-f32";
pub const OURS_BF16: &str = "vramq-bf16";
