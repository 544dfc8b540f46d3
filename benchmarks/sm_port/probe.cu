// How many bytes a cycle one SM stores and loads: rows of 8 KiB, to local memory, to a peer's, and to both.
#include "ptx.cuh"

struct Rows { u8* at[3]; int n, rows; };

// 512 threads, 16-byte stores
extern "C" __global__ void __launch_bounds__(512, 1) store(const __grid_constant__ Rows a) {
  for (int r = blockIdx.x; r < a.rows; r += gridDim.x)
    for (int k = 0; k < a.n; ++k) st_global(a.at[k] + (size_t)r * 8192 + threadIdx.x * 16, Vec{{(u32)r, (u32)r, (u32)r, (u32)r}});
}

// one thread, bulk stores of a row out of shared memory, six in flight
extern "C" __global__ void __launch_bounds__(512, 1) bulk_store(const __grid_constant__ Rows a) {
  extern __shared__ __align__(128) u8 out[];
  for (int i = threadIdx.x; i < 8 * 8192 / 4; i += 512) reinterpret_cast<u32*>(out)[i] = i;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x) return;
  for (int r = blockIdx.x; r < a.rows; r += gridDim.x) {
    for (int k = 0; k < a.n; ++k)
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(a.at[k] + (size_t)r * 8192), "r"(smem_address(out + (r & 7) * 8192)), "r"(8192) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 6;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// one thread, bulk loads of a row into shared memory, a ring of eight
extern "C" __global__ void __launch_bounds__(512, 1) bulk_load(const __grid_constant__ Rows a) {
  extern __shared__ __align__(128) u8 ring[];
  __shared__ u64 full[8];
  if (threadIdx.x) return;
  for (int i = 0; i < 8; ++i) mbarrier_init(&full[i], 1);
  fence_proxy_async();
  const int mine = (a.rows - (int)blockIdx.x + gridDim.x - 1) / gridDim.x;
  auto load = [&](int i) {
    mbarrier_expect_tx(&full[i % 8], 8192 * a.n);
    for (int k = 0; k < a.n; ++k) cp_async_bulk(ring + (i % 8) * 24576 + k * 8192, a.at[k] + (size_t)(blockIdx.x + i * gridDim.x) * 8192, 8192, &full[i % 8]);
  };
  for (int i = 0; i < min(mine, 8); ++i) load(i);
  for (int i = 0; i < mine; ++i) {
    while (!mbarrier_try_wait(&full[i % 8], (i / 8) & 1)) {}
    if (i + 8 < mine) load(i + 8);
  }
}
