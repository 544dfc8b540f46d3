// The launch parameters and the cross-rank block barrier.
//
// Block b of every rank pairs with block b of every other rank, so no grid-wide synchronisation is needed and the
// blocks of a rank may start at different times.
//
// Memory ordering, once for all kernels:
//   start  signal: st.release.sys. Everything that earlier kernels of this stream wrote (my partial sums) is released to
//          the peers, because a kernel starts after its predecessor's writes are performed.
//          wait: ld.acquire.sys. The peers' partial sums may be read now. Bulk copies are another proxy: the thread that
//          issues them runs fence.proxy.async first.
//   end    all threads of the block have stored their rows to all ranks; bar.sync orders those stores before the
//          signalling warp's st.release.sys, which is cumulative. wait: the peers have finished reading my partial sums
//          and writing my rows (those of blocks b; together the blocks cover all rows), so that when the kernel
//          completes, the next kernel of this stream may overwrite the partial sums and read the rows.
//
//   Multicast: a multicast address is one more virtual address of memory that everybody else reads and writes by its own
//          address, which the memory model calls an alias: release and acquire order the two only with a proxy fence
//          between. So every thread that loads or stores by multicast addresses runs fence.proxy.alias twice: after the
//          bar.sync that follows the start's acquire and before its first multimem.ld_reduce; and after its last
//          multimem.st and before the bar.sync that precedes the end's release. multimem.ld_reduce and multimem.st are
//          relaxed at system scope in the generic proxy, so nothing else is needed: the flags are the same, by peer
//          addresses, and the release is cumulative over the stores of the block.
//
// A flag word is (signature << 32 | epoch). Epochs only grow and are kept on the device, one counter a block, so graphs
// replay and the number of blocks may change between calls as long as all ranks make the same calls in order. The
// signature is a hash of the launch shape: a mismatch between ranks is an error at the first barrier, not a hang.
//
// A wait that lasts longer than the time limit, or meets another signature, writes a record to pinned host memory and
// poisons the channel, on all ranks: every later wait and every later launch on it returns at once, so that the process can
// exit. A launch on a poisoned channel signals and pushes nothing, since what it computes is worth nothing: a rank that was
// late would take it for results. The first thread of a rank that finds the channel poisoned by a peer writes its record.
#pragma once
#include "ptx.cuh"

constexpr int MAX_RANKS = 8, MAX_BLOCKS = 256, RECORDED = MAX_BLOCKS;

typedef u8* const Pointers[MAX_RANKS];  // one address a rank

struct Args {                // the tables' first entry is the multicast address where the switch sums and stores
  const u8* x[MAX_RANKS];    // partial sums of every rank, row 0 of the call
  u8* out[MAX_RANKS];        // result rows of every rank, row 0 of the call
  u8* fp8[MAX_RANKS];        // e4m3 result rows of every rank, row 0 of the call
  u8* scales[MAX_RANKS];     // float32 scales of those rows, if each has its own
  u64* flags[MAX_RANKS];     // [block][source rank] words of every rank's memory, then the one that poisons
  u8* residual;              // local, row 0 of the call
  const u8* weight;          // local vectors of [hidden]
  const u8* post_weight;
  const u8* bias;
  const float* scale;        // local: the one scale of all e4m3 rows, if they don't have their own
  const i64* rows;           // sampled rows, ascending; null for all
  const int* row_count;      // real number of rows in device memory; null: `tokens`
  u32* state;                // local: an epoch a block, then whether there is a record
  u32* record;               // pinned host memory
  u64 time_limit;            // nanoseconds
  float eps, weight_offset;
  int rank, tokens, n_rows;
  u32 signature;
};

struct Inboxes { u8* of[MAX_RANKS]; };  // the one-shot kernel's inbox memory on every rank

enum Phase : u32 { START = 1, END = 2 };
enum Reason : u32 { TIME_LIMIT = 1, MISMATCH = 2, PEER_FAILED = 3, PEERS_MISMATCH = 4 };
constexpr int POISONED = MAX_BLOCKS * MAX_RANKS;  // flags: behind the blocks', the word that poisons (reason << 8 | rank + 1)

DEVICE u32 poisoned(const Args& a) { return ld_volatile_u32((const u32*)(a.flags[a.rank] + POISONED)); }
// What ends a wait: its time limit, a signature, or the channel, poisoned by a peer unless this rank has its record.
static __device__ __noinline__ void give_up(const Args& a, u32 reason, u32 phase, u32 peer, u32 want, u64 have) {
  const u32 word = poisoned(a);
  if (word && reason != MISMATCH) {
    peer = (word & 255) - 1;
    reason = word >> 8 == MISMATCH ? PEERS_MISMATCH : PEER_FAILED;
  }
  if (word && ld_volatile_u32(a.state + RECORDED)) return;
  if (atomicExch(a.state + RECORDED, 1u) == 0) {
    const u32 v[8] = {reason, phase, (u32)a.rank, peer, blockIdx.x, want, (u32)have, (u32)(have >> 32)};
    for (int i = 1; i < 8; ++i) st_volatile_u32(a.record + i, v[i]);
    fence_sys();
    st_volatile_u32(a.record, v[0]);
  }
  if (word) return;
  for (int p = 0; p < MAX_RANKS; ++p)
    if (a.flags[p]) st_release_sys(a.flags[p] + POISONED, reason << 8 | (a.rank + 1));
}

// Called by one whole warp, before it signals: whether the channel works.
DEVICE bool works(const Args& a) { return __all_sync(~0u, poisoned(a) == 0); }
// Called by one whole warp. `epoch` is the value that the peers will wait for.
template <int N> DEVICE void signal_peers(const Args& a, u32 epoch) {
  const int lane = threadIdx.x & 31;
  if (lane < N && lane != a.rank) st_release_sys(a.flags[lane] + blockIdx.x * MAX_RANKS + a.rank, (u64)a.signature << 32 | epoch);
}
// Called by one whole warp; false if the channel is poisoned. `ok`: whether it was not when the warp was to signal.
template <int N> DEVICE bool wait_peers(const Args& a, u32 epoch, u32 phase, bool ok = true) {
  const int lane = threadIdx.x & 31;
  u32 reason = ok ? 0 : PEER_FAILED;
  if (lane < N && lane != a.rank) {
    // A peer that gave up waiting for my end may have overwritten what I have just read. Looked at beside the flag.
    const bool late = phase == END && poisoned(a);
    const u64* flag = a.flags[a.rank] + blockIdx.x * MAX_RANKS + lane;
    u64 have = 0, began = 0;
    for (u32 spins = 1; !reason && (int)((u32)(have = ld_acquire_sys(flag)) - epoch) < 0; ++spins) {
      if (spins & 255) continue;
      const u64 now = globaltimer();
      if (!began) began = now;
      if (poisoned(a) || now - began > a.time_limit) reason = TIME_LIMIT;
    }
    // A peer may be one signal ahead, never more: only an equal epoch carries this call's signature.
    if (!reason && (u32)have == epoch && (u32)(have >> 32) != a.signature) reason = MISMATCH;
    if (!reason && late) reason = PEER_FAILED;
    if (reason) give_up(a, reason, phase, lane, epoch, have);
  }
  return __all_sync(~0u, reason == 0);
}
