// What stands between the qkv projection and attention, in one pass over its rows: RMSNorm of query and key heads (Qwen3),
// rotary embedding, and keys and values into their cache rows. Queries are rotated in place.
//
// A block a row, a warp a head: lane l holds the pairs of elements l, 32 + l, ... of the head's lower half and those that
// are rotated with them in the upper half. Rows whose cache row is negative are padding: nothing of them is stored in the
// cache.
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
  for (int head = threadIdx.x / 32; head < QUERIES + 2 * KV; head += WARPS) {
    u8* from = a.qkv + (row * (QUERIES + 2 * KV) + head) * D * BYTES;
    Two<DTYPE> low[STEPS], high[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int pair = s * 32 + lane;
      if (pair < PAIRS) low[s].load(from + 2 * pair * BYTES), high[s].load(from + (HALF + 2 * pair) * BYTES);
    }
    u8* to = from;
    if (head >= QUERIES) {
      if (target < 0) continue;
      u8* cache = head < QUERIES + KV ? a.keys : a.values;
      to = cache + (target * KV + (head - QUERIES) % KV) * D * BYTES;
    }
    if (head < QUERIES + KV) {
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
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int pair = s * 32 + lane;
      if (pair < PAIRS) low[s].store(to + 2 * pair * BYTES), high[s].store(to + (HALF + 2 * pair) * BYTES);
    }
  }
}
