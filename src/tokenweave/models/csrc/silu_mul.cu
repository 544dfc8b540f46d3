// silu(gate) * up of gated MLPs, in fp32 with one rounding. gate and up are the halves of each row of [rows, 2 * columns].
#include "numeric.cuh"

typedef Numeric<(Dtype)TW_DTYPE> Num;
constexpr int E = Num::ELEMENTS;

struct SiluArgs {
  const u8* gate_up;  // [rows, 2 * columns]
  u8* out;            // [rows, columns]
  int vectors;        // 16-byte vectors of a row of `out`
  int rows;
};

extern "C" __global__ void __launch_bounds__(TW_THREADS) silu_mul(const __grid_constant__ SiluArgs a) {
  const i64 total = (i64)a.rows * a.vectors, stride = (i64)gridDim.x * TW_THREADS;
  for (i64 i = (i64)blockIdx.x * TW_THREADS + threadIdx.x; i < total; i += stride) {
    const i64 row = i / a.vectors, column = i - row * a.vectors;
    const u8* gate = a.gate_up + (row * 2 * a.vectors + column) * 16;
    float g[E], u[E];
    Num::unpack(g, ld_global(gate));
    Num::unpack(u, ld_global(gate + (i64)a.vectors * 16));
#pragma unroll
    for (int k = 0; k < E; ++k) g[k] = g[k] / (1.0f + __expf(-g[k])) * u[k];
    st_global(a.out + i * 16, Num::pack(g));
  }
}
