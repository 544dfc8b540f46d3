// Rows of this rank's part of a vocabulary, zeros for other ranks' tokens. A block a token.
#include "ptx.cuh"

struct EmbedArgs {
  const u8* table;  // [count, vectors * 16 bytes]
  const void* ids;  // i64, or int where `wide` is 0
  u8* out;          // [tokens, vectors * 16 bytes]
  i64 first;        // token of the table's first row
  int count;
  int vectors;
  int wide;
};

extern "C" __global__ void __launch_bounds__(TW_THREADS) embed_rows(const __grid_constant__ EmbedArgs a) {
  const i64 token = blockIdx.x, id = a.wide ? ((const i64*)a.ids)[token] : ((const int*)a.ids)[token], row = id - a.first;
  const bool here = row >= 0 && row < a.count;
  for (int v = threadIdx.x; v < a.vectors; v += TW_THREADS)
    st_global(a.out + (token * a.vectors + v) * 16, here ? ld_global(a.table + (row * a.vectors + v) * 16) : Vec{});
}
