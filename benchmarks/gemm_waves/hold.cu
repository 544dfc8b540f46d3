// Blocks that hold their SMs, as the fused collective's do, until a flag is set or a time limit has passed.
// The dynamic shared memory that they are launched with leaves no room for a GEMM's block beside them.
struct HoldArgs {
    const volatile int* flag;
    unsigned long long limit_ns;
};

extern "C" __global__ void __launch_bounds__(TW_THREADS) hold(HoldArgs args) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        __nanosleep(500);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (!*args.flag && now - begin < args.limit_ns);
}
