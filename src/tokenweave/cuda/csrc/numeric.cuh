// 16-byte vectors of bf16, fp16 or fp32 to and from fp32.
#pragma once
#include "ptx.cuh"

enum class Dtype { bf16 = 0, fp16 = 1, fp32 = 2 };

template <Dtype D> struct Packed;  // two 16-bit values in a word
template <> struct Packed<Dtype::bf16> {
  static DEVICE float lo(u32 w) { return __uint_as_float(w << 16); }
  static DEVICE float hi(u32 w) { return __uint_as_float(w & 0xffff0000u); }
  static DEVICE u32 pack(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
};
template <> struct Packed<Dtype::fp16> {
  static DEVICE float lo(u32 w) { float f; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(f) : "r"(w)); return f; }
  static DEVICE float hi(u32 w) { float f; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(w)); return f; }
  static DEVICE u32 pack(float lo, float hi) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
};

template <Dtype D> struct Numeric {
  static constexpr int BYTES = 2, ELEMENTS = 8;
  static DEVICE void unpack(float (&f)[8], const Vec& v) {
#pragma unroll
    for (int k = 0; k < 4; ++k) { f[2 * k] = Packed<D>::lo(v.w[k]); f[2 * k + 1] = Packed<D>::hi(v.w[k]); }
  }
  static DEVICE void add(float (&f)[8], const Vec& v) {
#pragma unroll
    for (int k = 0; k < 4; ++k) { f[2 * k] += Packed<D>::lo(v.w[k]); f[2 * k + 1] += Packed<D>::hi(v.w[k]); }
  }
  static DEVICE Vec pack(const float (&f)[8]) {
    Vec v;
#pragma unroll
    for (int k = 0; k < 4; ++k) v.w[k] = Packed<D>::pack(f[2 * k], f[2 * k + 1]);
    return v;
  }
};
template <> struct Numeric<Dtype::fp32> {
  static constexpr int BYTES = 4, ELEMENTS = 4;
  static DEVICE void unpack(float (&f)[4], const Vec& v) {
#pragma unroll
    for (int k = 0; k < 4; ++k) f[k] = __uint_as_float(v.w[k]);
  }
  static DEVICE void add(float (&f)[4], const Vec& v) {
#pragma unroll
    for (int k = 0; k < 4; ++k) f[k] += __uint_as_float(v.w[k]);
  }
  static DEVICE Vec pack(const float (&f)[4]) {
    Vec v;
#pragma unroll
    for (int k = 0; k < 4; ++k) v.w[k] = __float_as_uint(f[k]);
    return v;
  }
};

constexpr float E4M3_MAX = 448;
constexpr float E4M3_LEAST_SCALE = 1.0f / (1ull << 40);  // of a row: an all-zero row has a scale, and its reciprocal is finite

DEVICE float max_nan(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }  // NaN if either is
#if __CUDA_ARCH__ >= 890
DEVICE u32 pack_e4m3(float a, float b, float c, float d) {  // a in the lowest byte; round to nearest even, saturating; NaN stays NaN
  u32 r;
  asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h}; }"
      : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}
#endif

DEVICE float warp_sum(float s) {  // a butterfly: every lane gets the same bits
#pragma unroll
  for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
  return s;
}
// Of values without a sign: their bits are ordered as they are, and NaN is the largest.
DEVICE float warp_max(float m) { return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(m))); }
