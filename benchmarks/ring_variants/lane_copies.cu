// The two-shot kernel with another way of keeping rows in flight: every thread copies the vectors that it will read itself,
// 16 bytes each (cp.async), into stages of its own group. Nothing is shared between threads but the norm's sum, so there are no
// barriers of stages and no producer; and a load request takes half a cycle of the SM's outgoing port, where a bulk
// copy's takes 0.86 (h200x2-counters.json).
#include "row.cuh"

constexpr int N = TW_RANKS, RANK = TW_RANK, STAGES = TW_STAGES;
typedef Shape<N, TW_HIDDEN, (Dtype)TW_DTYPE, TW_GROUP_THREADS, TW_GROUPS, TW_OPTIONS> S;
constexpr int V = S::V, GROUPS = S::GROUPS, SIGNALLER = GROUPS * S::WARPS;
constexpr u32 STAGE_BYTES = (N + 1) * S::ROW_BYTES;  // a row of every rank, in rank order, then the residual's

struct Everyone {
  template <int K> static DEVICE void store(Pointers& table, size_t at, const u32 (&words)[K]) {
#pragma unroll
    for (int k = 1; k <= N; ++k) st_global(table[(RANK + k) % N] + at, words);
  }
};
DEVICE void cp_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(shared)), "l"(global) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
DEVICE void cp_async_wait_for_oldest(int groups) {  // of so many that are in flight
  switch (groups) {
    case 1: return cp_async_wait<0>();
    case 2: return cp_async_wait<1>();
    case 3: return cp_async_wait<2>();
    case 4: return cp_async_wait<3>();
    case 5: return cp_async_wait<4>();
    case 6: return cp_async_wait<5>();
    case 7: return cp_async_wait<6>();
    default: return cp_async_wait<7>();
  }
}

extern "C" __global__ void __launch_bounds__(GROUPS * S::GT + 32, 1) twoshot_ring(const __grid_constant__ Args a, const int depth) {
  extern __shared__ __align__(128) u8 stages[];
  __shared__ Reduction<S> reduction;
  __shared__ int arrived;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, stride = gridDim.x;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();  // before anything that an earlier kernel of the stream wrote
  u32 epoch = 0;
  if (warp == SIGNALLER) {
    epoch = a.state[blockIdx.x];
    signal_peers<N>(a, epoch + 1);
  }
  const Owned owned = owned_rows<S>(a);
  const int mine = max(0, (owned.count - (int)blockIdx.x + stride - 1) / stride);
  auto row_of = [&](int i) { return owned.first + (int)blockIdx.x + i * stride; };
  const int ring = min(8, depth / GROUPS);  // stages of a group
  if (warp == SIGNALLER) {
    const bool ok = !poisoned(a) && wait_peers<N>(a, epoch + 1, START);
    if (lane == 0) arrived = ok;
    __syncthreads();
  } else {
    RowMath<S> math(a, reduction);
    u8* const mine_in_stages = stages + math.group * ring * STAGE_BYTES + math.t * 16;
    auto copy = [&](int i, int s, int p) {  // p: a rank, or N for the residual
      const u8* from = (p < N ? a.x[p] : a.residual) + source_row<S>(a, row_of(i)) * S::ROW_BYTES + math.t * 16;
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (math.inside(v)) cp_async(mine_in_stages + s * STAGE_BYTES + p * S::ROW_BYTES + math.step(v), from + math.step(v));
    };
    auto copy_peers = [&](int i, int s) {
#pragma unroll
      for (int k = 1; k < N; ++k) copy(i, s, (RANK + k) % N);
    };
    auto copy_local = [&](int i, int s) {
      if constexpr (has<S, HAS_RESIDUAL>) copy(i, s, N);
      copy(i, s, RANK);
    };
    for (int s = 0; s < ring; ++s)
      if (math.group + s * GROUPS < mine) copy_local(math.group + s * GROUPS, s);  // needs no barrier
    __syncthreads();
    if (arrived) {
      for (int s = 0; s < ring; ++s) {
        if (math.group + s * GROUPS < mine) copy_peers(math.group + s * GROUPS, s);
        cp_async_commit();
      }
      int s = 0;
      for (int i = math.group; i < mine; i += GROUPS) {
        const size_t from = source_row<S>(a, row_of(i)) * S::ROW_BYTES + math.t * 16;
        const u8* stage = mine_in_stages + s * STAGE_BYTES;
        cp_async_wait_for_oldest(ring);
        auto staged = [&](int p, int v) { return math.inside(v) ? *reinterpret_cast<const Vec*>(stage + p * S::ROW_BYTES + math.step(v)) : Vec{}; };
        Vec h[V];
        float squares[V];
        math.reduce(h, squares, staged, [&](int v) { return staged(N, v); });
        const int next = i + ring * GROUPS;  // into the stage that was read just now, by the same threads
        if (next < mine) { copy_peers(next, s); copy_local(next, s); }
        cp_async_commit();  // of nothing too: the number in flight stays the same
#pragma unroll
        for (int v = 0; v < V; ++v)
          if (math.inside(v)) st_global(a.residual + from + math.step(v), h[v]);
        math.write<Everyone>(h, math.inverse_rms(squares), row_of(i));
        if (++s == ring) s = 0;
      }
    }
    cp_async_wait<0>();
  }
  __syncthreads();
  if (warp == SIGNALLER && arrived) {
    signal_peers<N>(a, epoch + 2);
    wait_peers<N>(a, epoch + 2, END);
    if (lane == 0) a.state[blockIdx.x] = epoch + 2;
  }
}
