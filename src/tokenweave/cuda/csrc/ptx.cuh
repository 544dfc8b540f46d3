// One-line wrappers named after the instruction they issue. No headers: NVRTC compiles this without a CUDA toolkit.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

struct alignas(16) Vec {  // 16 bytes, the unit of every global access
  u32 w[4];
};

DEVICE u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE u64 globaltimer() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }

// ---- global memory
DEVICE Vec ld_global(const void* p) {  // not cached in L1: every byte is read once
  Vec v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p) : "memory");
  return v;
}
DEVICE Vec ld_global_nc(const void* p) {  // no asm: without `volatile` it would run ahead of the condition that guards it
  const uint4 q = __ldg((const uint4*)p);
  return Vec{{q.x, q.y, q.z, q.w}};
}
DEVICE Vec ld_volatile(const void* p) {
  Vec v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p) : "memory");
  return v;
}
DEVICE void st_global(void* p, const u32 (&w)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
DEVICE void st_global(void* p, const u32 (&w)[2]) { asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory"); }
DEVICE void st_global(void* p, const u32 (&w)[1]) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(w[0]) : "memory"); }
DEVICE void st_global(void* p, const Vec& v) { st_global(p, v.w); }
DEVICE void st_release_sys(u64* p, u64 v) { asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE u64 ld_acquire_sys(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u32 ld_volatile_u32(const u32* p) { u32 v; asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
DEVICE void st_volatile_u32(u32* p, u32 v) { asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// ---- asynchronous bulk copies and their barriers (sm_90+)
#if __CUDA_ARCH__ >= 900
DEVICE void mbarrier_init(u64* b, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(b)), "r"(count) : "memory"); }
DEVICE void mbarrier_expect_tx(u64* b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(b)), "r"(bytes) : "memory");
}
DEVICE void mbarrier_arrive(u64* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(b)) : "memory"); }
DEVICE bool mbarrier_try_wait(u64* b, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(smem_address(b)), "r"(parity) : "memory");
  return done;
}
DEVICE void cp_async_bulk(void* shared, const void* global, u32 bytes, u64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(smem_address(shared)), "l"(global), "r"(bytes), "r"(smem_address(b)) : "memory");
}
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

// ---- multicast addresses (sm_90+): the switch sums what is at the address on every GPU, and writes there on every GPU
#if __CUDA_ARCH__ >= 900
#define MULTIMEM_LD_REDUCE(NAME, TYPE)                                                                               \
  DEVICE Vec NAME(const void* p) {                                                                                   \
    Vec v;                                                                                                           \
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add" TYPE " {%0,%1,%2,%3}, [%4];"                            \
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p) : "memory");                      \
    return v;                                                                                                        \
  }
MULTIMEM_LD_REDUCE(multimem_ld_reduce_bf16, ".acc::f32.v4.bf16x2")
MULTIMEM_LD_REDUCE(multimem_ld_reduce_fp16, ".acc::f32.v4.f16x2")
#undef MULTIMEM_LD_REDUCE
DEVICE Vec multimem_ld_reduce_fp32(const void* p) {
  float f[4];
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3]) : "l"(p) : "memory");
  return {{__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3])}};
}
DEVICE void multimem_st(void* p, const u32 (&w)[4]) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(__uint_as_float(w[0])),
               "f"(__uint_as_float(w[1])), "f"(__uint_as_float(w[2])), "f"(__uint_as_float(w[3])) : "memory");
}
DEVICE void multimem_st(void* p, const u32 (&w)[2]) {
  asm volatile("multimem.st.relaxed.sys.global.v2.f32 [%0], {%1,%2};" ::"l"(p), "f"(__uint_as_float(w[0])), "f"(__uint_as_float(w[1])) : "memory");
}
DEVICE void multimem_st(void* p, const u32 (&w)[1]) { asm volatile("multimem.st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(w[0]) : "memory"); }
#endif
DEVICE void fence_proxy_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// ---- programmatic dependent launch (sm_90+; elsewhere kernels start after their predecessor as always)
#if __CUDA_ARCH__ >= 900
DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void griddepcontrol_wait() {}
DEVICE void griddepcontrol_launch_dependents() {}
#endif

// ---- within a block
DEVICE void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
