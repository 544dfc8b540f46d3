// What happens to one row once its partial sums are at hand: sum in rank order, bias, post-norm, residual add, one
// rounding, RMSNorm, and, where asked for, e4m3. All kernels share it.
//
// A row belongs to a group of GT threads; thread t holds the 16-byte vectors t, GT + t, 2 GT + t, ... The norm's sum of
// squares has one order for a given hidden size: within a vector, then over the vectors j, NT + j, 2 NT + j, ... for each j
// below NT, then over the j by a butterfly within 32 and one after the other. So a row's bits do not depend on the kernel,
// on its threads, on its owner or on the rest of the batch.
#pragma once
#include "barrier.cuh"
#include "numeric.cuh"

enum Option : int { HAS_RESIDUAL = 1, BIAS = 2, POST_NORM = 4, WEIGHT_FP32 = 8, ROWS = 16, ROW_COUNT = 32, WEIGHT_OFFSET = 64,
                    FP8 = 128 /* e4m3 rows */, ROW_SCALES = 256 /* each has its own scale */, UNQUANTISED = 512 /* the other rows too */ };

template <int N_, int H_, Dtype D_, int GT_, int GROUPS_, int OPTIONS_, int NT_ = GT_> struct Shape {
  static constexpr int N = N_, H = H_, GT = GT_, GROUPS = GROUPS_, OPTIONS = OPTIONS_, NT = NT_;
  static constexpr Dtype D = D_;
  typedef Numeric<D> Num;
  static constexpr int E = Num::ELEMENTS, ROW_BYTES = H * Num::BYTES, VECS = ROW_BYTES / 16, V = (VECS + GT - 1) / GT;
  static constexpr int WARPS = GT / 32;
  static constexpr bool FULL = VECS == V * GT;  // no thread runs past the row's end
  static_assert(H % 8 == 0 && GT % 32 == 0, "hidden is a multiple of 8, a group is whole warps");
  static_assert(NT == GT || (NT < GT && NT % 32 == 0 && GROUPS == 1), "only a lone group may have more threads than the norm's sum");
};
template <class S, int OPTION> constexpr bool has = (S::OPTIONS & OPTION) != 0;

template <class S> struct Reduction {  // two slots that take turns, so that one barrier a sum is enough
  float slot[S::GROUPS][2][S::WARPS];  // whatever is reduced: one after the other
  float vectors[S::NT == S::GT ? 1 : S::VECS];
};

template <class S> struct RowMath {
  static constexpr int V = S::V, E = S::E;
  typedef typename S::Num Num;
  // Vectors of [hidden] stay packed in registers where they have the rows' dtype.
  static constexpr bool KEEP = !has<S, WEIGHT_FP32>;
  const Args& a;
  Reduction<S>& shared;
  const int group, t;  // my group, my thread within it
  int parity = 0;
  Vec weight[KEEP ? V : 1];

  DEVICE RowMath(const Args& args, Reduction<S>& reduction) : a(args), shared(reduction), group(threadIdx.x / S::GT), t(threadIdx.x % S::GT) {
    if constexpr (KEEP)
#pragma unroll
      for (int v = 0; v < V; ++v) weight[v] = inside(v) ? ld_global_nc(a.weight + t * 16 + step(v)) : Vec{};
  }
  DEVICE bool inside(int v) const { return S::FULL || v * S::GT + t < S::VECS; }
  DEVICE static constexpr int step(int v) { return v * S::GT * 16; }  // bytes from my first vector to my v-th

  // The v-th of my elements of a vector of [hidden].
  DEVICE void elements(float (&f)[E], const u8* p, int v) const {
    if (!inside(v)) {
#pragma unroll
      for (int k = 0; k < E; ++k) f[k] = 0;
    } else if constexpr (has<S, WEIGHT_FP32>) {
#pragma unroll
      for (int k = 0; k < E / 4; ++k) {
        const Vec q = ld_global_nc(p + (size_t)(v * S::GT + t) * E * 4 + k * 16);
#pragma unroll
        for (int j = 0; j < 4; ++j) f[k * 4 + j] = __uint_as_float(q.w[j]);
      }
    } else {
      Num::unpack(f, ld_global_nc(p + t * 16 + step(v)));
    }
  }
  DEVICE void multiply(float (&y)[E], float (&w)[E]) const {
#pragma unroll
    for (int k = 0; k < E; ++k) y[k] *= has<S, WEIGHT_OFFSET> ? w[k] + a.weight_offset : w[k];
  }

  // The same bits in every thread of the group.
  DEVICE float group_sum(float s) { return across_warps(warp_sum(s), [](float a, float b) { return a + b; }); }
  DEVICE float group_max(float m) { return across_warps(warp_max(m), max_nan); }  // of values without a sign
  // squares[v]: the sum of squares of my v-th vector.
  DEVICE float inverse_rms(const float (&squares)[V]) { return rsqrtf(total(squares) * (1.0f / S::H) + a.eps); }

  // h: the new residual, rounded once. x(p, v): the v-th vector of rank p's partial sums; residual(v): of the old residual.
  // squares[v]: the sum of squares of its v-th vector.
  template <class X, class Residual> DEVICE void reduce(Vec (&h)[V], float (&squares)[V], X x, Residual residual) {
    if constexpr (!has<S, POST_NORM>) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float acc[E];
        sum_partials(acc, x, v);
        if constexpr (has<S, HAS_RESIDUAL>) Num::add(acc, residual(v));
        h[v] = Num::pack(acc);
        Num::unpack(acc, h[v]);
        squares[v] = sum_of_squares(acc);
      }
    } else {
      float acc[V][E];
#pragma unroll
      for (int v = 0; v < V; ++v) {
        sum_partials(acc[v], x, v);
        squares[v] = sum_of_squares(acc[v]);
      }
      const float inv = inverse_rms(squares);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float w[E];
        elements(w, a.post_weight, v);
#pragma unroll
        for (int k = 0; k < E; ++k) acc[v][k] *= inv;
        multiply(acc[v], w);
        if constexpr (has<S, HAS_RESIDUAL>) Num::add(acc[v], residual(v));
        h[v] = Num::pack(acc[v]);
        Num::unpack(acc[v], h[v]);
        squares[v] = sum_of_squares(acc[v]);
      }
    }
  }
  // store(v, y): the v-th vector of the normalised row.
  template <class Store> DEVICE void scale(const Vec (&h)[V], float inv, Store store) const {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float y[E];
      normalise(y, h[v], inv, v);
      if (inside(v)) store(v, Num::pack(y));
    }
  }
  // The normalised row in all forms that the options ask for. `row`: where the result has it.
  // To::store(table, at, words): 1, 2 or 4 words to byte `at` of the table's destinations.
  template <class To> DEVICE void write(const Vec (&h)[V], float inv, int row) {
    const size_t out = (size_t)row * S::ROW_BYTES + t * 16;
    if constexpr (!has<S, FP8>) {
      scale(h, inv, [&](int v, const Vec& y) { To::store(a.out, out + step(v), y.w); });
    } else {
      float y[V][E], most = 0;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        normalise(y[v], h[v], inv, v);
        if constexpr (has<S, UNQUANTISED>)
          if (inside(v)) To::store(a.out, out + step(v), Num::pack(y[v]).w);
        if constexpr (has<S, ROW_SCALES>)
#pragma unroll
          for (int k = 0; k < E; ++k) most = max_nan(most, fabsf(y[v][k]));
      }
      float scale_of_row;
      if constexpr (has<S, ROW_SCALES>) {
        scale_of_row = max_nan(group_max(most) / E4M3_MAX, E4M3_LEAST_SCALE);
        const u32 word[1] = {__float_as_uint(scale_of_row)};
        if (t == 0) To::store(a.scales, (size_t)row * 4, word);
      } else {
        scale_of_row = *a.scale;
      }
      write_e4m3<To>(y, 1.0f / scale_of_row, (size_t)row * S::H);
    }
  }

 private:
  DEVICE float total(const float (&squares)[V]) {
    if constexpr (S::NT == S::GT) {
      float s = squares[0];
#pragma unroll
      for (int v = 1; v < V; ++v) s += squares[v];
      return group_sum(s);
    } else {  // more threads than NT: the first NT add the vectors as they would if there were no others
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (inside(v)) shared.vectors[v * S::GT + t] = squares[v];
      __syncthreads();
      float* slot = shared.slot[0][parity];
      parity ^= 1;
      if (t < S::NT) {
        float s = shared.vectors[t];
#pragma unroll
        for (int j = S::NT; j < S::VECS; j += S::NT)
          if (S::VECS % S::NT == 0 || j + t < S::VECS) s += shared.vectors[j + t];
        s = warp_sum(s);
        if ((t & 31) == 0) slot[t / 32] = s;
      }
      __syncthreads();
      float s = 0;
#pragma unroll
      for (int k = 0; k < S::NT / 32; ++k) s += slot[k];
      return s;
    }
  }
  template <class Combine> DEVICE float across_warps(float s, Combine combine) {
    if constexpr (S::WARPS > 1) {
      float* slot = shared.slot[group][parity];
      parity ^= 1;
      if ((t & 31) == 0) slot[t / 32] = s;
      asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(S::GT) : "memory");
      s = 0;
#pragma unroll
      for (int k = 0; k < S::WARPS; ++k) s = combine(s, slot[k]);
    }
    return s;
  }
  DEVICE void normalise(float (&y)[E], const Vec& h, float inv, int v) const {
    float w[E];
    Num::unpack(y, h);
#pragma unroll
    for (int k = 0; k < E; ++k) y[k] *= inv;
    if constexpr (KEEP) Num::unpack(w, weight[v]);
    else elements(w, a.weight, v);
    multiply(y, w);
  }
  // Neighbouring threads swap halves where they can, so that each stores one vector of twice the size instead of two.
  template <class To> DEVICE void write_e4m3(const float (&y)[V][E], float factor, size_t row) const {
    constexpr int W = E / 4;  // words of a vector's elements
    u32 q[V][W];
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int k = 0; k < W; ++k)
        q[v][k] = pack_e4m3(y[v][4 * k] * factor, y[v][4 * k + 1] * factor, y[v][4 * k + 2] * factor, y[v][4 * k + 3] * factor);
    auto at = [&](int v, int thread) { return row + (v * S::GT + thread) * E; };
    if constexpr (V % 2 == 0 && S::VECS % 2 == 0) {  // an even thread's neighbour has a vector wherever it has one
      const bool odd = t & 1;
#pragma unroll
      for (int v = 0; v < V; v += 2) {  // the even thread gets the pair's vectors v, the odd one its vectors v + 1
        u32 both[2 * W];
#pragma unroll
        for (int k = 0; k < W; ++k) {
          const u32 other = __shfl_xor_sync(~0u, odd ? q[v][k] : q[v + 1][k], 1);
          both[k] = odd ? other : q[v][k];
          both[W + k] = odd ? q[v + 1][k] : other;
        }
        if (inside(v + odd)) To::store(a.fp8, at(v + odd, t & ~1), both);
      }
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (inside(v)) To::store(a.fp8, at(v, t), q[v]);
    }
  }
  template <class X> DEVICE void sum_partials(float (&acc)[E], X x, int v) const {
    Num::unpack(acc, x(0, v));
#pragma unroll
    for (int p = 1; p < S::N; ++p) Num::add(acc, x(p, v));
    if constexpr (has<S, BIAS>) {
      float b[E];
      elements(b, a.bias, v);
#pragma unroll
      for (int k = 0; k < E; ++k) acc[k] += b[k];
    }
  }
  static DEVICE float sum_of_squares(const float (&f)[E]) {
    float s = f[0] * f[0];
#pragma unroll
    for (int k = 1; k < E; ++k) s = fmaf(f[k], f[k], s);
    return s;
  }
};

// The rows of this call that this rank owns, [first, first + count), and, with sampled rows, their positions in `rows`.
struct Owned {
  int first, count;
};
template <class S> DEVICE int call_tokens(const Args& a) {
  if constexpr (has<S, ROW_COUNT>) return min(a.tokens, max(0, *(const volatile int*)a.row_count));
  return a.tokens;
}
template <class S> DEVICE Owned owned_rows(const Args& a) {  // called by whole warps
  const int tokens = call_tokens<S>(a), chunk = (tokens + S::N - 1) / S::N;
  const int lo = min(tokens, a.rank * chunk), hi = min(tokens, lo + chunk);
  if constexpr (!has<S, ROWS>) return {lo, hi - lo};
  int below_lo = 0, below_hi = 0;
  for (int j = threadIdx.x & 31; j - (int)(threadIdx.x & 31) < a.n_rows; j += 32) {
    const i64 r = j < a.n_rows ? a.rows[j] : (i64)1 << 62;
    below_lo += __popc(__ballot_sync(~0u, r < lo));
    below_hi += __popc(__ballot_sync(~0u, r < hi));
  }
  return {below_lo, below_hi - below_lo};
}
template <class S> DEVICE size_t source_row(const Args& a, int i) {
  if constexpr (has<S, ROWS>) return a.rows[i];
  return i;
}
