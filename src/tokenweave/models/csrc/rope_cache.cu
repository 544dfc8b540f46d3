// What stands between the qkv projection and attention, in one pass over its rows: RMSNorm of query and key heads (Qwen3),
// rotary embedding, and keys and values into their cache rows. Queries are rotated in place.
//
// A block a row, a warp a head: lane l holds the pairs of elements l, 32 + l, ... of the head's lower half and those that
// are rotated with them in the upper half. Rows whose cache row is negative are padding: nothing of them is stored in the
// cache.
//
// Cached values are finite: attention kernels load some rows past a sequence's end, another's, and multiply them by a weight
// of zero, which makes NaN of what isn't. Of a row whose value in some head isn't finite that head's key is NaN: scores are
// masked, not multiplied, so this reaches the rows of its own sequence alone.
#include "numeric.cuh"

constexpr int QUERIES = TW_QUERY_SLOTS, KV = TW_KV_SLOTS, D = TW_HEAD_DIM, HALF = D / 2, PAIRS = HALF / 2;
constexpr int STEPS = (PAIRS + 31) / 32, WARPS = TW_THREADS / 32;
constexpr Dtype DTYPE = (Dtype)TW_DTYPE;
static_assert(D % 4 == 0, "halves are read as pairs");

struct RopeArgs {
  u8* qkv;              // [rows, QUERIES + 2 KV heads, D]
  u8* keys;             // one layer's cache, [cache rows, KV, D]
  u8* values;
  const float* cosine;  // [positions, D / 2]
  const float* sine;
  const float* norm;    // [QUERIES + KV, D], or null
  const i64* positions; // [rows]
  const i64* cache_rows;
  float eps;
};

template <Dtype T> struct Two {  // two neighbouring elements
  u32 w;
  DEVICE void load(const u8* p) { w = *(const u32*)p; }
  DEVICE void store(u8* p) const { *(u32*)p = w; }
  DEVICE float2 get() const { return {Packed<T>::lo(w), Packed<T>::hi(w)}; }
  DEVICE void set(float a, float b) { w = Packed<T>::pack(a, b); }
};
template <> struct Two<Dtype::fp32> {
  float2 f;
  DEVICE void load(const u8* p) { f = *(const float2*)p; }
  DEVICE void store(u8* p) const { *(float2*)p = f; }
  DEVICE float2 get() const { return f; }
  DEVICE void set(float a, float b) { f = {a, b}; }
};
constexpr int BYTES = Numeric<DTYPE>::BYTES;

DEVICE void load(Two<DTYPE> (&low)[STEPS], Two<DTYPE> (&high)[STEPS], const u8* from, int lane) {
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    const int pair = s * 32 + lane;
    if (pair < PAIRS) low[s].load(from + 2 * pair * BYTES), high[s].load(from + (HALF + 2 * pair) * BYTES);
  }
}

DEVICE void store(const Two<DTYPE> (&low)[STEPS], const Two<DTYPE> (&high)[STEPS], u8* to, int lane) {
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    const int pair = s * 32 + lane;
    if (pair < PAIRS) low[s].store(to + 2 * pair * BYTES), high[s].store(to + (HALF + 2 * pair) * BYTES);
  }
}

DEVICE bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }

DEVICE bool make_finite(Two<DTYPE>& two) {  // whether it had to
  const float2 f = two.get();
  if (is_finite(f.x) && is_finite(f.y)) return false;
  two.set(is_finite(f.x) ? f.x : 0, is_finite(f.y) ? f.y : 0);
  return true;
}

extern "C" __global__ void __launch_bounds__(TW_THREADS) rope_cache(const __grid_constant__ RopeArgs a) {
  const int lane = threadIdx.x & 31;
  const size_t row = blockIdx.x;
  const i64 target = a.cache_rows[row];
  const size_t angles = (size_t)a.positions[row] * HALF;
  float2 cosine[STEPS], sine[STEPS];
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    const int pair = s * 32 + lane;
    if (pair < PAIRS) {
      cosine[s] = *(const float2*)(a.cosine + angles + 2 * pair);
      sine[s] = *(const float2*)(a.sine + angles + 2 * pair);
    }
  }
  for (int head = threadIdx.x / 32; head < QUERIES + KV; head += WARPS) {
    const bool key = head >= QUERIES;
    if (key && target < 0) continue;
    const u8* from = a.qkv + (row * (QUERIES + 2 * KV) + head) * D * BYTES;
    const size_t slot = key ? (target * KV + head - QUERIES) * D * BYTES : 0;
    u8* to = key ? a.keys + slot : const_cast<u8*>(from);
    Two<DTYPE> low[STEPS], high[STEPS];
    load(low, high, from, lane);
    float inv = 1;
#if TW_QK_NORM
    float ss = 0;
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
      if (s * 32 + lane < PAIRS) {
        const float2 l = low[s].get(), h = high[s].get();
        ss += l.x * l.x + l.y * l.y + h.x * h.x + h.y * h.y;
      }
    inv = rsqrtf(warp_sum(ss) * (1.0f / D) + a.eps);
#endif
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int pair = s * 32 + lane;
      if (pair >= PAIRS) continue;
      float2 l = low[s].get(), h = high[s].get();
#if TW_QK_NORM
      const float2 wl = *(const float2*)(a.norm + head * D + 2 * pair), wh = *(const float2*)(a.norm + head * D + HALF + 2 * pair);
      l = {l.x * inv * wl.x, l.y * inv * wl.y};
      h = {h.x * inv * wh.x, h.y * inv * wh.y};
#endif
      const float2 c = cosine[s], n = sine[s];
      low[s].set(l.x * c.x - h.x * n.x, l.y * c.y - h.y * n.y);
      high[s].set(h.x * c.x + l.x * n.x, h.y * c.y + l.y * n.y);
    }
    store(low, high, to, lane);
    if (!key) continue;
    load(low, high, from + KV * D * BYTES, lane);
    bool lost = false;
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
      if (s * 32 + lane < PAIRS) lost |= make_finite(low[s]) | make_finite(high[s]);
    store(low, high, a.values + slot, lane);
    if (__any_sync(~0u, lost)) {
      const float nan = __int_as_float(0x7fffffff);
#pragma unroll
      for (int s = 0; s < STEPS; ++s) low[s].set(nan, nan), high[s].set(nan, nan);
      store(low, high, to, lane);
    }
  }
}
