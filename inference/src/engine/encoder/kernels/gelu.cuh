// x Φ(x), the exact GELU (Hendrycks and Gimpel 2016): x/2 (1 + erf(x/√2)).

__device__ inline float gelu(float x) {
    return 0.5f * x * (1.0f + erff(x * 0.70710678f));
}
