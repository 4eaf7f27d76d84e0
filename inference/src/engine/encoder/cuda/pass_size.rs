//! How many tokens keep a GPU busy for a pass.

/// Tokens and columns of a tile of a linear map: as in kernels/linear.cu, and as most algorithms of cuBLASLt have them.
const TILE: usize = 128;

/// Tiles per multiprocessor in the narrowest map. In the last round some multiprocessors are idle, which then costs a quarter of
/// the time at most.
const ROUNDS: usize = 4;

/// Fewer tokens than this are bound by launches (docs/gpu-kernels.md); more than that only make jobs wait for each other.
const TOKENS_MIN: usize = 8192;
const TOKENS_MAX: usize = 32_768;

/// For devices with little memory or slow products: the CPU's default. Every device that has room for a model has room for such a
/// pass.
pub(super) const TOKENS_LEAST: usize = 2048;

/// A pass takes at most this part of the memory that is free beside the weights, so that many jobs can wait.
const SHARE_OF_FREE: u64 = 32;

/// The tokens of a pass for a model that is `hidden` elements wide, on a device with so many multiprocessors and bytes `free`.
/// `bytes_of` is what a pass of so many tokens takes.
pub(super) fn tokens(
    multiprocessors: usize,
    hidden: usize,
    free: u64,
    bytes_of: impl Fn(usize) -> u64,
) -> usize {
    let across = hidden.div_ceil(TILE).max(1);
    let busy = (ROUNDS * multiprocessors).div_ceil(across) * TILE;
    let mut tokens = busy.next_power_of_two().clamp(TOKENS_MIN, TOKENS_MAX);
    while tokens > TOKENS_LEAST && bytes_of(tokens) > free / SHARE_OF_FREE {
        tokens /= 2;
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn wide_models_and_small_gpus_need_fewer_tokens() {
        let of = |multiprocessors, hidden| {
            tokens(multiprocessors, hidden, 100 * GIB, |tokens| tokens as u64 * 24_576)
        };
        // H200 with 132 multiprocessors, T4 with 40.
        assert_eq!([of(132, 384), of(132, 768), of(132, 1024)], [32_768, 16_384, 16_384]);
        assert_eq!([of(40, 384), of(40, 1024)], [8192, 8192]);
        assert_eq!(of(1000, 64), 32_768);
    }

    #[test]
    fn a_pass_leaves_room_for_others() {
        let of = |free| tokens(132, 384, free, |tokens| tokens as u64 * 4608);
        // 32,768 tokens of MiniLM take 144 MiB.
        assert_eq!(of(8 * GIB), 32_768);
        assert_eq!(of(4 * GIB), 16_384);
        assert_eq!(of(GIB / 8), 2048);
        assert_eq!(of(0), 2048);
    }
}
