// Two-shot all-reduce + residual + RMSNorm over peer-to-peer memory with plain loads: sm_80+, any dtype. Also the better
// choice on newer GPUs where a row of all peers does not fit in shared memory.
#include "twoshot.cuh"

struct Peers {
  static constexpr int PARTS = N;
  static constexpr bool ALIASED = false;
  template <class S> static DEVICE Vec load(const Args& a, int p, size_t at) { return ld_global(a.x[p] + at); }
  template <int K> static DEVICE void store(Pointers& table, size_t at, const u32 (&words)[K]) {
#pragma unroll
    for (int k = 1; k <= N; ++k) st_global(table[(RANK + k) % N] + at, words);
  }
};

extern "C" __global__ void __launch_bounds__(GROUPS * TW_GROUP_THREADS, 1) twoshot_registers(const __grid_constant__ Args a) { twoshot<Peers>(a); }
