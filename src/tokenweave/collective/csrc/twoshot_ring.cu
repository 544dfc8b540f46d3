// Two-shot all-reduce + residual + RMSNorm over peer-to-peer memory with few SMs, sm_90+.
//
// One producer warp keeps `depth` rows in flight: bulk copies of all ranks' partial sums and of the residual into a ring
// of shared-memory stages. GROUPS groups of threads each take a row at a time; the result goes to every rank with 16-byte
// stores. With few blocks an SM's outgoing port (32 bytes a cycle, stores and load requests together) is the limit; with
// many it is the link, and more than about half a MiB in flight then costs more than it hides, which is what `depth` is for.
#include "row.cuh"

constexpr int N = TW_RANKS, RANK = TW_RANK, STAGES = TW_STAGES;
typedef Shape<N, TW_HIDDEN, (Dtype)TW_DTYPE, TW_GROUP_THREADS, TW_GROUPS, TW_OPTIONS> S;
constexpr int V = S::V, GROUPS = S::GROUPS, PRODUCER = GROUPS * S::WARPS;
constexpr u32 STAGE_BYTES = (N + 1) * S::ROW_BYTES;  // a row of every rank, in rank order, then the residual's
constexpr u32 LOAD_BYTES = (N + has<S, HAS_RESIDUAL>) * S::ROW_BYTES;

struct Everyone {
  template <int K> static DEVICE void store(Pointers& table, size_t at, const u32 (&words)[K]) {
#pragma unroll
    for (int k = 1; k <= N; ++k) st_global(table[(RANK + k) % N] + at, words);
  }
};
DEVICE void wait(u64* barrier, u32 parity, const volatile int& arrived) {
  while (!mbarrier_try_wait(barrier, parity) && arrived >= 0) {}
}

// depth: stages in use, a multiple of GROUPS, so that a stage always serves the same group: a group that ran ahead would
// otherwise take an older phase of its barrier for this one.
extern "C" __global__ void __launch_bounds__(GROUPS * S::GT + 32, 1) twoshot_ring(const __grid_constant__ Args a, const int depth) {
  extern __shared__ __align__(128) u8 stages[];
  __shared__ u64 full[STAGES], empty[STAGES];
  __shared__ Reduction<S> reduction;
  __shared__ volatile int arrived;  // -1: the peers did not arrive
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, stride = gridDim.x;
  griddepcontrol_launch_dependents();
  if (threadIdx.x < STAGES) {
    mbarrier_init(&full[threadIdx.x], 1);
    mbarrier_init(&empty[threadIdx.x], 1);
    fence_proxy_async();
  }
  if (threadIdx.x == 0) arrived = 0;
  griddepcontrol_wait();  // before anything that an earlier kernel of the stream wrote
  const Owned owned = owned_rows<S>(a);
  const int mine = max(0, (owned.count - (int)blockIdx.x + stride - 1) / stride);
  auto row_of = [&](int i) { return owned.first + (int)blockIdx.x + i * stride; };
  __syncthreads();

  u32 epoch = 0;
  if (warp == PRODUCER) {
    epoch = a.state[blockIdx.x];
    bool ok = works(a);
    if (ok) signal_peers<N>(a, epoch + 1);
    auto load = [&](int i, int s, bool peers) {
      const size_t at = source_row<S>(a, row_of(i)) * S::ROW_BYTES;
      u8* stage = stages + s * STAGE_BYTES;
#pragma unroll
      for (int k = 1; k < N; ++k) {  // start at the next rank, so that the ranks don't all read from the same one
        const int p = (RANK + k) % N;
        if (peers) cp_async_bulk(stage + p * S::ROW_BYTES, a.x[p] + at, S::ROW_BYTES, &full[s]);
      }
      if (peers && i < depth) return;  // the first rows' local data is under way already
      if constexpr (has<S, HAS_RESIDUAL>) cp_async_bulk(stage + N * S::ROW_BYTES, a.residual + at, S::ROW_BYTES, &full[s]);
      cp_async_bulk(stage + RANK * S::ROW_BYTES, a.x[RANK] + at, S::ROW_BYTES, &full[s]);
    };
    const int ahead = min(mine, depth);
    if (lane == 0 && ok)
      for (int i = 0; i < ahead; ++i) { mbarrier_expect_tx(&full[i], LOAD_BYTES); load(i, i, false); }  // needs no barrier
    ok = wait_peers<N>(a, epoch + 1, START, ok);
    if (lane == 0) {
      if (!ok) arrived = -1;
      else {
        fence_proxy_async();  // the acquire was a generic access; the bulk copies are not
        for (int i = 0; i < ahead; ++i) load(i, i, true);
        int s = 0;
        u32 phase = 0;
        for (int i = ahead; i < mine; ++i) {
          wait(&empty[s], phase, arrived);
          mbarrier_expect_tx(&full[s], LOAD_BYTES);
          load(i, s, true);
          if (++s == depth) { s = 0; phase ^= 1; }
        }
      }
    }
    __syncwarp();
  } else {
    RowMath<S> math(a, reduction);
    int s = math.group;
    u32 phase = 0;
    for (int i = math.group; i < mine; i += GROUPS) {
      const size_t from = source_row<S>(a, row_of(i)) * S::ROW_BYTES + math.t * 16;
      const u8* stage = stages + s * STAGE_BYTES + math.t * 16;
      wait(&full[s], phase, arrived);
      if (arrived < 0) break;
      auto staged = [&](int p, int v) { return math.inside(v) ? *reinterpret_cast<const Vec*>(stage + p * S::ROW_BYTES + math.step(v)) : Vec{}; };
      Vec h[V];
      float squares[V];
      math.reduce(h, squares, staged, [&](int v) { return staged(N, v); });
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (math.inside(v)) st_global(a.residual + from + math.step(v), h[v]);
      const float inv = math.inverse_rms(squares);  // its barrier: every thread of the group has read the stage
      if constexpr (S::WARPS == 1) __syncwarp();
      if (math.t == 0) {
        fence_proxy_async_shared();  // the group's reads were generic accesses; the copies to come are not
        mbarrier_arrive(&empty[s]);
      }
      math.write<Everyone>(h, inv, row_of(i));
      s += GROUPS;
      if (s >= depth) { s -= depth; phase ^= 1; }
    }
  }
  __syncthreads();
  if (warp == PRODUCER && arrived >= 0) {
    signal_peers<N>(a, epoch + 2);
    wait_peers<N>(a, epoch + 2, END);
    if (lane == 0) a.state[blockIdx.x] = epoch + 2;
  }
}
