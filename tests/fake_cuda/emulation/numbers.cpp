// 16-bit floats to and from f32, as the conversions cvt.f32.f16, cvt.rn.f16.f32 and cvt.rn.bf16.f32 of the PTX ISA:
// to the nearest, ties to even.

#include "machine.h"

#include <vector>

namespace emulation {

namespace {

// Sign, 5 bits of exponent, 10 of mantissa.
float widened(unsigned short bits) {
    const unsigned sign = static_cast<unsigned>(bits & 0x8000) << 16;
    const unsigned exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000 | mantissa << 13);
    // The value is mantissa * 2^-24 without the leading bit, else (1024 + mantissa) * 2^(exponent - 25); both are
    // exact in f32.
    const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                     : std::ldexp(static_cast<float>(1024 + mantissa), static_cast<int>(exponent) - 25);
    return sign ? -size : size;
}

std::vector<float> all_widened() {
    std::vector<float> all(65536);
    for (unsigned bits = 0; bits < all.size(); bits++) {
        all[bits] = widened(static_cast<unsigned short>(bits));
    }
    return all;
}

const std::vector<float> ALL_WIDENED = all_widened();

} // namespace

const float *const WIDENED = ALL_WIDENED.data();

float widen_f16(unsigned short bits) {
    return WIDENED[bits];
}

unsigned short narrow_f16(float x) {
    const unsigned bits = __builtin_bit_cast(unsigned, x);
    const unsigned sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return 0x7fff;
    // 65520 and more are nearer to the next power of two, which is infinity.
    if (size >= 0x477ff000) return static_cast<unsigned short>(sign | 0x7c00);
    if (size < 0x38800000) {
        // Below 2^-14: a multiple of 2^-24. Adding 2^-1 rounds it there, since that is the weight of an f32's last bit
        // from 2^-1 on.
        const float rounded = __uint_as_float(size) + 0.5f;
        return static_cast<unsigned short>(sign | (__builtin_bit_cast(unsigned, rounded) - 0x3f000000));
    }
    const unsigned even = size >> 13 & 1;
    return static_cast<unsigned short>(sign | ((size + 0xfff + even - 0x38000000) >> 13));
}

unsigned short narrow_bf16(float x) {
    const unsigned bits = __builtin_bit_cast(unsigned, x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

} // namespace emulation
