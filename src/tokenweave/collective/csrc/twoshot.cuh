// Two-shot all-reduce + residual + RMSNorm with plain loads and stores: one body for peers' memory and for multicast.
//
// `Link` says how vectors come from all ranks and how words go to all of them:
//   PARTS                          1 or N: whether the sum is made on the way
//   load<S>(a, p, at)              the 16 bytes at byte `at` of rank p's partial sums, or of the sum
//   store(table, at, words)        1, 2 or 4 words to byte `at` of what the table points to on every rank
//   ALIASED                        whether it uses multicast addresses: see barrier.cuh
#pragma once
#include "row.cuh"

constexpr int N = TW_RANKS, RANK = TW_RANK, GROUPS = TW_GROUPS;

template <class Link> DEVICE void twoshot(const Args& a) {
  // A sum that the switch made is one partial sum; who owns which row is a matter of all ranks.
  typedef Shape<Link::PARTS, TW_HIDDEN, (Dtype)TW_DTYPE, TW_GROUP_THREADS, GROUPS, TW_OPTIONS> S;
  typedef Shape<N, TW_HIDDEN, (Dtype)TW_DTYPE, TW_GROUP_THREADS, GROUPS, TW_OPTIONS> Whole;
  constexpr int V = S::V;
  constexpr bool AHEAD = Link::PARTS <= 5;  // all of a row's loads before the first sum; more ranks than that don't fit in registers
  __shared__ Reduction<S> reduction;
  __shared__ int arrived;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();  // before anything that an earlier kernel of the stream wrote
  u32 epoch = 0;
  bool ok = true;
  if (threadIdx.x < 32) {
    epoch = a.state[blockIdx.x];
    ok = works(a);
    if (ok) signal_peers<N>(a, epoch + 1);
  }
  const Owned owned = owned_rows<Whole>(a);
  RowMath<S> math(a, reduction);
  if (threadIdx.x < 32) {
    ok = wait_peers<N>(a, epoch + 1, START, ok);
    if (threadIdx.x == 0) arrived = ok;
  }
  __syncthreads();
  if (!arrived) return;
  if constexpr (Link::ALIASED) fence_proxy_alias();

  // Blocks stay in step by group: a group without a row of its own skips the loop, and no barrier spans groups.
  for (int i = blockIdx.x * GROUPS + math.group; i < owned.count; i += gridDim.x * GROUPS) {
    const int row = owned.first + i;
    const size_t from = source_row<S>(a, row) * S::ROW_BYTES + math.t * 16;
    Vec x[AHEAD ? Link::PARTS : 1][V] = {}, res[V] = {};
    if constexpr (AHEAD)
#pragma unroll
      for (int k = 1; k <= Link::PARTS; ++k)  // the peers first: their data is far away
#pragma unroll
        for (int v = 0; v < V; ++v)
          if (math.inside(v)) x[(RANK + k) % Link::PARTS][v] = Link::template load<S>(a, (RANK + k) % Link::PARTS, from + math.step(v));
    auto part = [&](int p, int v) {
      if constexpr (AHEAD) return x[p][v];
      else return math.inside(v) ? Link::template load<S>(a, p, from + math.step(v)) : Vec{};
    };
    if constexpr (has<S, HAS_RESIDUAL>)
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (math.inside(v)) res[v] = ld_global(a.residual + from + math.step(v));
    Vec h[V];
    float squares[V];
    math.reduce(h, squares, part, [&](int v) { return res[v]; });
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (math.inside(v)) st_global(a.residual + from + math.step(v), h[v]);
    math.template write<Link>(h, math.inverse_rms(squares), row);
  }
  if constexpr (Link::ALIASED) fence_proxy_alias();
  __syncthreads();
  if (threadIdx.x < 32) {
    signal_peers<N>(a, epoch + 2);
    wait_peers<N>(a, epoch + 2, END);
    if (threadIdx.x == 0) a.state[blockIdx.x] = epoch + 2;
  }
}
