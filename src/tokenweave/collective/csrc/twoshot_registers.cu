// Two-shot all-reduce + residual + RMSNorm over peer-to-peer memory with plain loads: sm_80+, any dtype. Also the better
// choice on newer GPUs where a row of all peers does not fit in shared memory.
#include "row.cuh"

constexpr int N = TW_RANKS, RANK = TW_RANK;
typedef Shape<N, TW_HIDDEN, (Dtype)TW_DTYPE, TW_GROUP_THREADS, TW_GROUPS, TW_OPTIONS> S;
constexpr int V = S::V, GROUPS = S::GROUPS;

extern "C" __global__ void __launch_bounds__(GROUPS * S::GT, 1) twoshot_registers(const __grid_constant__ Args a) {
  __shared__ Reduction<S> reduction;
  __shared__ int arrived;
  u32 epoch = 0;
  if (threadIdx.x < 32) {
    epoch = a.state[blockIdx.x];
    signal_peers<N>(a, epoch + 1);
  }
  const Owned owned = owned_rows<S>(a);
  RowMath<S> math(a, reduction);
  if (threadIdx.x < 32) {
    const bool ok = !poisoned(a) && wait_peers<N>(a, epoch + 1, START);
    if (threadIdx.x == 0) arrived = ok;
  }
  __syncthreads();
  if (!arrived) return;

  // Blocks stay in step by group: a group without a row of its own skips the loop, and no barrier spans groups.
  for (int i = blockIdx.x * GROUPS + math.group; i < owned.count; i += gridDim.x * GROUPS) {
    const int row = owned.first + i;
    const size_t from = source_row<S>(a, row) * S::ROW_BYTES + math.t * 16, to = (size_t)row * S::ROW_BYTES + math.t * 16;
    Vec x[N][V] = {}, res[V] = {};
#pragma unroll
    for (int k = 1; k <= N; ++k)  // the peers first: their data is far away
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (math.inside(v)) x[(RANK + k) % N][v] = ld_global(a.x[(RANK + k) % N] + from + math.step(v));
    if constexpr (has<S, HAS_RESIDUAL>)
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (math.inside(v)) res[v] = ld_global(a.residual + from + math.step(v));
    Vec h[V];
    const float ss = math.reduce(h, [&](int p, int v) { return x[p][v]; }, [&](int v) { return res[v]; });
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (math.inside(v)) st_global(a.residual + from + math.step(v), h[v]);
    math.scale(h, math.inverse_rms(ss), [&](int v, const Vec& y) {
#pragma unroll
      for (int k = 1; k <= N; ++k) st_global(a.out[(RANK + k) % N] + to + math.step(v), y);
    });
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    signal_peers<N>(a, epoch + 2);
    wait_peers<N>(a, epoch + 2, END);
    if (threadIdx.x == 0) a.state[blockIdx.x] = epoch + 2;
  }
}
