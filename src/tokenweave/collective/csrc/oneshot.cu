// One-shot all-reduce + residual + RMSNorm for small batches: every rank pushes its partial sums into the others' inboxes
// and reduces every row itself (replicated residual). The data announces itself, so there is no barrier at all.
//
// An inbox word that has not arrived holds the sentinel: two negative zeros (fp32: one). A sender turns that pattern into
// positive zeros, which sum alike. Three inboxes take turns: call e uses inbox e % 3 and clears the one of call e - 1.
// A peer writes that one again in call e + 2, which it can only reach after my push of call e + 1, that is after this
// kernel has ended. The clear covers the rows that the inbox last held.
//
// Blocks wait for blocks of the same index only after pushing their own rows, and start in order, so they need not all be
// resident. Block 0 also exchanges a flag word with the launch shape (see barrier.cuh), checked once its row is done.
#include "row.cuh"

constexpr int N = TW_RANKS, RANK = TW_RANK;
typedef Shape<N, TW_HIDDEN, (Dtype)TW_DTYPE, TW_GROUP_THREADS, 1, TW_OPTIONS, TW_NORM_THREADS> S;
constexpr int V = S::V;
constexpr bool HELD = S::GT <= 256 || N * V <= 20;  // what arrives fits in registers; else it is read once more for the sum
constexpr int AT_ONCE = HELD ? N : 4;               // peers whose vectors are looked at together
constexpr u32 SENTINEL = S::D == Dtype::fp32 ? 0x80000000u : 0x80008000u;
enum State : int { CALLS = RECORDED + 1, DONE = RECORDED + 2, EXTENT = RECORDED + 3 };  // further words of Args::state

DEVICE Vec announce(Vec v) {
#pragma unroll
  for (int k = 0; k < 4; ++k) v.w[k] = v.w[k] == SENTINEL ? 0u : v.w[k];
  return v;
}
struct Here {  // results stay on this rank
  template <int K> static DEVICE void store(Pointers& table, size_t at, const u32 (&words)[K]) { st_global(table[RANK] + at, words); }
};
DEVICE bool absent(const Vec& v) { return v.w[0] == SENTINEL || v.w[1] == SENTINEL || v.w[2] == SENTINEL || v.w[3] == SENTINEL; }

extern "C" __global__ void __launch_bounds__(S::GT, 1) oneshot(const __grid_constant__ Args a, const __grid_constant__ Inboxes inbox, int inbox_rows) {
  __shared__ Reduction<S> reduction;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();  // before anything that an earlier kernel of the stream wrote
  u32 epoch = 0;
  if (blockIdx.x == 0 && threadIdx.x < 32) {
    epoch = a.state[0];
    if (!poisoned(a)) signal_peers<N>(a, epoch + 1);
  }
  const u32 call = a.state[CALLS];
  RowMath<S> math(a, reduction);
  const size_t plane = (size_t)inbox_rows * S::ROW_BYTES;  // one source's rows in one inbox
  const size_t now = (size_t)(call % 3) * N * plane, before = (size_t)((call + 2) % 3) * N * plane;
  const int n = has<S, ROWS> ? a.n_rows : call_tokens<S>(a), row = blockIdx.x;
  const size_t at = (size_t)row * S::ROW_BYTES + math.t * 16;
  bool ok = !poisoned(a);
  if (row < n) {
    const size_t from = source_row<S>(a, row) * S::ROW_BYTES + math.t * 16;
    Vec own[V] = {}, x[HELD ? N : 1][V] = {}, res[V] = {};
    auto arrived = [&](int p, int v) { return ld_volatile(inbox.of[RANK] + now + p * plane + at + math.step(v)); };
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (math.inside(v)) own[v] = announce(ld_global(a.x[RANK] + from + math.step(v)));
#pragma unroll
    for (int k = 1; k < N; ++k)
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (ok && math.inside(v)) st_global(inbox.of[(RANK + k) % N] + now + RANK * plane + at + math.step(v), own[v]);
    if constexpr (has<S, HAS_RESIDUAL>)
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (math.inside(v)) res[v] = ld_global(a.residual + from + math.step(v));
    u64 began = 0;
    for (u32 spins = 1; ok; ++spins) {
      bool waiting = false;
      int missing = 0;
#pragma unroll
      for (int k = 1; k < N; ++k)
#pragma unroll
        for (int v = 0; v < V; ++v)
          if (HELD && math.inside(v)) x[HELD ? (RANK + k) % N : 0][v] = arrived((RANK + k) % N, v);
#pragma unroll AT_ONCE
      for (int k = 1; k < N; ++k)
#pragma unroll
        for (int v = 0; v < V; ++v)
          if (math.inside(v) && absent(HELD ? x[HELD ? (RANK + k) % N : 0][v] : arrived((RANK + k) % N, v))) { waiting = true; missing = (RANK + k) % N; }
      if (!waiting) break;
      if (spins & 255) continue;
      const u64 t = globaltimer();
      if (!began) began = t;
      if (poisoned(a) || t - began > a.time_limit) {
        give_up(a, TIME_LIMIT, START, missing, call, 0);
        ok = false;
#pragma unroll
        for (int p = 0; p < (HELD ? N : 1); ++p)
#pragma unroll
          for (int v = 0; v < V; ++v) x[p][v] = Vec{};  // so that they need not outlive the call, which takes registers
      }
    }
    auto part = [&](int p, int v) {
      if (p == RANK) return own[v];
      if constexpr (HELD) return x[p][v];
      else return math.inside(v) ? arrived(p, v) : Vec{};
    };
    Vec h[V];
    float squares[V];
    math.reduce(h, squares, part, [&](int v) { return res[v]; });
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (ok && math.inside(v)) st_global(a.residual + from + math.step(v), h[v]);
    math.write<Here>(h, math.inverse_rms(squares), row);
  }
  const int extent = a.state[EXTENT + (call + 2) % 3];  // rows that the last call left in its inbox
  for (int r = row; r < extent; r += gridDim.x)
#pragma unroll
    for (int k = 1; k < N; ++k)
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (math.inside(v))
          st_global(inbox.of[RANK] + before + (RANK + k) % N * plane + (size_t)r * S::ROW_BYTES + math.t * 16 + math.step(v), Vec{{SENTINEL, SENTINEL, SENTINEL, SENTINEL}});
  if (!ok) give_up(a, PEER_FAILED, START, 0, call, 0);  // poisoned from the start: no thread of this rank may have met it in a wait
  if (blockIdx.x == 0 && threadIdx.x < 32) {
    if (__all_sync(~0u, ok)) wait_peers<N>(a, epoch + 1, START);
    if (threadIdx.x == 0) a.state[0] = epoch + 1;
  }
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(a.state + DONE, 1u) == gridDim.x - 1) {  // the last block of the grid
    a.state[DONE] = 0;
    a.state[EXTENT + call % 3] = n;
    a.state[CALLS] = call + 1;
  }
}
