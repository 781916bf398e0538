// How many operations on float32 a processor finishes when it does nothing
// else: `kinds` of chains, each step of which waits for the one before it, as
// many side by side as keep its units busy.
#include <cstdint>

namespace {

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif
typedef float V __attribute__((vector_size(4 * VL)));
typedef int32_t I __attribute__((vector_size(4 * VL)));

volatile float drain;  // results go there, so that they are wanted

// chains of fused multiplications, additions, divisions; of logic, which is
// done TWICE a round
template <int FUSED, int SUMS, int LOGIC, int QUOTIENTS>
int64_t run(int64_t rounds) {
    V f[FUSED + 1], s[SUMS + 1], q[QUOTIENTS + 1];
    I l[LOGIC + 1];
    for (int i = 0; i <= FUSED; i++) f[i] = V{} + (float)i;
    for (int i = 0; i <= SUMS; i++) s[i] = V{} + (float)i;
    for (int i = 0; i <= LOGIC; i++) l[i] = I{} + i;
    for (int i = 0; i <= QUOTIENTS; i++) q[i] = V{} + (float)(i + 1);
    const V half = V{} + 0.5f, some = V{} + 1.5f;
    const I mask = I{} + 0x2a55aa5;
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 16
        for (int i = 0; i < FUSED; i++) f[i] = f[i] * half + some;
#pragma GCC unroll 16
        for (int i = 0; i < LOGIC; i++) l[i] = mask - l[i];
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++) s[i] = s[i] + some;
#pragma GCC unroll 16
        for (int i = 0; i < LOGIC; i++) l[i] = l[i] ^ mask;
#pragma GCC unroll 16
        for (int i = 0; i < QUOTIENTS; i++) q[i] = some / q[i];
    }
    V all{};
    for (int i = 0; i < FUSED; i++) all += f[i];
    for (int i = 0; i < SUMS; i++) all += s[i];
    for (int i = 0; i < QUOTIENTS; i++) all += q[i];
    for (int i = 0; i < LOGIC; i++) all += (V)l[i];
    float sum = 0;
    for (int i = 0; i < VL; i++) sum += all[i];
    drain = sum;
    return rounds * VL * (FUSED + SUMS + 2 * LOGIC + QUOTIENTS);
}

}  // namespace

extern "C" {

// Operations that all threads together have done. Kinds 0 to 3: fused
// multiplications alone, with logic, with sums and logic, sums and logic; 4:
// divisions.
int64_t benchmarks_run(int kind, int threads, int64_t rounds) {
    int64_t done = 0;
#pragma omp parallel num_threads(threads) reduction(+ : done)
    done += kind == 0   ? run<10, 0, 0, 0>(rounds)
            : kind == 1 ? run<8, 0, 2, 0>(rounds)
            : kind == 2 ? run<8, 4, 2, 0>(rounds)
            : kind == 3 ? run<0, 6, 4, 0>(rounds)
                        : run<0, 0, 0, 10>(rounds);
    return done;
}
}
