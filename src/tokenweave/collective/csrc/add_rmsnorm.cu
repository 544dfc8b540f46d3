// Residual add + RMSNorm of rows that are reduced already: what follows an all-reduce on the sequential path. A block a row,
// bound by HBM: a row is read and written once in each of the two tensors.
#include "row.cuh"

typedef Shape<1, TW_HIDDEN, (Dtype)TW_DTYPE, TW_GROUP_THREADS, 1, TW_OPTIONS> S;
constexpr int V = S::V;

// 1024 threads an SM keep enough loads in flight for HBM; more registers a thread would not.
extern "C" __global__ void __launch_bounds__(S::GT, 1024 / S::GT) add_rmsnorm(const __grid_constant__ Args a) {
  __shared__ Reduction<S> reduction;
  RowMath<S> math(a, reduction);
  const size_t at = (size_t)blockIdx.x * S::ROW_BYTES + math.t * 16;
  Vec x[V] = {}, res[V] = {};
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (math.inside(v)) x[v] = ld_global(a.x[0] + at + math.step(v));
  if constexpr (has<S, HAS_RESIDUAL>)
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (math.inside(v)) res[v] = ld_global(a.residual + at + math.step(v));
  Vec h[V];
  float squares[V];
  math.reduce(h, squares, [&](int, int v) { return x[v]; }, [&](int v) { return res[v]; });
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (math.inside(v)) st_global(a.residual + at + math.step(v), h[v]);
  math.scale(h, math.inverse_rms(squares), [&](int v, const Vec& y) { st_global(a.out[0] + at + math.step(v), y); });
}
