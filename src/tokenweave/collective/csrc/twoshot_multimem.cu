// Two-shot all-reduce + residual + RMSNorm over NVSwitch multicast, sm_90+: the switch sums a row while it is read, in
// fp32, and rounds the sum to the rows' dtype; a store goes to all GPUs at once. The switch adds in an order of its own:
// ranks get equal bits, because a row has one owner, but not those of the peer-to-peer kernels.
//
// TW_EMULATED: peer-to-peer loops in place of the two multimem instructions, for tests where there is no multicast.
#include "twoshot.cuh"

struct Switch {
  static constexpr int PARTS = 1;
  static constexpr bool ALIASED = true;
  template <class S> static DEVICE Vec load(const Args& a, int, size_t at) { return load_sum<S>(a, at); }
  template <int K> static DEVICE void store(Pointers& table, size_t at, const u32 (&words)[K]) { store_all(table, at, words); }

 private:
#if TW_EMULATED
  template <class S> static DEVICE Vec load_sum(const Args& a, size_t at) {
    float sum[S::E];
    S::Num::unpack(sum, ld_global(a.x[0] + at));
#pragma unroll
    for (int p = 1; p < N; ++p) S::Num::add(sum, ld_global(a.x[p] + at));
    return S::Num::pack(sum);
  }
  template <int K> static DEVICE void store_all(Pointers& table, size_t at, const u32 (&words)[K]) {
#pragma unroll
    for (int k = 1; k <= N; ++k) st_global(table[(RANK + k) % N] + at, words);
  }
#else
  template <class S> static DEVICE Vec load_sum(const Args& a, size_t at) {
    if constexpr (S::D == Dtype::bf16) return multimem_ld_reduce_bf16(a.x[0] + at);
    else if constexpr (S::D == Dtype::fp16) return multimem_ld_reduce_fp16(a.x[0] + at);
    else return multimem_ld_reduce_fp32(a.x[0] + at);
  }
  template <int K> static DEVICE void store_all(Pointers& table, size_t at, const u32 (&words)[K]) { multimem_st(table[0] + at, words); }
#endif
};

extern "C" __global__ void __launch_bounds__(GROUPS * TW_GROUP_THREADS, 1) twoshot_multimem(const __grid_constant__ Args a) { twoshot<Switch>(a); }
