// Normality normalization of float32 units in one visit each; derived and
// tested in the chapter "A kernel in C++". A unit is gathered into contiguous
// scratch memory that stays in the cache; sums run in float for 64 vectors at
// most, then in double.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cstdlib>
#include <limits>
#include <new>
#include <optional>
#include <type_traits>
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored \
    "-Wmaybe-uninitialized"  // GCC 12 gives this one about its own headers
#endif
#include <immintrin.h>
#endif

#if defined(_OPENMP)
// not from omp.h, which a compiler can lack whose runtime is there
extern "C" int omp_get_thread_num(void);
#endif

// lambdas that GCC would call, once for each vector
#define INLINED __attribute__((always_inline))

namespace {

// Which kernel this is: VL numbers a vector; TABLES are looked up in registers;
// FUSED: a·b + c has an instruction
#if defined(__AVX512F__)
#define KERNEL_512  // needs the foundation of AVX-512 only
constexpr int VL = 16;
#else
#if defined(__AVX2__)
#define KERNEL_256
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif
#endif
#if defined(KERNEL_512) || defined(KERNEL_256)
#define KERNEL_TABLES
constexpr bool TABLES = true;
#else
constexpr bool TABLES = false;
#endif
#if defined(KERNEL_512) || (defined(KERNEL_256) && defined(__FMA__)) \
    || defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
constexpr bool FUSED = true;
#else
constexpr bool FUSED = false;
#endif
typedef float V __attribute__((vector_size(4 * VL)));
typedef int32_t I __attribute__((vector_size(4 * VL)));
typedef uint32_t U __attribute__((vector_size(4 * VL)));
typedef uint64_t W __attribute__((vector_size(4 * VL)));
typedef float Unaligned
    __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef float Aligned __attribute__((vector_size(4 * VL), may_alias));
typedef int64_t i64;

inline V load(const float* p) { return *(const Unaligned*)p; }
inline void store(float* p, V v) { *(Unaligned*)p = v; }
inline V set(float x) { return V{} + x; }

// the first n ≤ VL values, then `fill`
inline V load_part(const float* p, int n, float fill) {
#if defined(KERNEL_512)
    return (V)_mm512_mask_loadu_ps(_mm512_set1_ps(fill),
                                   (__mmask16)((1u << n) - 1), p);
#elif defined(KERNEL_256)
    const __m256i wanted = _mm256_cmpgt_epi32(
        _mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return (V)_mm256_blendv_ps(_mm256_set1_ps(fill),
                               _mm256_maskload_ps(p, wanted), (__m256)wanted);
#else
    V v = set(fill);
    for (int i = 0; i < n; i++) v[i] = p[i];
    return v;
#endif
}
inline void store_part(float* p, int n, V v) {
#if defined(KERNEL_512)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#elif defined(KERNEL_256)
    if (n == VL) return store(p, v);
    // not by a mask, which takes some processors twenty steps
    __m128 rest = _mm256_castps256_ps128((__m256)v);
    if (n & 4) {
        _mm_storeu_ps(p, rest), p += 4;
        rest = _mm256_extractf128_ps((__m256)v, 1);
    }
    if (n & 2) {
        _mm_storel_pi((__m64*)p, rest), p += 2;
        rest = _mm_movehl_ps(rest, rest);
    }
    if (n & 1) _mm_store_ss(p, rest);
#else
    for (int i = 0; i < n; i++) p[i] = v[i];
#endif
}

// Numbers of bfloat16, the upper halves of floats, rounded to even. Such an
// address stands where that of floats would.
typedef uint16_t Half;
inline const Half* halves(const float* p) { return (const Half*)p; }
inline Half* halves(float* p) { return (Half*)p; }
inline V load(const Half* p) {
#if defined(KERNEL_512)
    return (V)_mm512_slli_epi32(
        _mm512_maskz_cvtepu16_epi32(0xffff,
                                    _mm256_loadu_si256((const __m256i*)p)),
        16);
#elif defined(KERNEL_256)
    return (V)_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    U v;
    for (int i = 0; i < VL; i++) v[i] = (uint32_t)p[i] << 16;
    return (V)v;
#endif
}
inline void store(Half* p, V v) {
    U w = (U)v;
    w = (U)((w & 0x7fffffff) > 0x7f800000 ? U{} + 0x7fc0  // NaN
                                          : (w + 0x7fff + (w >> 16 & 1)) >> 16);
#if defined(KERNEL_512)
    _mm256_storeu_si256((__m256i*)p,
                        _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)w));
#elif defined(KERNEL_256)
    const __m256i packed = _mm256_packus_epi32((__m256i)w, (__m256i)w);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(
                                      _mm256_permute4x64_epi64(packed, 0x08)));
#else
    for (int i = 0; i < VL; i++) p[i] = (Half)w[i];
#endif
}
inline V load_part(const Half* p, int n, float fill) {
    Half part[VL];
    store(part, set(fill));
    std::memcpy(part, p, sizeof(Half) * n);
    return load(part);
}
inline void store_part(Half* p, int n, V v) {
    Half part[VL];
    store(part, v);
    std::memcpy(p, part, sizeof(Half) * n);
}

inline V absolute(V x) { return (V)((I)x & 0x7fffffff); }
// a·b + c with one rounding, which the compiler may not simplify
inline V fma(V a, V b, V c) {
#if defined(KERNEL_512)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(KERNEL_256) && defined(__FMA__)
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
    V d;
    for (int i = 0; i < VL; i++) d[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return d;
#else  // no such instruction: in double the product is exact
    V d;
    for (int i = 0; i < VL; i++) d[i] = (float)((double)a[i] * b[i] + c[i]);
    return d;
#endif
}
// A polynomial, highest power first; each coefficient in all lanes, so that an
// operation can take it from memory. GCC would bring it to a register first, of
// which AVX2 has 16.
template <int N> struct Polynomial {
    alignas(4 * VL) float lanes_of[N][VL] = {};
    template <class... C> constexpr Polynomial(C... c) {
        const double all[] = {c...};
        for (int k = 0; k < N; k++)
            for (int l = 0; l < VL; l++) lanes_of[k][l] = (float)all[k];
    }
    V operator()(V x) const {
        V p = *(const Aligned*)lanes_of[0];
#pragma GCC unroll 10
        for (int k = 1; k < N; k++) {
            const Aligned& c = *(const Aligned*)lanes_of[k];
#if defined(KERNEL_256) && defined(__FMA__)
            asm("vfmadd213ps %2, %1, %0" : "+x"(p) : "x"(x), "m"(c));
#else
            p = p * x + c;
#endif
        }
        return p;
    }
    // Of two vectors, as V2 below: each coefficient is read once for both; a
    // cycle has room for fewer reads than multiplications.
    template <class T> T operator()(T x) const {
        V a = *(const Aligned*)lanes_of[0], b = a;
#pragma GCC unroll 10
        for (int k = 1; k < N; k++) {
            V c = *(const Aligned*)lanes_of[k];
#if defined(KERNEL_256)
            asm("" : "+x"(c));  // GCC would read it twice
#endif
            a = a * x.a + c, b = b * x.b + c;
        }
        return {a, b};
    }
};
template <class... C> Polynomial(C...) -> Polynomial<sizeof...(C)>;

inline V with_sign(V magnitude, V sign) {                       // magnitude ≥ 0
#if defined(KERNEL_512)
    return (V)_mm512_ternarylogic_epi32((__m512i)magnitude, (__m512i)sign,
                                        _mm512_set1_epi32(0x7fffffff),
                                        0xE4 /* mask ? a : b */);
#else
    return (V)((I)magnitude | ((I)sign & (int32_t)0x80000000));
#endif
}
inline bool any(I mask) {  // lanes of all zeros or all ones
#if defined(KERNEL_512)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(KERNEL_256)
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    bool found = false;
    for (int i = 0; i < VL; i++) found |= mask[i] != 0;
    return found;
#endif
}
inline V square_root(V x) {  // x ≥ 0, to 2 ulp
#if defined(KERNEL_512)
    x = (V)_mm512_max_ps((__m512)x, _mm512_set1_ps(1e-36f));
    V y = (V)_mm512_rsqrt14_ps((__m512)x), root = x * y;
    return (root * y - 1.0f) * (root * -0.5f) + root;
#else
    V y;
    for (int i = 0; i < VL; i++) y[i] = __builtin_sqrtf(x[i]);
    return y;
#endif
}
// where the sign bit of `which` is 0: a, else b
inline V by_sign(V which, V a, V b) {
#if defined(KERNEL_256)
    // GCC 12 would compare with 0 first
    asm("vblendvps %3, %2, %1, %0" : "=x"(a) : "x"(a), "x"(b), "x"(which));
    return a;
#else
    return (I)which < 0 ? b : a;
#endif
}
inline V exponent(V x) {  // e of a normal x = 2^e m > 0, 1 ≤ m < 2
#if defined(KERNEL_512)
    // like the plain one, of whose header GCC 12 warns
    return (V)_mm512_maskz_getexp_ps(0xffff, (__m512)x);
#else
    return __builtin_convertvector(((I)x >> 23) - 127, V);
#endif
}
// numbers of a table that one instruction looks up, where there is one; their
// binary logarithm; that many bits at the end of an index count
#if defined(KERNEL_256)
constexpr int ENTRIES = 8, ENTRY_BITS = 3;
#else
constexpr int ENTRIES = 16, ENTRY_BITS = 4;
#endif
inline V lookup(const float table[ENTRIES], I index) {
#if defined(KERNEL_512)
    return (V)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)index,
                                          _mm512_load_ps(table));
#elif defined(KERNEL_256)
    return (V)_mm256_permutevar8x32_ps(_mm256_load_ps(table), (__m256i)index);
#else
    V found;
    for (int i = 0; i < VL; i++) found[i] = table[index[i] & (ENTRIES - 1)];
    return found;
#endif
}
inline double total(V x) {
#if defined(KERNEL_512)
    return _mm512_reduce_add_ps((__m512)x);
#elif defined(KERNEL_256)
    __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)x),
                          _mm256_extractf128_ps((__m256)x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
    float s = 0;
    for (int i = 0; i < VL; i++) s += x[i];
    return s;
#endif
}

// Sums of `count` vectors, added to s
inline void totals(const V* t, int count, double* s) {
    int m = 0;
#if defined(KERNEL_512)
    // four at a time: halves are added while they are brought together
    for (; m + 4 <= count; m += 4) {
        const __m512 *x = (const __m512*)(t + m);
        __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]),
                                 _mm512_unpackhi_ps(x[0], x[1])),
               b = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]),
                                 _mm512_unpackhi_ps(x[2], x[3]));
        __m512 c = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44),
                                 _mm512_shuffle_ps(a, b, 0xee));
        __m256 d = _mm256_add_ps(
            _mm512_castps512_ps256(c),
            _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(c), 1)));
        __m128 e =
            _mm_add_ps(_mm256_castps256_ps128(d), _mm256_extractf128_ps(d, 1));
        _mm256_storeu_pd(
            s + m, _mm256_add_pd(_mm256_loadu_pd(s + m), _mm256_cvtps_pd(e)));
    }
#elif defined(KERNEL_256)
    for (; m + 4 <= count; m += 4) {
        const __m256 *x = (const __m256*)(t + m);
        __m256 a = _mm256_add_ps(_mm256_unpacklo_ps(x[0], x[1]),
                                 _mm256_unpackhi_ps(x[0], x[1])),
               b = _mm256_add_ps(_mm256_unpacklo_ps(x[2], x[3]),
                                 _mm256_unpackhi_ps(x[2], x[3]));
        __m256 c = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44),
                                 _mm256_shuffle_ps(a, b, 0xee));
        __m128 d =
            _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1));
        _mm256_storeu_pd(
            s + m, _mm256_add_pd(_mm256_loadu_pd(s + m), _mm256_cvtps_pd(d)));
    }
#endif
    for (; m < count; m++) s[m] += total(t[m]);
}

// Two vectors side by side: a processor finds more to do at once in two chains
// of dependent steps than in one.
struct V2 { V a, b; };
struct I2 { I a, b; };
#define BINARY(op)                                          \
    [[maybe_unused]] inline V2 operator op(V2 x, V2 y) {    \
        return {x.a op y.a, x.b op y.b};                    \
    }                                                       \
    [[maybe_unused]] inline V2 operator op(V2 x, V y) {     \
        return {x.a op y, x.b op y};                        \
    }                                                       \
    [[maybe_unused]] inline V2 operator op(V2 x, float y) { \
        return {x.a op y, x.b op y};                        \
    }                                                       \
    [[maybe_unused]] inline V2 operator op(float x, V2 y) { \
        return {x op y.a, x op y.b};                        \
    }
BINARY(+) BINARY(-) BINARY(*) BINARY(/)
#undef BINARY
inline V2& operator+=(V2& x, V2 y) { return x = x + y; }
inline I bits(V x) { return (I)x; }
inline I2 bits(V2 x) { return {(I)x.a, (I)x.b}; }
inline V floats(I x) { return (V)x; }
inline V2 floats(I2 x) { return {(V)x.a, (V)x.b}; }
inline V2 exponent(V2 x) { return {exponent(x.a), exponent(x.b)}; }
inline V2 lookup(const float table[ENTRIES], I2 index) {
    return {lookup(table, index.a), lookup(table, index.b)};
}
inline I2 operator-(I2 x, I2 y) { return {x.a - y.a, x.b - y.b}; }
inline I2 operator>>(I2 x, int y) { return {x.a >> y, x.b >> y}; }
// 2ⁿ · factor, for n with 1.5 · 2^23 added. Of far values n means nothing, and
// the sum goes round: without a sign, where that is allowed.
inline V times_power(V factor, V n) { return (V)(((U)n << 23) + (U)factor); }
inline V2 times_power(V2 factor, V2 n) {
    return {times_power(factor.a, n.a), times_power(factor.b, n.b)};
}
inline V2 times_power(V factor, V2 n) {
    return {times_power(factor, n.a), times_power(factor, n.b)};
}
inline V times_sign(V x, V sign) {
    return (V)((I)x ^ ((I)sign & (int32_t)0x80000000));
}
inline V2 times_sign(V2 x, V2 sign) {
    return {times_sign(x.a, sign.a), times_sign(x.b, sign.b)};
}
inline I2 operator&(I2 x, int y) { return {x.a & y, x.b & y}; }
inline V2 absolute(V2 x) { return {absolute(x.a), absolute(x.b)}; }
inline V2 with_sign(V2 x, V2 y) {
    return {with_sign(x.a, y.a), with_sign(x.b, y.b)};
}
inline V2 fma(V2 x, V2 y, V2 z) {
    return {fma(x.a, y.a, z.a), fma(x.b, y.b, z.b)};
}
inline V2 fma(V2 x, V y, V2 z) { return {fma(x.a, y, z.a), fma(x.b, y, z.b)}; }
inline V2 fma(V2 x, V2 y, V z) { return {fma(x.a, y.a, z), fma(x.b, y.b, z)}; }
inline V choose(V h, const V c[2]) { return by_sign(h, c[0], c[1]); }
inline V2 choose(V2 h, const V c[2]) {
    return {choose(h.a, c), choose(h.b, c)};
}
inline void add(V& sum, V x) { sum += x; }
inline void add(V& sum, V2 x) { sum += x.a + x.b; }
inline void add(V& sum, V x, V y) { sum += x * y; }
inline void add(V& sum, V2 x, V2 y) { sum += x.a * y.a, sum += x.b * y.b; }

// Numbers c of at most 18 bits, each near 1/x in the middle of one of the
// intervals that divide [1, 2), and −log c. Among its neighbours a c was taken
// whose −log c is a multiple of 2^-21, but for 2^-31. The float nearest to
// log 2 is one, too, but for 2^-29. With the factor of `stretched` the interval
// of c = 1 extends to both sides of 1.
#if defined(KERNEL_256)
constexpr float STRETCH = 1.054f;
alignas(32) const float inverses[8] = {              // 2^127 c
    0x1p127f, 0x1.c9278p126f, 0x1.9abc8p126f, 0x1.75768p126f, 0x1.5935p126f,
    0x1.40928p126f, 0x1.29b38p126f, 0x1.16d2p126f};
alignas(32) const float logarithms[8] = {            // −log c of these
    0, 0x1.d0178p-4f, 0x1.c353p-3f, 0x1.4314p-2f, 0x1.93a4p-2f,
    0x1.df744p-2f, 0x1.159fcp-1f, 0x1.372bfp-1f};
#else
constexpr float STRETCH = 1.02f;
alignas(64) const float inverses[16] = {             // 2^127 c
    0x1p127f, 0x1.e371p126f, 0x1.c6fep126f, 0x1.ad89p126f, 0x1.98458p126f,
    0x1.85518p126f, 0x1.7327p126f, 0x1.635b8p126f, 0x1.5566p126f, 0x1.4793p126f,
    0x1.3b6ep126f, 0x1.2fa38p126f, 0x1.254p126f, 0x1.1b41p126f, 0x1.1275p126f,
    0x1.092a8p126f};
alignas(64) const float logarithms[16] = {           // −log c of these
    0, 0x1.d62dp-5f, 0x1.e3828p-4f, 0x1.67acp-3f, 0x1.cfa6cp-3f, 0x1.18806p-2f,
    0x1.496eep-2f, 0x1.75f72p-2f, 0x1.9f004p-2f, 0x1.c9542p-2f, 0x1.f003ap-2f,
    0x1.0b835p-1f, 0x1.1d565p-1f, 0x1.2f182p-1f, 0x1.3f3f5p-1f, 0x1.50e14p-1f};
#endif

// log(1+a) for 0 ≤ a < 2^100, or, if not PLUS_ONE, log a: e log 2 − log c +
// log(1+f), where 2^e (1+f)/c is 1+a, or a, and |f| < 0.042, with eight c
// below 0.068. The sum of the first two terms is exact below 8. f has one
// rounding, and none where e = 0 and c = 1.
template <class T>
struct Log { T large, small; };      // their sum, which need not be a float

struct Parts {
    template <class T>
    Log<T> operator()(T large, T small) const { return {large, small}; }
};
struct Sum {  // apart from the other: GCC keeps a Log in memory
    template <class T>
    T operator()(T large, T small) const { return large + small; }
};

#if defined(KERNEL_256)
constexpr Polynomial of_log(0.1953740156, -0.250636399, 0.3333442441,
                            -0.4999995404);
#else
constexpr Polynomial of_log(-0.2406941801, 0.3333307505, -0.5000025034);
#endif

template <bool PLUS_ONE, class Join, class T>
inline auto logarithm(T a) {
    // its leading bits say which c
    T s = PLUS_ONE ? a * STRETCH + STRETCH : a * STRETCH;
    auto which = bits(s) >> (23 - ENTRY_BITS);
    // 2^-e c
    T scale = floats(bits(lookup(inverses, which)) - (bits(s) & 0x7f800000));
    T f = PLUS_ONE ? fma(a, scale, scale - 1.0f) : fma(a, scale, set(-1.0f));
    return Join()(exponent(s) * 0.69314718056f + lookup(logarithms, which),
                  f * f * of_log(f) + f);
}
template <class T>
inline Log<T> log1p_in_parts(T a) { return logarithm<true, Parts>(a); }
template <class T>
inline T log1p_of(T a) { return logarithm<true, Sum>(a); }

// exp(t) = 2^n (1+m), |t| ≤ 87; n comes with 1.5 · 2^23 added
template <class T>
struct Exp { T n, m; };

// t = η ell, with η/log 2 ≈ binary. What was rounded off, times 0.75 log 2, is
// `low`: it enters m = 2^r − 1, |r| ≤ ½, by its derivative 2^r log 2, and 2^r
// is taken to be 0.75, about as where r < 0 < n. There 2^n − 1 and 2^n m have
// opposite signs and no error to spare.
constexpr Polynomial of_exp(0.0001525138359, 0.001338921604, 0.009618672542,
                            0.05550363287, 0.2402264774);
template <class T>
inline Exp<T> exp_from_reduced(T n, T r, T rest) {
    return {n, fma(r, set(0.69314718056f), r * r * of_exp(r) + rest)};
}
template <class T>
inline Exp<T> exp_of(T binary, T low, T ell) {
    T n = fma(binary, ell, set(12582912.0f));
    // from the exact product
    return exp_from_reduced(n, fma(binary, ell, 12582912.0f - n), low * ell);
}
// The same for an ℓ in two parts: their sum would be rounded, and a large t =
// ηℓ would multiply that.
template <class T>
inline Exp<T> exp_of(T binary, T low, Log<T> parts) {
    T ell = parts.large + parts.small, n = fma(binary, ell, set(12582912.0f));
    return exp_from_reduced(
        n, fma(binary, parts.small, fma(binary, parts.large, 12582912.0f - n)),
        low * ell);
}
template <class T>
inline T exp_from(Exp<T> x) {
    T scale = times_power(set(1), x.n);
    return x.m * scale + scale;
}
// factor · expm1(t), with one rounding less than if it came last; 2^n factor
// may not underflow
template <class T>
inline T expm1_from(Exp<T> x, T factor) {
    T scaled = times_power(factor, x.n);
    return fma(x.m, scaled, scaled - factor);
}

// The float nearest to 1/η, or the second nearest where that spares 7/η (2^n/η
// − 1/η in expm1_from, n = 3) a rounding by half a unit in the last place.
inline float chosen_inverse(double eta) {
    const double exact = 1 / eta;
    float found = (float)exact;
    uint32_t word;
    std::memcpy(&word, &found, 4);
    // 7/η > 8 · 2^k, and 7 · 4 = 3 · 8 + 4
    if ((word & 0x7fffff) > 0x124924 && (word & 7) == 4)
        word += std::fabs((double)found) < std::fabs(exact) ? 1 : -1;
    std::memcpy(&found, &word, 4);
    return found;
}

// The power transform of one unit: constants for h ≥ 0 and h < 0. An opposite
// error of t makes up for what was rounded off 1/η, but for its size: exp turns
// a relative error of t into one of t eᵗ/expm1(t), which is 1 at t = 0, 1.7 at
// 1.2, 0.8 at −0.4.
struct Power {
    V binary[2], low[2], inverse[2];  // for exp_of; ±1/η with the sign of h
    float lmbda, most;                              // `most`: the larger |η|
    float beyond;                                   // λ−1
    bool identity, far;  // far: |λ−1| > 0.75, so that an η may be small
    // `chosen`: with the better of two inverses, which takes 20 ns
    explicit Power(double l, bool chosen = false) {
        lmbda = (float)l;
        most = (float)std::fmax(std::fabs(l), std::fabs(2 - l));
        beyond = (float)(l - 1);
        identity = l == 1.0, far = std::fabs(l - 1) > 0.75;
        for (int side = 0; side < 2; side++) {
            double eta = side ? 2 - l : l;
            if (std::fabs(eta) < 1e-9) eta = 1e-9;
            const float rounded =
                chosen ? chosen_inverse(eta) : (float)(1 / eta);
            const double wanted = eta * M_LOG2E, off = rounded * eta - 1;
            binary[side] = set((float)wanted);
            low[side] = set((float)((wanted - (float)wanted
                                     - (eta < 0 ? 1.05 : 0.58) * off * wanted)
                                    * (0.75 * M_LN2)));
            inverse[side] = set(side ? -rounded : rounded);
        }
    }
    // whether |δ| ≤ 0.7 in a unit whose |h| are at most `largest`, by a bound
    // of log(1 + largest)
    bool near(double largest) const {
        const double size = 1 + largest;
        i64 word;
        std::memcpy(&word, &size, 8);
        // log(2^e m) ≤ e log 2 + m − 1; what is not a number is not near
        const double e = (double)((word >> 52) - 1023);
        word = (word & 0xfffffffffffff) | 0x3ff0000000000000;
        double m;
        std::memcpy(&m, &word, 8);
        return largest < 1e9
               && std::fabs(beyond) * (e * M_LN2 + (m - 1)) <= 0.7;
    }
};

// ψ(h), given ℓ = log1p|h| in one part or in two
template <class T, class L>
inline T transform(T h, L ell, const V binary[2], const V low[2],
                   const V inverse[2]) {
    return expm1_from(exp_of(choose(h, binary), choose(h, low), ell),
                      choose(h, inverse));
}
template <class T, class L> inline T transform(T h, L ell, const Power& w) {
    return transform(h, ell, w.binary, w.low, w.inverse);
}

// The same where |δ| ≤ 0.7
constexpr Polynomial of_near(0.0001985537207, 0.001409819285, 0.008334291969,
                             0.04166172743, 0.1666664639, 0.5000002769);
template <class T>
inline T transform_near(T h, T ell, V beyond, const V inverse[2]) {
    T a = absolute(h), delta = times_sign(ell * beyond, h),
      e = delta * delta * of_near(delta) + delta;
    return ((a + 1.0f) * e + a) * choose(h, inverse);
}

// ψ'(h) = exp δ, by a signed ℓ and (λ−1)/log 2; right to 10^-7
constexpr Polynomial of_two(0.001326512644, 0.009671499409, 0.05550732276,
                            0.2402224238, 0.6931469788, 1.0);
template <class T> inline T steepness(T log, V turn) {
    T n = log * turn + 12582912.0f, r = log * turn + (12582912.0f - n);
    return times_power(of_two(r), n);
}

// ---- noise: Philox 4×32-10 with the element's index divided by four as
// counter, then Box–Muller

#if defined(KERNEL_512)
inline W multiply(W x, uint32_t m) {
    return (W)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(m));
}
#elif defined(KERNEL_256)
inline W multiply(W x, uint32_t m) {
    return (W)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(m));
}
#else
inline W multiply(W x, uint32_t m) { return (x & 0xffffffffull) * (uint64_t)m; }
#endif

struct Keys {                                       // of the ten rounds
    uint64_t k[20];
    explicit Keys(uint64_t key) {
        uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
        for (int round = 0; round < 10;
             round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
            k[2 * round] = k0, k[2 * round + 1] = k1;
    }
};

// the upper half of each lane brought to the lower one
inline W high(W product) {
#if defined(KERNEL_512)
    // not a shift, which would wait for the multiplications' port
    return (W)_mm512_shuffle_epi32((__m512i)product, (_MM_PERM_ENUM)0xf5);
#else
    return product >> 32;
#endif
}

// 32-bit words in the lower halves of 64-bit lanes; the upper halves are not
// used
struct Words { W x0, x1, x2, x3; };
// of N, in turn
template <int N> inline void rounds(Words* s, const Keys& keys) {
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        const uint64_t* const k = keys.k + 2 * round;
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            W p0 = multiply(s[i].x0, 0xD2511F53u),
              p1 = multiply(s[i].x2, 0xCD9E8D57u);
            s[i].x0 = high(p1) ^ (s[i].x1 ^ k[0]);
            s[i].x2 = high(p0) ^ (s[i].x3 ^ k[1]);
            s[i].x1 = p1, s[i].x3 = p0;
        }
    }
}
inline U both(W even, W odd) {
#if defined(KERNEL_512)
    // odd numbers from the lower halves of `odd`
    return (U)_mm512_mask_shuffle_epi32((__m512i)even, 0xaaaa, (__m512i)odd,
                                        (_MM_PERM_ENUM)0xa0);
#elif defined(KERNEL_256)
    return (U)_mm256_blend_epi32((__m256i)even, (__m256i)(odd << 32), 0xaa);
#else
    return (U)((even & 0xffffffffull) | (odd << 32));
#endif
}

constexpr Polynomial of_sine(-1.9515296e-4, 8.3321609e-3, -0.16666655);
constexpr Polynomial of_cosine(2.443315711809948e-5, -1.388731625493765e-3,
                               4.166664568298827e-2, -0.5, 1.0);

// Two vectors of words side by side, as V2 has numbers
struct U2 { U a, b; };
inline U2 operator+(U2 x, uint32_t y) { return {x.a + y, x.b + y}; }
inline U2 operator<<(U2 x, int y) { return {x.a << y, x.b << y}; }
inline V2 floats(U2 x) { return {(V)x.a, (V)x.b}; }
inline V2 numbers(U2 x) {
    return {__builtin_convertvector(x.a, V), __builtin_convertvector(x.b, V)};
}
inline V2 signed_numbers(U2 x) {
    return {__builtin_convertvector((I)x.a, V),
            __builtin_convertvector((I)x.b, V)};
}
inline V2 by_sign(V2 which, V2 a, V2 b) {
    return {by_sign(which.a, a.a, b.a), by_sign(which.b, a.b, b.b)};
}

inline V2 radius_of(U2 a) {
    V2 u = numbers(a) * 0x1p-32f + 0x1p-33f;
    V2 square = logarithm<false, Sum>(u) * -2.0f;
    return {square_root(square.a), square_root(square.b)};
}
inline void box_muller(V2 radius, U2 b, V2& first, V2& second) {
    // its first two bits: the angle rounded to quarters of a turn
    U2 turned = b + 0x20000000u;
    // what is left, exact in integers; 2π 2^-32
    V2 x = signed_numbers(b << 2) * (1.4629180792671596e-09f / 4);
    V2 y = x * x, s = of_sine(y) * y * x + x, c = of_cosine(y);
    V2 odd = floats(turned << 1);  // its sign
    V2 cosine = by_sign(odd, c, s), sine = by_sign(odd, s, c);
    radius = times_sign(radius, floats(turned));
    first = times_sign(radius * cosine, odd), second = radius * sine;
}

// In each block of four lanes: the lower or upper two numbers of a and b, in
// turn; the lower or upper two of a, then those of b
#if defined(KERNEL_512)
inline V lower(V a, V b) { return (V)_mm512_unpacklo_ps((__m512)a, (__m512)b); }
inline V upper(V a, V b) { return (V)_mm512_unpackhi_ps((__m512)a, (__m512)b); }
inline V lower_pairs(V a, V b) {
    return (V)_mm512_unpacklo_pd((__m512d)a, (__m512d)b);
}
inline V upper_pairs(V a, V b) {
    return (V)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
}
#elif defined(KERNEL_256)
inline V lower(V a, V b) { return (V)_mm256_unpacklo_ps((__m256)a, (__m256)b); }
inline V upper(V a, V b) { return (V)_mm256_unpackhi_ps((__m256)a, (__m256)b); }
inline V lower_pairs(V a, V b) {
    return (V)_mm256_unpacklo_pd((__m256d)a, (__m256d)b);
}
inline V upper_pairs(V a, V b) {
    return (V)_mm256_unpackhi_pd((__m256d)a, (__m256d)b);
}
#else
inline V lower(V a, V b) { return V{a[0], b[0], a[1], b[1]}; }
inline V upper(V a, V b) { return V{a[2], b[2], a[3], b[3]}; }
inline V lower_pairs(V a, V b) { return V{a[0], a[1], b[0], b[1]}; }
inline V upper_pairs(V a, V b) { return V{a[2], a[3], b[2], b[3]}; }
#endif
// in each block of four lanes: a transpose
inline void transpose_blocks(V r[4]) {
    const V ab = lower(r[0], r[1]), cd = lower(r[2], r[3]),
            AB = upper(r[0], r[1]), CD = upper(r[2], r[3]);
    r[0] = lower_pairs(ab, cd), r[1] = upper_pairs(ab, cd),
    r[2] = lower_pairs(AB, CD), r[3] = upper_pairs(AB, CD);
}

// lane 4b+i holds counter + (VL/4) i + b, so that the transposes come out in
// order
struct Lanes {
    W even, odd;
    Lanes() {
        for (int j = 0; j < VL / 2; j++) {
            int l = 2 * j, m = 2 * j + 1;
            even[j] = VL / 4 * (l % 4) + l / 4,
            odd[j] = VL / 4 * (m % 4) + m / 4;
        }
    }
};
const Lanes lanes;

// Batches of 4·VL numbers: z[4j+i] = number i of counter j. First all words,
// then all radii, then all numbers: three loops with more work in flight than
// one.
constexpr int BATCH = 4 * VL, BATCHES = 8;
// of VL quadruples at a time, in runs of `run` quadruples that begin `run +
// jump` apart; or of one quadruple of each of VL runs
struct Counters {
    W even{}, odd{}, even_at{}, odd_at{};
    uint64_t run = 1, jump = 0, step = VL;
    bool low = false;  // none that matters is 2^32 or more
    // runs side by side, which begin `apart` quadruples apart
    Counters(uint64_t counter, uint64_t apart) : step(1) {
        uint64_t of[2][VL / 2];
        for (int j = 0; j < VL; j++) of[j % 2][j / 2] = counter + j * apart;
        std::memcpy(&even, of[0], sizeof even);
        std::memcpy(&odd, of[1], sizeof odd);
    }
    Counters(uint64_t counter, uint64_t at, uint64_t run_, uint64_t jump_)
        : even(lanes.even + counter), odd(lanes.odd + counter),
          even_at(lanes.even + at), odd_at(lanes.odd + at), run(run_),
          jump(jump_) {
        wrap();
    }
    void wrap() {
        if (!jump) return;
        for (uint64_t passed = 0; passed < VL; passed += run) {
            W over = (W)(even_at >= run);
            even += over & jump, even_at -= over & run;
            over = (W)(odd_at >= run);
            odd += over & jump, odd_at -= over & run;
        }
    }
    void next() {
        even += step, odd += step;
        if (jump) even_at += VL, odd_at += VL, wrap();
    }
};
// of N batches; with LOW the first two rounds have less to do
template <bool LOW, int N>
inline void philox_of(Counters& counters, const Keys& keys, U words[][4]) {
    Words s[2 * N];
#pragma GCC unroll 2
    for (int b = 0; b < N; b++) {
        s[2 * b] = {counters.even, LOW ? W{} : counters.even >> 32, W{}, W{}};
        s[2 * b + 1] = {counters.odd, LOW ? W{} : counters.odd >> 32, W{}, W{}};
        counters.next();
    }
    rounds<2 * N>(s, keys);
#pragma GCC unroll 2
    for (int b = 0; b < N; b++) {
        const Words &p = s[2 * b], &q = s[2 * b + 1];
        words[b][0] = both(p.x0, q.x0), words[b][1] = both(p.x1, q.x1),
        words[b][2] = both(p.x2, q.x2), words[b][3] = both(p.x3, q.x3);
    }
}
template <bool LOW>
inline void philox(Counters& counters, int count, const Keys& keys,
                   U words[][4]) {
    int b = 0;
    for (; b + 2 <= count; b += 2)
        philox_of<LOW, 2>(counters, keys, words + b);
    if (b < count) philox_of<LOW, 1>(counters, keys, words + b);
}
template <bool ABREAST = false>  // lane by lane; else one after another
void batches(Counters& counters, int count, const Keys& keys, float* z) {
    alignas(64) U words[BATCHES][4];
    if (counters.low) philox<true>(counters, count, keys, words);
    else philox<false>(counters, count, keys, words);
    for (int b = 0; b < count; b++) {
        const V2 radius = radius_of({words[b][0], words[b][2]});
        words[b][0] = (U)radius.a, words[b][2] = (U)radius.b;
    }
    for (int b = 0; b < count; b++) {
        V2 first, second;
        box_muller({(V)words[b][0], (V)words[b][2]},
                   {words[b][1], words[b][3]}, first, second);
        V r[4] = {first.a, second.a, first.b, second.b};
        if (!ABREAST) transpose_blocks(r);
        for (int k = 0; k < 4; k++) store(z + b * BATCH + k * VL, r[k]);
    }
}

// `count` numbers, without the first `skip`
void normals(Counters& counters, int skip, i64 count, const Keys& keys,
             float* z) {
    alignas(64) float part[BATCHES * BATCH];
    while (count > 0) {
        i64 wanted = (skip + count + BATCH - 1) / BATCH;
        const int b = wanted < BATCHES ? (int)wanted : BATCHES;
        i64 n = (i64)b * BATCH - skip < count ? (i64)b * BATCH - skip : count;
        if (n == (i64)b * BATCH) {
            batches(counters, b, keys, z);
        } else {
            batches(counters, b, keys, part);
            std::memcpy(z, part + skip, 4 * n);
        }
        z += n, count -= n, skip = 0;
    }
}
// for elements start, start+1, …
void normals(uint64_t start, i64 count, const Keys& keys, float* z) {
    Counters counters(start >> 2, 0, 1, 0);
    counters.low = (start + count) >> 34 == 0;
    normals(counters, (int)(start & 3), count, keys, z);
}

// ---- the transform as polynomials in pieces, for many elements of the same λ

#if defined(KERNEL_TABLES)
// ψ(h)/h on pieces of each octave of 1+|h| < 16, on either side of 0:
// polynomials in 1+|h| − (middle of the piece), looked up in registers. Where
// one instruction finds one of 32 numbers, four pieces an octave and degree 5;
// where it finds one of 8, whole octaves and degree 9.
#if defined(KERNEL_512)
constexpr int SPLIT = 4, TERMS = 6;
#else
constexpr int SPLIT = 1, TERMS = 10;
#endif
constexpr int PIECES = 8 * SPLIT;
struct Pieces {
    // in powers of 1+|h| − middle, times the weight
    alignas(64) float term[TERMS][PIECES];
    static bool apply(const Power& p) { return !p.identity && p.most <= 3; }
    void set(const Power& power, float weight);     // where it applies
};
// where ψ(h)/h is interpolated, and the solution of the interpolation
struct Nodes {
    double ell[TERMS][PIECES], by_h[TERMS][PIECES], solve[TERMS][TERMS];
    // powers of two: of x^m in a coefficient, and 1 over them
    double scale[TERMS][PIECES], back[TERMS][PIECES];
    // x^m and the multiples of higher powers that leave least of it
    double spare[TERMS][TERMS];
    static int left(int piece) { return piece >= PIECES / 2; }
    Nodes() {
        double x[TERMS];
        for (int k = 0; k < TERMS; k++)
            x[k] = std::cos((k + 0.5) * M_PI / TERMS);
        // Lagrange's polynomial that is 1 at x[k] and 0 at the other nodes,
        // multiplied out
        for (int k = 0; k < TERMS; k++) {
            double basis[TERMS] = {1}, there = 1;
            for (int i = 0; i < TERMS; i++) {
                if (i == k) continue;
                for (int m = TERMS - 1; m >= 0; m--)
                    basis[m] = (m ? basis[m - 1] : 0) - x[i] * basis[m];
                there *= x[k] - x[i];
            }
            for (int m = 0; m < TERMS; m++) solve[m][k] = basis[m] / there;
        }
        double of[TERMS][TERMS];                    // at the nodes
        for (int m = TERMS - 1; m >= 0; m--) {
            for (int k = 0; k < TERMS; k++)
                of[m][k] = std::pow(x[k], m), spare[m][k] = k == m;
            for (int i = TERMS - 1; i > m; i--) {
                double along = 0, square = 0;
                for (int k = 0; k < TERMS; k++)
                    along += of[m][k] * of[i][k], square += of[i][k] * of[i][k];
                for (int k = 0; k < TERMS; k++)
                    of[m][k] -= along / square * of[i][k],
                        spare[m][k] -= along / square * spare[i][k];
            }
        }
        // bits 21 … 24 of the float 1+|h|: two of the exponent, whose bias
        // makes octave 0 the last, two of the mantissa; or bits 23, 24 of
        // 2+2|h|, whose bit 25 is 0
        for (int i = 0; i < PIECES; i++) {
            const int e = i / SPLIT % 4;
            const double octave = (double)(1 << (SPLIT == 1 ? e : (e + 1) % 4)),
                         middle = octave * (1 + (i % SPLIT + 0.5) / SPLIT),
                         half = octave / (2 * SPLIT);
            for (int k = 0; k < TERMS; k++) {
                double h = middle + half * x[k] - 1;
                ell[k][i] = std::log1p(h), by_h[k][i] = 1 / h;
                // from_middle is a number of the octave, or of [1, 2)
                back[k][i] = std::pow(SPLIT == 1 ? 0.5 : half, k);
                scale[k][i] = 1 / back[k][i];
            }
        }
    }
};
const Nodes nodes;

void Pieces::set(const Power& power, float weight) {
    if (!apply(power)) return;
    const double lmbda = power.lmbda;
    double value[TERMS][PIECES], eta[PIECES], by_eta[PIECES];
    for (int i = 0; i < PIECES; i++) {
        eta[i] = Nodes::left(i) ? 2 - lmbda : lmbda;
        if (std::fabs(eta[i]) < 1e-9) eta[i] = 1e-9;
        by_eta[i] = weight / eta[i];
    }
    for (int k = 0; k < TERMS; k++)
        for (int i = 0; i < PIECES; i++) {  // expm1 to about 1e-13, for |t| < 9
            double t = eta[i] * nodes.ell[k][i],
                   n = (t * 1.4426950408889634 + 0x1.8p52) - 0x1.8p52,
                   r = t - n * 0.6931471805599453;
            double p = 1.0 / 479001600;
            p = p * r + 1.0 / 39916800;
            p = p * r + 1.0 / 3628800;
            p = p * r + 1.0 / 362880;
            p = p * r + 1.0 / 40320;
            p = p * r + 1.0 / 5040;
            p = p * r + 1.0 / 720;
            p = p * r + 1.0 / 120;
            p = p * r + 1.0 / 24;
            p = p * r + 1.0 / 6;
            p = p * r + 0.5;
            p = p * r * r + r;
            union { i64 i; double d; } power = {((i64)n + 1023) << 52};
            value[k][i] =
                (p * power.d + (power.d - 1)) * by_eta[i] * nodes.by_h[k][i];
        }
    double exact[TERMS][PIECES] = {}, off[PIECES];
    for (int m = 0; m < TERMS; m++)
        for (int k = 0; k < TERMS; k++)
            for (int i = 0; i < PIECES; i++)
                exact[m][i] += nodes.solve[m][k] * value[k][i];
    for (int m = 0; m < TERMS; m++) {
        for (int i = 0; i < PIECES; i++) {
            term[m][i] = (float)(exact[m][i] * nodes.scale[m][i]);
            // what is rounded off goes to the higher powers
            off[i] = exact[m][i] - term[m][i] * nodes.back[m][i];
        }
        for (int k = m + 1; k < TERMS; k++)
            for (int i = 0; i < PIECES; i++)
                exact[k][i] -= off[i] * nodes.spare[m][k];
    }
}
#if defined(KERNEL_512)
struct Lookup {                                     // a table in registers
    __m512 low[TERMS], high[TERMS];
    explicit Lookup(const Pieces& p) {
        for (int m = 0; m < TERMS; m++)
            low[m] = _mm512_load_ps(p.term[m]),
            high[m] = _mm512_load_ps(p.term[m] + 16);
    }
    // ψ(h)·weight + bias, a = |h| < 15
    inline V operator()(V h, V a, V bias) const {
        const V y = a + 1.0f;
        const __m512i piece = _mm512_ternarylogic_epi32(
            _mm512_srli_epi32((__m512i)y, 21),
            _mm512_srli_epi32((__m512i)h, 27), _mm512_set1_epi32(16),
            0xD8 /* mask ? h : y */);
        const V from_middle =
            y
            - (V)_mm512_ternarylogic_epi32(
                (__m512i)y, _mm512_set1_epi32(0x7fe00000),
                _mm512_set1_epi32(0x00100000), 0xEA /* y & mask | half */);
        V p = (V)_mm512_permutex2var_ps(low[TERMS - 1], piece, high[TERMS - 1]);
#pragma GCC unroll 8
        for (int m = TERMS - 2; m >= 0; m--)
            p = p * from_middle
                + (V)_mm512_permutex2var_ps(low[m], piece, high[m]);
        return p * h + bias;
    }
    inline V2 operator()(V2 h, V2 a, V bias) const {
        return {(*this)(h.a, a.a, bias), (*this)(h.b, a.b, bias)};
    }
};
#else
struct Lookup {  // read from memory, for want of registers
    const Pieces& p;
    explicit Lookup(const Pieces& p_) : p(p_) {}
    __m256 term(int m) const { return _mm256_load_ps(p.term[m]); }
    // as above; its terms are those of half of 2+2|h|, as a number of [1, 2)
    inline V operator()(V h, V a, V bias) const {
        const I y = (I)(a * 2.0f + 2.0f);
        const __m256i piece =
            (__m256i)((y >> 23) | (I)by_sign(h, V{}, (V)(I{} + 4)));
        const V from_middle = (V)((y & 0x007fffff) | 0x3f800000) - 1.5f;
        V sum = (V)_mm256_permutevar8x32_ps(term(TERMS - 1), piece);
#pragma GCC unroll 10
        for (int m = TERMS - 2; m >= 0; m--)
            sum = sum * from_middle
                  + (V)_mm256_permutevar8x32_ps(term(m), piece);
        return sum * h + bias;
    }
    inline V2 operator()(V2 h, V2 a, V bias) const {
        return {(*this)(h.a, a.a, bias), (*this)(h.b, a.b, bias)};
    }
};
#endif
#endif

// ---- a unit ----

// elements between two transfers of float sums to double
constexpr i64 BLOCK = 64 * VL;
// numbers per unit that the backward pass needs: beside mean, variance and λ,
// and in all
constexpr int BESIDE = 6, KEPT = 3 + BESIDE;
enum Noise { NONE, SCALED, UNSCALED, DROPOUT };

struct Job {
    const float *u, *grad;
    float* out;
    const float *weight, *bias;
    // per unit; `beside`: BESIDE numbers each. Null in a forward pass that
    // nothing follows
    float *mean, *var, *lmbda, *beside;
    // one for each weight, and, with one weight a unit, for each unit
    float *weight_grad, *bias_grad;
    // per unit, or null: averages that move towards those of this call
    float *running_mean, *running_var, *running_lambda;
    // unit i starts at element (i / period) * outer + (i % period) * inner
    i64 units;
    i64 period, outer, inner;
    // and consists of `segments` runs of `length` elements, `stride` apart
    i64 segments, length, stride;
    // columns > 0: units are the columns of a matrix; index: see `index_of`
    i64 columns, run;
    // 0: none; 1: one a unit; −1: one an element; n: one for each of n equal
    // parts of a unit
    i64 weights;
    i64 weight_period;  // unit i takes weights (i % weight_period) · n, …
    i64 given, transform, kind;
    i64 half;  // u, grad and out are of bfloat16
    double eps, alpha, noise;
    i64 threads;
    uint64_t seed, offset;
    double momentum;
};

template <class T>
constexpr const char* kind_of = std::is_pointer_v<T>          ? "address"
                                : std::is_floating_point_v<T> ? "double"
                                : std::is_signed_v<T>         ? "int64"
                                                              : "uint64";

// What a structure has where, as text: "name: kind, 8 bytes at 40" for each
// field, and "sizeof: 280 bytes". Written by the compiler, which refuses a text
// that is longer than its room.
struct Layout {
    char text[2048] = {};
    int end = 0;
    constexpr Layout& operator<<(const char* words) {
        for (; *words; words++) text[end++] = *words;
        return *this;
    }
    constexpr Layout& operator<<(size_t number) {
        if (number > 9) *this << number / 10;
        text[end++] = (char)('0' + number % 10);
        return *this;
    }
    template <class T>
    constexpr Layout& field(const char* name, size_t offset) {
        return *this << name << ": " << kind_of<T> << ", " << sizeof(T)
                     << " bytes at " << offset << "\n";
    }
    constexpr Layout& size(size_t all) {
        return *this << "sizeof: " << all << " bytes\n";
    }
};
#define FIELD(name) .field<decltype(Here::name)>(#name, offsetof(Here, name))
constexpr Layout job_layout = [] {
    using Here = Job;
    return Layout() FIELD(u) FIELD(grad) FIELD(out) FIELD(weight) FIELD(bias)
        FIELD(mean) FIELD(var) FIELD(lmbda) FIELD(beside) FIELD(weight_grad)
        FIELD(bias_grad) FIELD(running_mean) FIELD(running_var)
        FIELD(running_lambda) FIELD(units) FIELD(period) FIELD(outer)
        FIELD(inner) FIELD(segments) FIELD(length) FIELD(stride) FIELD(columns)
        FIELD(run) FIELD(weights) FIELD(weight_period) FIELD(given)
        FIELD(transform) FIELD(kind) FIELD(half) FIELD(eps) FIELD(alpha)
        FIELD(noise) FIELD(threads) FIELD(seed) FIELD(offset) FIELD(momentum)
        .size(sizeof(Job));
}();

// What an exported function returns. All memory is asked for before anything is
// written, by the thread that calls; nothing here throws.
enum { DONE, NO_MEMORY, NO_DATA };
// bytes that could not be had when NO_MEMORY was last returned
thread_local uint64_t refused = 0;

// An address of 0 stands for a tensor that is not given, 1 for one whose memory
// has been freed
inline bool freed(const void* p) { return (uintptr_t)p == 1; }
template <class... P>
inline bool any_freed(const P*... p) { return (... || freed(p)); }
template <class... P>
inline bool all_here(const P*... p) { return (... && ((uintptr_t)p > 1)); }

struct Scratch {  // memory that the calling thread keeps between calls
    float* data = nullptr;
    size_t size = 0;
    float* take(size_t n) {  // null where it cannot be had
        if (n > size) {
            std::free(data);
            size = (n + 1023) / 1024 * 1024;
            data = (float*)std::aligned_alloc(64, 4 * size);
            if (!data) refused = 4 * size, size = 0;
        }
        return data;
    }
    void release() { std::free(data), data = nullptr, size = 0; }
    ~Scratch() { std::free(data); }
};
thread_local Scratch scratch, all_sums[2], given_memory[2];

// Memory of `room` floats for each thread that takes one of `pieces` pieces of
// work, or of fewer threads where there are fewer pieces
struct Shares {
    float* memory;
    size_t room;
    bool by_number;
    int taken = 0;
    Shares(i64 room_, i64 threads, i64 pieces)
        : room((size_t)(room_ / 16 + 1) * 16),
          by_number(pieces >= threads && threads > 1) {
        memory = scratch.take(room * (by_number          ? threads
                                      : pieces < threads ? pieces
                                                         : 1));
    }
    float* mine() {  // asked for once by a thread, before its first piece
        int number = 0;
#if defined(_OPENMP)
        if (by_number) {
            number = omp_get_thread_num();
        } else {
#pragma omp atomic capture
            number = taken++;
        }
#endif
        return memory + room * number;
    }
};

// f(k, memory) for k = 0 … count − 1, by so many threads, in equal parts that
// follow one another, or each where a thread is free. `memory` is a thread's,
// null at its first k.
enum Order { IN_PARTS, WHERE_FREE };
template <Order ORDER = IN_PARTS, class F>
void share_out(i64 threads, i64 count, F f) {
    // a parallel region takes as long as hundreds of elements, of one thread
    // too
    if (threads < 2 || count < 2) {
        float* memory = nullptr;
        for (i64 k = 0; k < count; k++) f(k, memory);
        return;
    }
#pragma omp parallel num_threads((int)threads)
    {
        float* memory = nullptr;
        if (ORDER == IN_PARTS) {
#pragma omp for schedule(static) nowait
            for (i64 k = 0; k < count; k++) f(k, memory);
        } else {
#pragma omp for schedule(dynamic, 1) nowait
            for (i64 k = 0; k < count; k++) f(k, memory);
        }
    }
}

// f(position, lanes, type): two vectors at a time, then one, then a part of one
template <class F> INLINED inline void each(i64 from, i64 to, F f) {
    i64 j = from;
    for (; j + 2 * VL <= to; j += 2 * VL) f(j, 2 * VL, V2{});
    for (; j < to; j += VL) f(j, to - j < VL ? (int)(to - j) : VL, V{});
}
// One vector at a time, where sixteen registers hold the sums of a visit but
// not two chains beside them; GCC would keep the sums in memory, and each
// addition would wait for it.
template <class F> INLINED inline void each_alone(i64 from, i64 to, F f) {
    i64 j = from;
    for (; j + VL <= to; j += VL) f(j, VL, V{});
    if (j < to) f(j, (int)(to - j), V{});
}
template <class E> inline V get(const E* p, i64 j, int n, float fill, V) {
    return n == VL ? load(p + j) : load_part(p + j, n, fill);
}
inline V2 get(const float* p, i64 j, int, float, V2) {
    return {load(p + j), load(p + j + VL)};
}
template <class E> inline void put(E* p, i64 j, int n, V v) {
    n == VL ? store(p + j, v) : store_part(p + j, n, v);
}
inline void put(float* p, i64 j, int, V2 v) {
    store(p + j, v.a), store(p + j + VL, v.b);
}

// Asks for the memory of the next unit while this one is computed, line by
// line: what will be written, and what will be read, in the order in which it
// will be.
constexpr int LINE = 16;  // floats
inline void will_write(const float* p, int lanes) {
    for (int k = 0; k < lanes; k += LINE) __builtin_prefetch(p + k, 1, 2);
}
struct Ahead {
    const float *here = nullptr, *end = nullptr;    // of a run
    i64 left = 0, length = 0, stride = 0;           // runs that follow it
    Ahead() = default;
    Ahead(const float* start, i64 segments, i64 length_, i64 stride_)
        : here(start), end(start + length_), left(segments - 1),
          length(length_), stride(stride_) {}
    inline void operator()(int lanes) {
        if (!here) return;
        for (int k = 0; k < lanes; k += LINE)
            __builtin_prefetch(here + k, 0, 2);
        here += lanes;
        if (here < end) return;
        here = left-- ? end - length + stride : nullptr;
        end = here + length;
    }
};

// f(position, count, offset): the elements from … to of a unit, run by run,
// with the place of each in memory
template <class F>
INLINED inline void runs(const Job& job, i64 from, i64 to, F f) {
    i64 run = from / job.length, at = from - run * job.length;
    while (from < to) {
        i64 count = job.length - at < to - from ? job.length - at : to - from;
        f(from, count, run * job.stride + at);
        from += count, run++, at = 0;
    }
}

// Moments of u(0), u(1), … u(n − 1), number by number
template <class F>
void in_double(F u, i64 n, double& mean, double& var) {
    double sum = 0, squares = 0;
    for (i64 j = 0; j < n; j++) sum += u(j);
    mean = sum / n, sum = 0;
    for (i64 j = 0; j < n; j++)
        sum += u(j) - mean, squares += (u(j) - mean) * (u(j) - mean);
    mean += sum / n, var = squares / n - (sum / n) * (sum / n);
}

struct Unit {
    const Job* job;
    i64 i, n;  // number of the unit, of its elements
    // rate = 1/√(σ²+ε), bare = 1/σ or 0
    double mean = 0, var = 0, rate = 0, bare = 0;
    float center = 0, rest = 0;                     // mean ≈ center + rest
    double largest = 0;                             // |k|
    i64 later = -1;                                 // where the next one begins

    Unit(const Job& job_, i64 i_)
        : job(&job_), i(i_), n(job_.segments * job_.length) {}

    // of the next unit, in u or in the gradient
    Ahead ahead(const float* of) const {
        return later < 0 ? Ahead() : Ahead(of + later, job->segments,
                                           job->length, job->stride);
    }

    void set_rates() {
        float v = (float)var;
        bool varies = v > std::numeric_limits<float>::min()
                              / std::numeric_limits<float>::epsilon();
        rate = v == 0 && job->eps == 0 ? 0
               : std::isfinite(v)      ? 1 / std::sqrt(var + job->eps)
                                       : NAN;
        bare = varies && std::isfinite(v) ? 1 / std::sqrt(var) : 0;
    }

    // Mean and variance of u, or of the runs that begin there, which are then
    // copied to `copy`
    void moments(const float* u, float* copy) {
        const i64 run = copy ? job->length : n;
        about(0.25f * ((u[0] + u[run / 4]) + (u[run / 2] + u[3 * run / 4])), u,
              copy);
        if (copy) u = copy;
        // these four are far from the mean
        if (square_off > var) about((float)mean, u, nullptr);
        // the squares do not fit into float
        if (!(square < 1e37) || square < 1e-30)
            in_double([&](i64 j) { return u[j]; }, n, mean, var);
        center = (float)mean;
        rest = (float)(mean - center);
        set_rates();
    }
    double square, square_off;
    void about(float origin, const float* u, float* copy) {
        double sum = 0;
        square = 0;
        for (i64 b = 0; b < n; b += BLOCK) {
            V s{}, q{}, s2{}, q2{};
            const i64 end = b + BLOCK < n ? b + BLOCK : n;
            auto visit = [&](const float* from, float* to, i64 count) {
                i64 j = 0;
                for (; j + 2 * VL <= count; j += 2 * VL) {
                    V v = load(from + j), w = load(from + j + VL),
                      c = v - origin, d = w - origin;
                    if (to) store(to + j, v), store(to + j + VL, w);
                    s += c, q += c * c, s2 += d, q2 += d * d;
                }
                for (; j < count; j += VL) {
                    const int m = count - j < VL ? (int)(count - j) : VL;
                    V v = get(from, j, m, origin, V{}), c = v - origin;
                    if (to) put(to, j, m, v);
                    s += c, q += c * c;
                }
            };
            if (copy)
                runs(*job, b, end, [&](i64 at, i64 count, i64 offset) {
                    visit(u + offset, copy + at, count);
                });
            else visit(u + b, nullptr, end - b);
            sum += total(s + s2), square += total(q + q2);
        }
        const double off = sum / n;
        square /= n, square_off = off * off;
        mean = origin + off, var = square - square_off;
    }

    // noise for positions from … from + count of the unit
    uint64_t index_of(i64 position) const {
        if (job->columns)
            return job->offset + (position / job->run) * job->columns * job->run
                   + i * job->run + position % job->run;
        return job->offset + (i / job->period) * job->outer
               + (i % job->period) * job->inner
               + (position / job->length) * job->stride
               + position % job->length;
    }
};

struct NoiseOf {  // a unit's noise, for one stretch of positions after another
    const Unit& w;
    const Keys keys;
    Counters counters{0, 0, 1, 0};
    i64 at = -1;  // the position at which `counters` stand
    explicit NoiseOf(const Unit& w_) : w(w_), keys(w_.job->seed) {}
    void operator()(i64 from, i64 count, float* z) {
        const Job& job = *w.job;
        const i64 run = job.columns ? job.run : job.length,
                  stride = job.columns ? job.columns * job.run : job.stride;
        if (from != at) {
            const uint64_t start = w.index_of(from);
            // quadruples of numbers that extend over two runs; a stride is a
            // multiple of the run
            if ((run | from | (i64)start) & 3) {
                while (count > 0) {
                    const i64 left = run - from % run,
                              m = left < count ? left : count;
                    normals(w.index_of(from), m, keys, z);
                    z += m, from += m, count -= m;
                }
                return;
            }
            counters = run < w.n ? Counters(start >> 2, from % run / 4, run / 4,
                                            (stride - run) / 4)
                                 : Counters(start >> 2, 0, 1, 0);
            counters.low = w.index_of(w.n - 1) >> 34 == 0;
        }
        normals(counters, 0, count, keys, z);
        at = count % BATCH ? -1 : from + count;
    }
};

inline V2 first_lanes(V2 x, int) { return x; }

const double TOP = std::log((double)std::numeric_limits<float>::max()) - 0.7;
// number by number, far from zero: kept where float can represent the result,
// as `representable` does
inline double slow_power(double h, double l) {
    double eta = h < 0 ? 2 - l : l, ell = std::log1p(std::fabs(h));
    if (eta > 1 && std::isfinite(h) && eta * ell > TOP) ell = TOP / eta;
    return std::copysign(eta == 0 ? ell : std::expm1(eta * ell) / eta, h);
}


inline V first_lanes(V x, int n) {                  // zeros from lane n on
    I lane;
    for (int i = 0; i < VL; i++) lane[i] = i;
    return lane < n ? x : V{};
}

// ℓ of h = ρk from ℓ of k, for 1−ρ small: log(1+ρa) = log(1+a) + log(1 − (1−ρ)
// a/(1+a))
// of h: not wanted; by a quotient that is near; by a logarithm of its own
enum Ell { NOT_KEPT, NEAR, DISTANT };
inline Ell distance(double rho) { return 1 - rho < 4e-3 ? NEAR : DISTANT; }
// gap = 1−ρ, middle = (1+ρ)/2
template <class T> inline T ell_near(T ell, T a, V gap, V middle) {
    return ell - a / (a * middle + 1.0f) * gap;
}

inline void largest(I& most, V a) { most = (I)a > most ? (I)a : most; }
inline void largest(I& most, V2 a) { largest(most, a.a), largest(most, a.b); }

struct Averages {
    double log, d, kd, dd, q, largest;
};

// Averages over k = (u−μ)/σ; ℓ of h for the transform
template <Ell ELL>
void averages(const Unit& w, const float* u, float* ell_of, Averages& result) {
    Ahead ahead = w.ahead(w.job->u);
    constexpr int COUNT = 5, ROOM = 8;
    const float r = (float)w.bare, shift = -w.rest * r;
    const V rho = set((float)(w.rate / w.bare)),
            gap = set((float)(1 - w.rate / w.bare)),
            middle = set((float)((1 + w.rate / w.bare) / 2));
    double s[ROOM] = {0};
    const V center = set(w.center);
    I most{};                                       // of the bits of |k|
    alignas(64) float k_of[BLOCK], logs[BLOCK];
    for (i64 b = 0; b < w.n; b += BLOCK) {
        V t[ROOM]{};
        const i64 end = b + BLOCK < w.n ? b + BLOCK : w.n;
        each(b, end, [&](i64 j, int m, auto T) INLINED {
            auto k = (get(u, j, m, 0, T) - center) * r + shift;
            if (m < VL) k = first_lanes(k, m);
            put(k_of, j - b, VL, k);
            put(logs, j - b, VL, log1p_of(absolute(k)));
        });
        each(b, end, [&](i64 j, int m, auto T) INLINED {
            auto k = get(k_of, j - b, VL, 0, T), a = absolute(k),
                 ell = get(logs, j - b, VL, 0, T), log = with_sign(ell, k),
                 g = a * ell + ell, d = g - a;
            add(t[0], log), add(t[1], d), add(t[2], k, d), add(t[3], d, d),
                add(t[4], g, ell);
            largest(most, a);
            if constexpr (ELL == NEAR)
                put(ell_of, j, m, ell_near(ell, a, gap, middle));
            if constexpr (ELL == DISTANT) put(ell_of, j, m, log1p_of(a * rho));
            ahead(m);
        });
        totals(t, ROOM, s);
    }
    for (int m = 0; m < COUNT; m++) (&result.log)[m] = s[m] / w.n;
    // Of the bits, which are ordered as the numbers are, NaN above all. By way
    // of memory: a reduction by fmax ends GCC 12 for ARM with an internal
    // error.
    alignas(64) float lanes_of[VL];
    store(lanes_of, (V)most);
    int32_t highest = 0;
    for (int l = 0; l < VL; l++) {
        int32_t word;
        std::memcpy(&word, lanes_of + l, 4);
        if (word > highest) highest = word;
    }
    float found;
    std::memcpy(&found, &highest, 4);
    result.largest = found;
}

// λ̂ from averages, and for the backward pass the numbers in `kept`
double newton(const Job& job, const Averages& m, float* kept) {
    double first = m.kd - m.log,
           second = 1 - m.q + m.d * m.d + 2 * (m.dd - m.d * m.d - m.kd * m.kd);
    if (kept)
        kept[2] = (float)(first / second), kept[3] = (float)(1 / second),
        kept[4] = (float)m.d, kept[5] = (float)m.kd;
    return 1 - job.alpha * first / second;
}
double estimate(Unit& w, const float* u, float* ell_of, float* kept) {
    Averages m;
    const Ell ell = ell_of ? distance(w.rate / w.bare) : NOT_KEPT;
    auto visit = ell == NOT_KEPT ? averages<NOT_KEPT>
                 : ell == NEAR   ? averages<NEAR>
                                 : averages<DISTANT>;
    visit(w, u, ell_of, m);
    w.largest = m.largest;
    return newton(*w.job, m, kept);
}

// The weight and bias that apply to part `part` of a unit: numbers, or pointers
// to one number an element
struct Affine {
    float weight = 1, bias = 0;
    const float *weights = nullptr, *biases = nullptr;
    Affine(const Job& job, i64 unit, i64 part) {
        if (job.weights < 0) {
            weights = job.weight, biases = job.bias;
        } else if (job.weights) {
            i64 k = unit % job.weight_period * job.weights + part;
            if (job.weight) weight = job.weight[k];
            if (job.bias) bias = job.bias[k];
        }
    }
    template <class T>
    T operator()(T x, i64 j, int n) const {
        if (weights || biases) {
            if (weights) x = x * get(weights, j, n, 0, x);
            return biases ? x + get(biases, j, n, 0, x) : x;
        }
        return x * weight + bias;
    }
};

template <class F>
INLINED inline void parts(const Job& job, i64 n, F f) {  // f(part, from, to)
    i64 count = job.weights > 1 ? job.weights : 1, length = n / count;
    for (i64 p = 0; p < count; p++) f(p, p * length, (p + 1) * length);
}

// Where a unit's results go: contiguous, or in the runs of `job`
struct Target {
    const Job* job;                                 // null: contiguous
    float* base;
    // f(position, end, where the first of them goes)
    template <class F>
    void spans(i64 from, i64 to, F f) const {
        if (job)
            runs(*job, from, to, [&](i64 at, i64 count, i64 offset) {
                f(at, at + count, base + offset);
            });
        else f(from, to, base + from);
    }
};
// Elements between two transfers of float sums to double: whole runs where
// results go to runs
i64 block_of(const Job& job, bool direct) {
    return direct && job.length < BLOCK ? BLOCK / job.length * job.length
                                        : BLOCK;
}

// f(make), where make() is x, and x(j, n, type) the transformed value of
// element j of u. x is made where it is used and holds its numbers itself: what
// is reached by an address is read again after each result is written, for all
// that the compiler knows. No x holds another function: that would be copied by
// vectors, right after its parts were written one by one, and waited for.
template <class F>
INLINED inline void with_values(const Unit& w, const float* u,
                                const float* ell_of, const Power& power, F f) {
    const V center = set(w.center), rate = set((float)w.rate),
            shift = set((float)(-w.rest * w.rate));
    if (!w.job->transform || power.identity) {
        f([&]() INLINED {
            return [=](i64 j, int n, auto T) INLINED {
                return (get(u, j, n, 0, T) - center) * rate + shift;
            };
        });
    } else if (ell_of && power.near(w.largest)) {
        const V beyond = set(power.beyond), right = power.inverse[0],
                left = power.inverse[1];
        f([&]() INLINED {
            return [=](i64 j, int n, auto T) INLINED {
                const V inverse[2] = {right, left};
                auto h = (get(u, j, n, 0, T) - center) * rate + shift;
                return transform_near(h, get(ell_of, j, n, 0, T), beyond,
                                      inverse);
            };
        });
    } else if (ell_of) {
        f([&]() INLINED {
            return [=](i64 j, int n, auto T) INLINED {
                auto h = (get(u, j, n, 0, T) - center) * rate + shift;
                return transform(h, get(ell_of, j, n, 0, T), power);
            };
        });
#if defined(KERNEL_TABLES)
    } else if (w.largest < 15 && Pieces::apply(power)) {
        Pieces pieces;
        pieces.set(power, 1);
        const Lookup table(pieces);
        f([&]() INLINED {
            return [=](i64 j, int n, auto T) INLINED {
                auto h = (get(u, j, n, 0, T) - center) * rate + shift;
                return table(h, absolute(h), V{});
            };
        });
#endif
    } else {
        f([&]() INLINED {
            return [=](i64 j, int n, auto T) INLINED {
                auto h = (get(u, j, n, 0, T) - center) * rate + shift;
                return transform(h, log1p_in_parts(absolute(h)), power);
            };
        });
    }
}

// The transformed values into `temporary`, and their sum
double values_of(const Unit& w, const float* u, const float* ell_of,
                 const Power& power, float* temporary) {
    // the next unit's results follow in memory
    const bool row = w.job->segments == 1;
    double sum = 0;
    with_values(w, u, ell_of, power, [&](const auto& make) {
        const auto x = make();
        for (i64 b = 0; b < w.n; b += BLOCK) {
            V s{};
            each(b, b + BLOCK < w.n ? b + BLOCK : w.n,
                 [&](i64 j, int n, auto T) INLINED {
                     auto y = x(j, n, T);
                     if (row) will_write(temporary + w.n + j, n);
                     put(temporary, j, n, y);
                     add(s, n < VL ? first_lanes(y, n) : y);
                 });
            sum += total(s);
        }
    });
    return sum;
}
// Σ |value − mean|
double deviation_of(const Unit& w, const float* values, float mean) {
    double sum = 0;
    for (i64 b = 0; b < w.n; b += BLOCK) {
        V s{};
        each(b, b + BLOCK < w.n ? b + BLOCK : w.n,
             [&](i64 j, int n, auto T) INLINED {
                 add(s, absolute(get(values, j, n, mean, T) - mean));
             });
        sum += total(s);
    }
    return sum;
}

// From u to the output; `temporary` may be u, and is the output where that is
// contiguous. `given`: the spread of the values, where more than these count
void finish(const Unit& w, const float* u, const float* ell_of,
            const Power& power, float* temporary, const Target& target,
            float* kept, const double* given = nullptr) {
    const Job& job = *w.job;
    const i64 block = block_of(job, target.job), size = w.n;
    const bool row = job.segments == 1;
    if (job.noise == 0) {
        with_values(w, u, ell_of, power, [&](const auto& make) {
            parts(job, w.n, [&](i64 part, i64 from, i64 to) {
                Affine affine(job, w.i, part);
                target.spans(from, to, [&](i64 b, i64 end, float* to) {
                    const auto x = make();
                    const V weight = set(affine.weight),
                            bias = set(affine.bias);
                    const float *weights = affine.weights,
                                *biases = affine.biases;
                    float* const out = to - b;
                    if (!weights && !biases)
                        each(b, end, [&](i64 j, int n, auto T) INLINED {
                            if (row) will_write(out + size + j, n);
                            put(out, j, n, x(j, n, T) * weight + bias);
                        });
                    else if (weights && biases)
                        each(b, end, [&](i64 j, int n, auto T) INLINED {
                            will_write(out + size + j, n);
                            put(out, j, n,
                                x(j, n, T) * get(weights, j, n, 0, T)
                                    + get(biases, j, n, 0, T));
                        });
                    else
                        each(b, end, [&](i64 j, int n, auto T) INLINED {
                            put(out, j, n, affine(x(j, n, T), j, n));
                        });
                });
            });
        });
        return;
    }
    const double sum = values_of(w, u, ell_of, power, temporary),
                 spread =
                     job.kind == UNSCALED ? std::sqrt(2 / M_PI)
                     : job.kind != SCALED ? 0
                     : given
                         ? *given
                         : deviation_of(w, temporary, (float)(sum / w.n)) / w.n;
    if (kept) kept[1] = (float)spread;
    const float amount =
        (float)(job.noise * (job.kind == DROPOUT ? 1 : spread));
    const bool dropout = job.kind == DROPOUT;
    alignas(64) float z[BLOCK];
    NoiseOf noise_of(w);
    parts(job, w.n, [&](i64 part, i64 from, i64 to) {
        Affine affine(job, w.i, part);
        for (i64 start = from; start < to; start += block) {
            i64 stop = start + block < to ? start + block : to;
            noise_of(start, stop - start, z);
            target.spans(start, stop, [&](i64 b, i64 end, float* out) {
                each(b, end, [&](i64 j, int n, auto T) INLINED {
                    auto x = get(temporary, j, n, 0, T),
                         noise = get(z, j - start, n, 0, T) * amount;
                    put(out - b, j, n,
                        affine(dropout ? x * noise + x : x + noise, j, n));
                });
            });
        }
    });
}

i64 start_of(const Job& job, i64 i) {
    return (i / job.period) * job.outer + (i % job.period) * job.inner;
}

// λ̂ of a unit of `count` elements whose moments are known, by `find` of what
// will be kept; writes down what is known of the unit
template <class F> double power_by(Unit& w, i64 count, const F& find) {
    const Job& job = *w.job;
    float* kept = job.beside ? job.beside + BESIDE * w.i : nullptr;
    if (kept) std::memset(kept, 0, 4 * BESIDE), kept[0] = w.rest;
    double lmbda = 1;
    if (job.transform && w.bare > 0) lmbda = (float)find(kept);
    else if (std::isnan(w.var)) w.rate = NAN;
    if (job.mean)
        job.mean[w.i] = (float)w.mean, job.var[w.i] = (float)w.var,
        job.lmbda[w.i] = (float)lmbda;
    float* const running[3] = {job.running_mean, job.running_var,
                               job.running_lambda};
    if (!running[0] && !running[1] && !running[2]) return lmbda;
    const float values[3] = {(float)w.mean,
                             (float)(w.var * ((double)count / (count - 1))),
                             (float)lmbda};
    // all or none
    if (std::isfinite(values[0]) && std::isfinite(values[1])
        && std::isfinite(values[2]))
        for (int k = 0; k < 3; k++)
            if (running[k])
                running[k][w.i] +=
                    (float)(job.momentum
                            * ((double)values[k] - running[k][w.i]));
    return lmbda;
}
double power_of(Unit& w, const float* u, float* ell_of) {
    return power_by(w, w.n,
                    [&](float* kept) { return estimate(w, u, ell_of, kept); });
}

void forward_unit(Unit& w, const float* u, float* temporary,
                  const Target& target, float* ell_of) {
    const double lmbda = power_of(w, u, ell_of);
    finish(w, u, ell_of, Power(lmbda), temporary, target,
           w.job->beside ? w.job->beside + BESIDE * w.i : nullptr);
}


// ∂ψ/∂λ = ℓ²φ(t), t = ηℓ, φ(t) = (t eᵗ − expm1 t)/t²: its series where |t| < 1
constexpr Polynomial of_slope(1.0 / 3991680, 1.0 / 403200, 1.0 / 45360,
                              1.0 / 5760, 1.0 / 840, 1.0 / 144, 1.0 / 30,
                              1.0 / 8, 1.0 / 3, 0.5);
inline V slope_in_lambda(V ell, V t, V expo, V value, V inverse) {
    return absolute(t) < 1.0f ? ell * ell * of_slope(t)
                              : (ell * expo - value) * inverse;
}
inline V2 slope_in_lambda(V2 ell, V2 t, V2 expo, V2 value, V2 inverse) {
    return {slope_in_lambda(ell.a, t.a, expo.a, value.a, inverse.a),
            slope_in_lambda(ell.b, t.b, expo.b, value.b, inverse.b)};
}

struct Sums {
    double g = 0, gh = 0, slope = 0, v = 0, vk = 0;
};

// where the gradients of weight and bias go, or null
struct Weights { float *weight, *bias; };

// What a visit need not ask at each element: with POWER there is a transform,
// with NOISY noise is made, with EACH each element has a weight of its own, and
// the gradients of weight and bias are both wanted; else a unit, or a part of
// it, has one weight, or none. ANY asks.
enum { POWER = 1, NOISY = 2, EACH = 4, ANY = 8 };

// v of an element, by four numbers of its unit; `log` = sign(k) ℓ
template <class C> struct Move {  // or of a unit in each lane
    C of_p{}, of_d{}, of_ell{}, of_log{};
    Move() = default;
    explicit Move(const float* kept)
        : of_p(1 + 4 * kept[2] * kept[5]), of_d(-4 * kept[2]), of_ell(kept[2]),
          of_log(kept[2] * (2 * kept[4] + 2)) {}
    template <class T>
    INLINED T operator()(T a, T ell, T log, T inverse) const {
        const T m = a * ell + ell, d = m - a, p = d + (m - ell);
        return (d * of_d + (ell * of_ell + of_log)) * log
               + (p * of_p - inverse);
    }
};

// First visit of the backward pass: sums over the unit. u and grad are
// contiguous, or (`direct`) the beginnings of runs. k goes to `k_of`, g ∂x/∂h
// to `of_h`, v to `v_of`, all contiguous.
template <Ell ELL, bool FAR, int WHAT>
void reduce(const Unit& w, bool direct, const float* u, const float* grad,
            const Power& power, const float* kept, float* k_of, float* of_h,
            float* v_of, Weights weights, Sums& sums) {
    const Job& job = *w.job;
    constexpr bool ASK = WHAT & ANY;
    const bool transformed =
                   ASK ? job.transform && w.bare > 0 : (bool)(WHAT & POWER),
               scaled = !ASK || (job.weights != 0 && job.weight),
               dropout = ASK && job.kind == DROPOUT && job.noise != 0;
    const float r = (float)(transformed ? w.bare : w.rate), shift = -w.rest * r,
                spread = kept[1];
    const V rho = set((float)(w.rate / w.bare)),
            gap = set((float)(1 - w.rate / w.bare)), less = -gap,
            turn = set((float)(power.beyond * M_LOG2E));
    const float amount = (float)(job.noise * (dropout ? 1 : spread));
    const bool noisy = ASK ? job.noise != 0 && (weights.weight || dropout)
                           : (bool)(WHAT & NOISY),
               each_one = ASK ? job.weights < 0 : (bool)(WHAT & EACH);
    const i64 block = block_of(job, direct);
    const bool row = job.segments == 1;
    const Move<float> move(kept);
    float *const weight_grad = weights.weight, *const bias_grad = weights.bias;
    const V center = set(w.center);
    // of a block; the last vector of a run may go over its end
    alignas(64) float z[BLOCK], ell_of[BLOCK + VL], steep_of[BLOCK + VL];
    NoiseOf noise_of(w);
    Ahead u_ahead = w.ahead(job.u), grad_ahead = w.ahead(job.grad);
    parts(job, w.n, [&](i64 part, i64 from, i64 to) INLINED {
        Affine affine(job, w.i, part);
        const V weight = set(affine.weight);
        double sum[8] = {0};
        for (i64 b = from; b < to; b += block) {
            i64 end = b + block < to ? b + block : to;
            if (noisy) noise_of(b, end - b, z);
            V s_g{}, s_gh{}, s_slope{}, s_v{}, s_vk{}, s_weight{}, s_bias{};
            auto visit = [&](i64 at, i64 count, i64 offset) INLINED {
                const float *u_run = u + offset - at,
                            *grad_run = grad + offset - at;
                auto k_at = [&](i64 j, int n, auto T) INLINED {
                    auto k = (get(u_run, j, n, 0, T) - center) * r + shift;
                    return n < VL ? first_lanes(k, n) : k;
                };
                if (transformed) {
                    each(at, at + count, [&](i64 j, int n, auto T) INLINED {
                        auto k = k_at(j, n, T);
                        put(k_of, j, n, k);
                        put(ell_of, j - b, VL, log1p_of(absolute(k)));
                    });
                    // ℓ becomes that of h, with its sign
                    each_alone(at, at + count, [&](i64 j, int n, V T) INLINED {
                        V k = get(k_of, j, n, 0, T), a = absolute(k),
                          ell = get(ell_of, j - b, VL, 0, T),
                          inverse = 1.0f / (a + 1.0f),
                          v = move(a, ell, with_sign(ell, k), inverse);
                        if (n < VL) v = first_lanes(v, n);
                        add(s_v, v), add(s_vk, v, k), put(v_of, j, n, v);
                        if constexpr (ELL == DISTANT) {
                            ell = log1p_of(a * rho);
                        } else {  // −(1−ρ) a/(1+a), and two terms of its series
                            V share = inverse * gap + less;
                            ell = share * (share * -0.5f + 1.0f) + ell;
                        }
                        put(ell_of, j - b, VL, with_sign(ell, k));
                    });
                    if constexpr (!FAR)
                        each(at, at + count, [&](i64 j, int, auto T) INLINED {
                            put(steep_of, j - b, VL,
                                steepness(get(ell_of, j - b, VL, 0, T), turn));
                        });
                }

                each(at, at + count, [&](i64 j, int n, auto T) INLINED {
                    auto g = get(grad_run, j, n, 0, T),
                         k = transformed ? get(k_of, j, n, 0, T)
                                         : k_at(j, n, T);
                    auto upstream = g;
                    if (each_one) {
                        if (!ASK || affine.weights)
                            upstream = g * get(affine.weights, j, n, 0, T);
                    } else if (scaled) upstream = g * weight;
                    auto noise = T;
                    if (noisy) noise = get(z, j - b, n, 0, T) * amount;
                    if (dropout) upstream += upstream * noise;
                    auto x = k, of = upstream;
                    if (transformed) {
                        auto log = get(ell_of, j - b, VL, 0, T),
                             steep = get(steep_of, j - b, VL, 0, T),
                             by_eta = choose(k, power.inverse),
                             size = absolute(k) * rho + 1.0f,
                             expo = steep * size;
                        if constexpr (FAR) {
                            auto ell = absolute(log),
                                 binary = choose(k, power.binary);
                            auto e = exp_of(binary, choose(k, power.low), ell);
                            expo = exp_from(e), steep = expo / size;
                            x = expm1_from(e, by_eta);
                            add(s_slope, upstream,
                                slope_in_lambda(log,
                                                binary * ell * 0.69314718056f,
                                                expo, x, by_eta));
                        } else {
                            x = (expo - 1.0f) * by_eta;
                            add(s_slope, upstream, (log * expo - x) * by_eta);
                        }
                        of = upstream * steep;
                    }
                    add(s_g, of), add(s_gh, of, k);
                    if (row) will_write(of_h + w.n + j, n);
                    put(of_h, j, n, of);
                    if (!transformed) put(k_of, j, n, k);
                    u_ahead(n), grad_ahead(n);
                    if (!ASK || weight_grad) {
                        auto y = x;
                        if (noisy) y = dropout ? x * noise + x : x + noise;
                        if (each_one)
                            put(weight_grad, j, n,
                                get(weight_grad, j, n, 0, T) + g * y);
                        else add(s_weight, g, y);
                    }
                    if (!ASK || bias_grad) {
                        if (each_one)
                            put(bias_grad, j, n,
                                get(bias_grad, j, n, 0, T) + g);
                        else add(s_bias, g);
                    }
                });
            };
            if (direct) runs(job, b, end, visit);
            else visit(b, end - b, b);
            const V all[8] = {s_g,  s_gh,     s_slope, s_v,
                              s_vk, s_weight, s_bias,  V{}};
            totals(all, 8, sum);
        }
        sums.g += sum[0], sums.gh += sum[1], sums.slope += sum[2],
            sums.v += sum[3], sums.vk += sum[4];
        if (!each_one) {
            i64 k = w.i * (job.weights > 1 ? job.weights : 1) + part;
            if (weight_grad) weight_grad[k] = (float)sum[5];
            if (bias_grad) bias_grad[k] = (float)sum[6];
        }
    });
    sums.g /= w.n, sums.gh /= w.n, sums.slope /= w.n, sums.v /= w.n,
        sums.vk /= w.n;
    if (transformed) sums.gh *= w.rate / w.bare;
}

// as the forward pass left it
void restore(Unit& w) {
    const Job& job = *w.job;
    w.center = job.mean[w.i], w.var = job.var[w.i],
    w.rest = job.beside[BESIDE * w.i];
    w.set_rates();
    if (std::isnan(w.var)) w.rate = NAN;
}
Unit known_unit(const Job& job, i64 i) {
    Unit w(job, i);
    restore(w);
    return w;
}

void find_sums(const Unit& w, bool direct, const float* u, const float* grad,
               float* k_of, float* of_h, float* v_of, Weights weights,
               Sums& m) {
    const Job& job = *w.job;
    const Power power(job.lmbda[w.i]);
    const bool transformed = job.transform && w.bare > 0,
               near = !transformed || distance(w.rate / w.bare) == NEAR,
               far = transformed && power.far,
               dropout = job.noise != 0 && job.kind == DROPOUT,
               each_one = job.weights < 0,
               all_wanted = job.weight && weights.weight && weights.bias;
    int what = ANY;
    if (!far && !dropout && (!each_one || (near && all_wanted)))
        what = (transformed ? POWER : 0)
               | (job.noise != 0 && weights.weight ? NOISY : 0)
               | (each_one ? EACH : 0);
    auto visit = [&] {
        switch (what) {
        case 0: return reduce<NEAR, false, 0>;
        case NOISY: return reduce<NEAR, false, NOISY>;
        case POWER:
            return near ? reduce<NEAR, false, POWER>
                        : reduce<DISTANT, false, POWER>;
        case POWER | NOISY:
            return near ? reduce<NEAR, false, POWER | NOISY>
                        : reduce<DISTANT, false, POWER | NOISY>;
        case EACH: return reduce<NEAR, false, EACH>;
        case EACH | NOISY: return reduce<NEAR, false, EACH | NOISY>;
        case EACH | POWER: return reduce<NEAR, false, EACH | POWER>;
        case EACH | POWER | NOISY:
            return reduce<NEAR, false, EACH | POWER | NOISY>;
        }
        return near ? (far ? reduce<NEAR, true, ANY>
                           : reduce<NEAR, false, ANY>)
                    : (far ? reduce<DISTANT, true, ANY>
                           : reduce<DISTANT, false, ANY>);
    }();
    m = {};
    visit(w, direct, u, grad, power, job.beside + BESIDE * w.i, k_of, of_h,
          v_of, weights, m);
}

// Second visit: the gradient of u, which may go where of_h is
void gradient(const Unit& w, const Sums& m, const float* k_of,
              const float* of_h, const float* v_of, const Target& target) {
    const Job& job = *w.job;
    const float rate = (float)w.rate;
    if (!(job.transform && w.bare > 0)) {
        const float c0 = (float)(-w.rate * m.g), c1 = (float)(-w.rate * m.gh);
        target.spans(0, w.n, [&](i64 b, i64 end, float* out) {
            each(b, end, [&](i64 j, int n, auto T) INLINED {
                put(out - b, j, n,
                    get(of_h, j, n, 0, T) * rate
                        + (get(k_of, j, n, 0, T) * c1 + c0));
            });
        });
        return;
    }
    // rate·(of_h − mean − h·mean(of_h h)) + κ·(v − mean v − k·mean(v k))
    const double kappa =
        -job.alpha * m.slope * w.bare * job.beside[BESIDE * w.i + 3];
    const float c0 = (float)(-w.rate * m.g - kappa * m.v),
                c1 = (float)(-w.rate * m.gh * w.rate / w.bare - kappa * m.vk),
                of_v = (float)kappa;
    const i64 later = target.job ? job.stride : 0;
    target.spans(0, w.n, [&](i64 b, i64 end, float* out) {
        const float* next = out + (end + 1 < w.n ? later : 0) - b;
        each(b, end, [&](i64 j, int n, auto T) INLINED {
            if (later) will_write(next + j, n);
            put(out - b, j, n,
                get(of_h, j, n, 0, T) * rate + (get(k_of, j, n, 0, T) * c1 + c0)
                    + get(v_of, j, n, 0, T) * of_v);
        });
    });
}

// ---- units in memory ----

constexpr i64 SHORT = 64;  // shorter runs are collected first
bool collected(const Job& job) {
    return job.half || (job.segments > 1 && job.length < SHORT);
}

template <class From, class To>
void copy_runs(const From* from, i64 from_stride, To* to, i64 to_stride,
               i64 length, i64 count) {
    for (i64 s = 0; s < count; s++, from += from_stride, to += to_stride) {
        i64 j = 0;
        for (; j + VL <= length; j += VL) store(to + j, load(from + j));
        if (j < length)
            store_part(to + j, (int)(length - j),
                       load_part(from + j, (int)(length - j), 0));
    }
}
void collect(const Job& job, const float* from, i64 start, float* to) {
    auto copy = [&](const auto* u) {
        copy_runs(u, job.stride, to, job.length, job.length, job.segments);
    };
    job.half ? copy(halves(from) + start) : copy(from + start);
}
void distribute(const Job& job, const float* from, float* to, i64 start) {
    auto copy = [&](auto* out) {
        copy_runs(from, job.length, out, job.stride, job.length, job.segments);
    };
    job.half ? copy(halves(to) + start) : copy(to + start);
}

#if defined(KERNEL_512) || defined(KERNEL_256)
inline void transpose(V r[VL]) {
    for (int i = 0; i < VL; i += 4) transpose_blocks(r + i);
    // r[4j+i]: column i of each block of four, of rows 4j … 4j+3
#if defined(KERNEL_512)
    __m512 t[16], *const of = (__m512*)r;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 2; k++) {
            t[4 * k + i] =
                _mm512_shuffle_f32x4(of[8 * k + i], of[8 * k + 4 + i], 0x88);
            t[4 * k + i + 8] =
                _mm512_shuffle_f32x4(of[8 * k + i], of[8 * k + 4 + i], 0xdd);
        }
    for (int i = 0; i < 4; i++) {
        of[i] = _mm512_shuffle_f32x4(t[i], t[4 + i], 0x88);
        of[8 + i] = _mm512_shuffle_f32x4(t[i], t[4 + i], 0xdd);
        of[4 + i] = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0x88);
        of[12 + i] = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0xdd);
    }
#else
    for (int i = 0; i < 4; i++) {
        const __m256 a = (__m256)r[i], b = (__m256)r[4 + i];
        r[i] = (V)_mm256_permute2f128_ps(a, b, 0x20);
        r[4 + i] = (V)_mm256_permute2f128_ps(a, b, 0x31);
    }
#endif
}
#endif

// `rows` numbers of each of VL runs, `pitch` apart, to rows of VL; up to VL − 1
// numbers behind a run may be read
void interleave(const float* from, i64 pitch, i64 rows, float* to) {
#if defined(KERNEL_512) || defined(KERNEL_256)
    for (i64 row = 0; row < rows; row += VL) {
        V r[VL];
        for (int i = 0; i < VL; i++) r[i] = load(from + i * pitch + row);
        transpose(r);
        const i64 n = rows - row < VL ? rows - row : VL;
        for (i64 i = 0; i < n; i++) store(to + (row + i) * VL, r[i]);
    }
#else
    for (i64 row = 0; row < rows; row++)
        for (int l = 0; l < VL; l++)
            to[row * VL + l] = from[l * pitch + row];
#endif
}

i64 padded(i64 n) { return (n + 2 * VL - 1) / VL * VL; }

constexpr i64 LARGE = 4096;  // units of which it pays to make a table

// units that are read and written where they are
bool in_place(const Job& job) { return job.segments == 1 && !job.half; }

// Floats of scratch memory that the pieces below need
i64 forward_room(const Job& job) {
    const i64 n = job.segments * job.length, room = padded(n);
    return in_place(job) && n >= LARGE ? 0 : 2 * room;
}
i64 backward_room(const Job& job) {
    const i64 n = job.segments * job.length, room = padded(n);
    return (in_place(job) ? 4 : 3) * room;
}

// All units that thread-independent piece `piece` holds
void forward_piece(const Job& job, i64 first, i64 last, float* memory) {
    const i64 n = job.segments * job.length, room = padded(n);
    // the moments of the next unit are computed while results of this one are
    // waited for
    if (in_place(job)) {
        float* ell = n < LARGE ? memory : nullptr;
        std::optional<Unit> units[2];
        auto begin = [&](i64 i) {
            Unit& w = units[i & 1].emplace(job, i);
            w.moments(job.u + start_of(job, i), nullptr);
        };
        begin(first);
        for (i64 i = first; i < last; i++) {
            const i64 start = start_of(job, i);
            Unit& w = *units[i & 1];
            if (i + 2 < last) w.later = start_of(job, i + 2);
            const Power power(power_of(w, job.u + start, ell));
            if (i + 1 < last) begin(i + 1);
            finish(w, job.u + start, ell, power, job.out + start,
                   {nullptr, job.out + start},
                   job.beside ? job.beside + BESIDE * i : nullptr);
        }
        return;
    }
    const bool brief = collected(job);
    float* u = memory + room;
    for (i64 i = first; i < last; i++) {
        // a guess, where other threads take pieces too
        const i64 start = start_of(job, i),
                  next =
                      i + 1 < last ? i + 1 : i + job.threads * (last - first);
        Unit w(job, i);
        if (next < job.units && !job.half) w.later = start_of(job, next);
        if (brief) collect(job, job.u, start, u);
        w.moments(brief ? u : job.u + start, brief ? nullptr : u);
        forward_unit(w, u, u,
                     brief ? Target{nullptr, u} : Target{&job, job.out + start},
                     n < LARGE ? memory : nullptr);
        if (brief) distribute(job, u, job.out, start);
    }
}

void backward_piece(const Job& job, i64 first, i64 last, Weights weights,
                    float* memory) {
    const i64 n = job.segments * job.length, room = padded(n);
    // the first visit to the next unit begins before the second visit to this
    // one
    if (in_place(job)) {
        std::optional<Unit> units[2];
        Sums sums[2];
        auto visit = [&](i64 i) {
            const i64 start = start_of(job, i);
            float* k = memory + (i & 1) * 2 * room;
            Unit& w = units[i & 1].emplace(job, i);
            restore(w);
            if (i > first && i + 1 < last) w.later = start_of(job, i + 1);
            find_sums(w, false, job.u + start, job.grad + start, k,
                      job.out + start, k + room, weights, sums[i & 1]);
        };
        visit(first);
        for (i64 i = first; i < last; i++) {
            if (i + 1 < last) visit(i + 1);
            const float* k = memory + (i & 1) * 2 * room;
            float* out = job.out + start_of(job, i);
            gradient(*units[i & 1], sums[i & 1], k, out, k + room,
                     {nullptr, out});
        }
        return;
    }
    const bool brief = collected(job);
    float *k = memory, *of = k + room, *v = of + room;
    for (i64 i = first; i < last; i++) {
        const i64 start = start_of(job, i),
                  next =
                      i + 1 < last ? i + 1 : i + job.threads * (last - first);
        Unit w = known_unit(job, i);
        if (next < job.units && !job.half) w.later = start_of(job, next);
        Sums sums;
        if (brief)
            collect(job, job.u, start, k), collect(job, job.grad, start, of);
        find_sums(w, !brief, brief ? k : job.u + start,
                  brief ? of : job.grad + start, k, of, v, weights, sums);
        gradient(w, sums, k, of, v,
                 brief ? Target{nullptr, of} : Target{&job, job.out + start});
        if (brief) distribute(job, of, job.out, start);
    }
}

// With one weight an element this does not depend on the number of threads, for
// each piece sums the gradients of the weights; otherwise no sum crosses units.
i64 piece_size(const Job& job) {
    // runs of whole pages: neighbours in memory at the same time
    if (job.segments > 1 && job.length >= 1024) return 1;
    i64 n = job.segments * job.length,
        pieces = job.weights < 0 ? 64 : 8 * job.threads;
    i64 size = (job.units + pieces - 1) / pieces, enough = (16384 + n - 1) / n;
    return size < enough ? enough : size > 512 ? 512 : size;
}

// f(piece, first unit, last unit, scratch memory of `room` floats) by
// all threads; false, and nothing done, where there is no such memory. Rows of
// memory are shared out in order, as PyTorch's operations before and after do,
// whose data are then in the cache of the same core.
template <class F>
bool each_piece(const Job& job, i64 room(const Job&), F f) {
    const i64 size = piece_size(job), pieces = (job.units + size - 1) / size;
    Shares shares(room(job), job.threads, pieces);
    if (!shares.memory) return false;
    auto piece = [&](i64 p, float*& memory) {
        if (!memory) memory = shares.mine();
        f(p, p * size, (p + 1) * size < job.units ? (p + 1) * size : job.units,
          memory);
    };
    if (job.segments == 1) share_out(job.threads, pieces, piece);
    else share_out<WHERE_FREE>(job.threads, pieces, piece);
    return true;
}

// ---- units that extend over several processes: a stage between two exchanges

// One visit each to this process's elements, and the rows of a table, of
// numbers in double, that it reads and that it finds
enum Stage { MOMENTS, AVERAGES, CENTRE, SCALE, OUTPUT, SUMS, GRADIENT };
enum { MEAN, VAR, D, KD, LOG, Q, DD, FARTHEST, MIDDLE, SPREAD, FORWARD_ROWS };
enum { OF_X, OF_X_H, OF_LAMBDA, MOVE, MOVE_K, BACKWARD_ROWS };

struct Table {  // rows of one number a unit
    double* first;
    i64 units, count;  // of the elements of a unit in all processes
    double& operator()(int row, i64 i) const { return first[row * units + i]; }
};

Averages averages_in(const Table& t, i64 i) {
    return {t(LOG, i), t(D, i), t(KD, i), t(DD, i), t(Q, i), t(FARTHEST, i)};
}

// A unit whose moments are those of all processes
Unit merged_unit(const Job& job, i64 i, const Table& t) {
    Unit w(job, i);
    w.mean = t(MEAN, i), w.var = t(VAR, i);
    w.center = (float)w.mean, w.rest = (float)(w.mean - w.center);
    w.set_rates();
    if (std::isnan(w.var)) w.rate = NAN;
    return w;
}

// Forward: u, contiguous, may be `temporary`
void forward_stage(int stage, const Job& job, i64 i, const float* u,
                   float* temporary, const Target& target, i64 later,
                   const Table& t) {
    if (stage == MOMENTS) {
        Unit w(job, i);
        w.moments(u, nullptr);
        t(MEAN, i) = w.mean, t(VAR, i) = w.var;
        return;
    }
    Unit w = merged_unit(job, i, t);
    if (stage == AVERAGES) {
        Averages m{};
        w.later = later;
        if (w.bare > 0) averages<NOT_KEPT>(w, u, nullptr, m);
        t(D, i) = m.d, t(KD, i) = m.kd, t(LOG, i) = m.log, t(Q, i) = m.q,
             t(DD, i) = m.dd, t(FARTHEST, i) = m.largest;
        return;
    }
    const double lmbda = power_by(w, t.count, [&](float* kept) {
        return newton(job, averages_in(t, i), kept);
    });
    w.largest = w.n < LARGE ? INFINITY : t(FARTHEST, i);
    if (stage == OUTPUT)
        return finish(w, u, nullptr, Power(lmbda), temporary, target,
                      job.beside + BESIDE * i, &t(SPREAD, i));
    const double sum = values_of(w, u, nullptr, Power(lmbda), temporary);
    if (stage == CENTRE) t(MIDDLE, i) = sum / w.n;
    else t(SPREAD, i) = deviation_of(w, temporary, (float)t(MIDDLE, i)) / w.n;
}

// Backward: a unit's sums, to the table or from it
void exchange(int stage, const Job& job, i64 i, Sums& m, const Table& t) {
    // ∂λ̂/∂k of an element is −α/L'' v
    const double factor = -job.alpha * job.beside[BESIDE * i + 3];
    if (stage == SUMS) {
        t(OF_X, i) = m.g, t(OF_X_H, i) = m.gh, t(OF_LAMBDA, i) = m.slope,
                t(MOVE, i) = factor * m.v, t(MOVE_K, i) = factor * m.vk;
        return;
    }
    m.g = t(OF_X, i), m.gh = t(OF_X_H, i), m.slope = t(OF_LAMBDA, i);
    m.v = t(MOVE, i) / factor, m.vk = t(MOVE_K, i) / factor;
}
// k, g ∂x/∂h and v to k_of, of_h and v_of, the first two of which may
// be u and grad
void backward_stage(int stage, const Unit& w, bool direct, const float* u,
                    const float* grad, float* k_of, float* of_h, float* v_of,
                    const Target& target, const Table& t) {
    const Job& job = *w.job;
    Sums m;
    find_sums(w, direct, u, grad, k_of, of_h, v_of,
              {job.weight_grad, job.bias_grad}, m);
    exchange(stage, job, w.i, m, t);
    if (stage == GRADIENT) gradient(w, m, k_of, of_h, v_of, target);
}

i64 stage_room(const Job& job) {
    const i64 n = job.segments * job.length;
    return 3 * padded(n);
}

void stage_piece(int stage, const Job& job, i64 first, i64 last, float* memory,
                 const Table& t) {
    const i64 n = job.segments * job.length, room = padded(n);
    const bool back = stage >= SUMS,
               writes = stage == OUTPUT || stage == GRADIENT;
    const bool brief = collected(job);
    float *u = memory, *of = u + room, *v = of + room;
    for (i64 i = first; i < last; i++) {
        const i64 start = start_of(job, i);
        const bool more = i + 1 < last && !job.half;
        if (brief || !back) collect(job, job.u, start, u);
        const Target target =
            brief ? Target{nullptr, back ? of : u}
                  : Target{&job, writes ? job.out + start : nullptr};
        if (back) {
            Unit w = known_unit(job, i);
            if (more) w.later = start_of(job, i + 1);
            if (brief) collect(job, job.grad, start, of);
            backward_stage(stage, w, !brief, brief ? u : job.u + start,
                           brief ? of : job.grad + start, u, of, v, target, t);
        } else {
            forward_stage(stage, job, i, u, u, target,
                          more ? start_of(job, i + 1) : -1, t);
        }
        if (brief && writes) distribute(job, back ? of : u, job.out, start);
    }
}

// ---- units abreast ----

// The first n ≤ VL numbers of a row, or of each of two rows `stride` apart
template <class E> inline V rows_of(const E* p, i64, int n, V) {
    return get(p, 0, n, 0, V{});
}
template <class E> inline V2 rows_of(const E* p, i64 stride, int n, V2) {
    return {get(p, 0, n, 0, V{}), get(p, stride, n, 0, V{})};
}
template <class E> inline void put_rows(E* p, i64, int n, V v) {
    put(p, 0, n, v);
}
template <class E> inline void put_rows(E* p, i64 stride, int n, V2 v) {
    put(p, 0, n, v.a), put(p, stride, n, v.b);
}
inline V either(I which, V a, V b) { return which ? a : b; }
inline V2 either(I which, V2 a, V2 b) {
    return {either(which, a.a, b.a), either(which, a.b, b.b)};
}
template <class E> inline float number(const E* p) {
    return get(p, 0, 1, 0, V{})[0];
}
// the same place in the next rows, in time
template <class E> inline void ahead(const E* p, i64 at, i64 width) {
    if (at % (64 / (i64)sizeof(E)) >= VL) return;
    __builtin_prefetch(p + at + 16 * width, 0, 2);
    __builtin_prefetch(p + at + 17 * width, 0, 2);
}
template <class E> inline void ahead(E* p, i64 at, i64 width) {
    if (at % (64 / (i64)sizeof(E)) >= VL) return;
    __builtin_prefetch(p + at + 16 * width, 1, 2);
    __builtin_prefetch(p + at + 17 * width, 1, 2);
}

// VL units that are neighbouring columns, one a lane, and what vectors of their
// rows need. Lanes behind the last one are as of a unit of mean 0 and
// deviation 1.
struct Abreast {
    const Job& job;
    i64 first;                                      // unit
    int count;
    // as in Unit; `bare` is `rate` where a unit is not transformed
    V origin{}, center{}, bare = set(1), bare_shift{}, rate = set(1), shift{},
      rho = set(1), gap{}, weight = set(1), bias{}, middle{}, amount{},
      beyond{}, turn{};                             // λ−1; over log 2
    double mean[VL] = {}, var[VL] = {}, square[VL], rates[VL], bares[VL];
    I moved{};                                      // lanes with a transform
    bool some = false, all = true, far = false, near = true;  // of these
    bool done = false;                              // has its moments
    Ell ell = NEAR;
    Power power;
    Move<V> move;
    Averages averages[VL];
    Sums sums[VL];
    V c0{}, c1{}, of_v{};                           // of the gradient
    Abreast(const Job& job_, i64 first_)
        : job(job_), first(first_),
          count(job.columns - first < VL ? (int)(job.columns - first) : VL),
          power(1) {
        for (int l = 0; job.weights && l < count; l++) {
            const i64 k = (first + l) % job.weight_period;
            if (job.weight) weight[l] = job.weight[k];
            if (job.bias) bias[l] = job.bias[k];
        }
    }
    float* kept(int l) const {
        return job.beside ? job.beside + BESIDE * (first + l) : nullptr;
    }
    void take(int l, const Unit& w) {
        const bool here = job.transform && w.bare > 0;
        rates[l] = w.rate, bares[l] = w.bare;
        center[l] = w.center, rate[l] = (float)w.rate;
        shift[l] = (float)(-w.rest * w.rate);
        const float r = (float)(here ? w.bare : w.rate);
        bare[l] = r, bare_shift[l] = -w.rest * r;
        moved[l] = -here, some |= here, all &= here;
        if (!here) return;
        rho[l] = (float)(w.rate / w.bare);
        gap[l] = (float)(1 - w.rate / w.bare);
        if (distance(w.rate / w.bare) == DISTANT) ell = DISTANT;
    }
    void take_power(int l, double lmbda, double largest = INFINITY) {
        const Power own(lmbda);
        for (int side = 0; side < 2; side++)
            power.binary[side][l] = own.binary[side][0],
            power.low[side][l] = own.low[side][0],
            power.inverse[side][l] = own.inverse[side][0];
        beyond[l] = own.beyond, turn[l] = own.beyond * (float)M_LOG2E;
        far |= moved[l] && own.far;
        near &= !moved[l] || own.near(largest);
    }
    // a unit as the forward pass left it
    void take_known(int l) {
        take(l, known_unit(job, first + l));
        take_power(l, job.lmbda[first + l]);
        const float* const numbers = kept(l);
        const Move<float> own(numbers);
        move.of_p[l] = own.of_p, move.of_d[l] = own.of_d,
        move.of_ell[l] = own.of_ell, move.of_log[l] = own.of_log;
        take_amount(l, numbers[1]);
    }
    void take_amount(int l, double spread) {
        amount[l] =
            (float)(job.noise * (job.kind == DROPOUT ? 1 : spread));
    }
    // λ̂ of a unit, by its averages; 1 leaves values as they are
    void estimate(int l, Unit own, i64 elements, const Averages& of) {
        const double lmbda = power_by(own, elements, [&](float* kept) {
            return newton(job, of, kept);
        });
        take(l, own), take_power(l, lmbda, of.largest);
        if (lmbda == 1) moved[l] = 0, all = false;
    }
};

// runs of whole quadruples
inline bool by_quadruples(const Job& job) {
    return !((job.run | (i64)job.offset) & 3);
}
// noise of some rows: row by row, as it is numbered, or down the columns,
// VL of which then lie together
void make_noise(const Job& job, const Abreast* all, i64 vectors, i64 from,
                i64 to, i64 many, float* z) {
    const Keys keys(job.seed);
    if (job.run == 1)
        return normals(job.offset + from * job.columns,
                       (to - from) * job.columns, keys, z);
    if (by_quadruples(job)) {
        for (i64 v = 0; v < vectors; v++)
            for (i64 row = from, end; row < to; row = end) {
                end = row - row % job.run + job.run;
                if (end > to) end = to;
                Counters counters(Unit(job, all[v].first).index_of(row) >> 2,
                                  job.run / 4);
                counters.low =
                    (job.offset + job.length * job.columns) >> 34 == 0;
                for (i64 four = row; four < end; four += 4 * BATCHES) {
                    const i64 left = (end - four) / 4;
                    batches<true>(counters,
                                  left < BATCHES ? (int)left : BATCHES, keys,
                                  z + (v * many + four - from) * VL);
                }
            }
        return;
    }
    const i64 pitch = many + VL;
    float* const apart = z + vectors * many * VL;
    for (i64 v = 0; v < vectors; v++) {
        for (int l = 0; l < VL; l++) {
            const Unit own(job, all[v].first
                                    + (l < all[v].count ? l : 0));
            NoiseOf noise_of(own);
            noise_of(from, to - from, apart + l * pitch);
        }
        interleave(apart, pitch, to - from, z + v * many * VL);
    }
}

// Where a visit is: the first element of its row, or of its two rows; their
// noise, `step` apart; and what the strip remembers of them, in ARRAYS arrays
struct Here {
    static constexpr int ROWS = 16, ARRAYS = 3;
    const Abreast& w;
    i64 at;
    int lanes;
    const float* z;
    i64 step;
    float* temporary;
    template <class T> T remembered(int which, T, int row = 0) const {
        return get(temporary + (which * ROWS + row) * VL, 0, sizeof(T) / 4, 0,
                   T{});
    }
    template <class T> void remember(int which, T x, int row = 0) const {
        put(temporary + (which * ROWS + row) * VL, 0, sizeof(T) / 4, x);
    }
};

// A call: its columns, VL at a time; their sums, which a number of rows that
// the shape alone decides has for itself, so that they do not depend on the
// number of threads; and noise.
struct Sheet {
    static constexpr int MOST = 7;  // sums
    const Job& job;
    i64 rows, vectors, size, pieces;
    Abreast* all;
    double* sums;
    float* between;  // as large as the output, of float
    explicit Sheet(const Job& job_, bool between_ = false)
        : job(job_), rows(job.length), vectors((job.columns + VL - 1) / VL),
          size(64 * (512 / job.columns + 1)) {
        if (rows > 64 * size) size = (rows / 64 + 63) / 64 * 64;
        if (job.run < size) size = (size + job.run - 1) / job.run * job.run;
        pieces = (rows + size - 1) / size;
        all = (Abreast*)given_memory[0].take(vectors * sizeof(Abreast) / 4);
        sums = (double*)all_sums[0].take(pieces * vectors * MOST * VL * 2);
        between = !between_                          ? nullptr
                  : job.half || !all_here(job.out)
                      ? all_sums[1].take(rows * job.columns)
                      : job.out;
        ok = all && sums && (between || !between_);
        for (i64 v = 0; ok && v < vectors; v++)
            new (all + v) Abreast(job, v * VL);
    }
    ~Sheet() {
        if (between != job.out && rows * job.columns > (1 << 20))
            all_sums[1].release();
    }
    bool ok;

    // f(here, type, sums t) for all rows, two at a time, or one: each of
    // several f in turn for the rows of a strip. Of N sums the last TOP are not
    // sums but the largest.
    template <int N, bool NOISY, int TOP = 0, class... F>
    bool visit(F... f) const {
        const bool in_rows = job.run == 1;
        // rows of which noise is made together: whole runs, down the columns
        const i64 width = job.columns, few = Here::ROWS,
                  room = width < 1024 ? 65536 / width : 64,
                  most = room < size ? room : size,
                  many = in_rows              ? few
                         : by_quadruples(job) ? 4 * BATCHES
                         : job.run > most     ? most / 4 * 4
                                              : most / job.run * job.run,
                  step = in_rows ? width : VL,
                  beside = in_rows ? VL : many * VL;
        const i64 count = vectors * N * VL;         // of sums
        Shares shares(count + (NOISY ? (vectors * many + many + VL) * VL : 16),
                      job.threads, pieces);
        if (!shares.memory) return false;
        auto strip = [&](const Abreast& w, i64 top, i64 end, const float* z,
                         float* sum) INLINED {
            alignas(64) float temporary[Here::ARRAYS * Here::ROWS * VL];
            V t[N ? N : 1];
            for (int m = 0; m < N; m++) t[m] = load(sum + m * VL);
            auto pass = [&](auto f) INLINED {
                Here here{w, top * width + w.first,
                          w.count, z, step, temporary};
                i64 row = top;
                for (; row + 2 <= end; row += 2) {
                    f(here, V2{}, t);
                    here.at += 2 * width, here.z += 2 * step;
                    here.temporary += 2 * VL;
                }
                if (row < end) f(here, V{}, t);
            };
            (pass(f), ...);
            for (int m = 0; m < N; m++) store(sum + m * VL, t[m]);
        };
        auto piece = [&](i64 p, float* part) {
            double* const own = sums + p * count;
            float* const memory = part + count;
            std::memset(own, 0, count * sizeof(double));
            std::memset(part, 0, count * sizeof(float));
            const i64 last = (p + 1) * size < rows ? (p + 1) * size : rows;
            i64 end, made = p * size - many, known = p * size;
            // sums in float of 64 rows
            auto transfer = [&] {
                for (i64 v = 0; v < count; v += N * VL)
                    for (int m = 0; m < N; m++)
                        for (int l = 0; l < VL; l++) {
                            double& of = own[v + m * VL + l];
                            const float x = part[v + m * VL + l];
                            of = m < N - TOP ? of + x : x > of ? x : of;
                        }
                std::memset(part, 0, count * sizeof(float));
            };
            for (i64 top = p * size; top < last; top = end) {
                if (top - made >= many) {
                    made = top;
                    if (NOISY)
                        make_noise(
                            job, all, vectors,
                            made, made + many < last ? made + many : last,
                            many, memory);
                }
                end = made + many < last ? made + many : last;
                if (top + few < end) end = top + few;
                for (i64 v = 0; v < vectors; v++)
                    strip(all[v], top, end,
                          NOISY ? memory + v * beside + (top - made) * step
                                : nullptr,
                          part + v * N * VL);
                if (N && end - known >= 64) transfer(), known = end;
            }
            if (N) transfer();
        };
        share_out(job.threads, pieces, [&](i64 p, float*& memory) {
            if (!memory) memory = shares.mine();
            piece(p, memory);
        });
        return true;
    }

    // f(units, sums over all rows, or the largest)
    template <int N, int TOP = 0, class F> void each(F f) const {
        const i64 threads = (N ? pieces : 1) * vectors < 32 ? 1 : job.threads;
        share_out(threads, vectors, [&](i64 v, float*&) {
            double total[N ? N : 1][VL] = {};
            for (i64 p = 0; p < pieces; p++)
                for (int m = 0; m < N; m++)
                    for (int l = 0; l < VL; l++) {
                        const double one =
                            sums[(p * vectors + v) * N * VL + m * VL + l];
                        if (m < N - TOP) total[m][l] += one;
                        else if (one > total[m][l]) total[m][l] = one;
                    }
            f(all[v], total);
        });
    }
};

Unit unit_of(const Job& job, i64 i, double mean, double var) {
    Unit w(job, i);
    w.mean = mean, w.var = var;
    w.center = (float)mean, w.rest = (float)(mean - w.center);
    w.set_rates();
    return w;
}

// as Unit::moments, about the mean of sixteen rows
template <class E> bool moments(const Sheet& sheet, const E* u) {
    const i64 n = sheet.rows, width = sheet.job.columns;
    sheet.each<0>([&](Abreast& w, auto) {
        for (i64 k = 0; k < 16; k++)
            w.origin += get(u + k * n / 16 * width + w.first, 0, w.count, 0,
                            V{}) * 0.0625f;
    });
    for (int time = 0; time < 2; time++) {
        if (!sheet.visit<2, false>([=](const Here& here, auto T,
                                       V* t) INLINED {
                if (here.w.done) return;
                ahead(u, here.at, width);
                auto c = rows_of(u + here.at, width, here.lanes, T)
                         - here.w.origin;
                add(t[0], c), add(t[1], c, c);
            }))
            return false;
        sheet.each<2>([&](Abreast& w, const double (*sum)[VL]) {
            bool far = false;
            for (int l = 0; !w.done && l < w.count; l++) {
                const double off = sum[0][l] / n;
                w.square[l] = sum[1][l] / n, w.mean[l] = w.origin[l] + off,
                w.var[l] = w.square[l] - off * off;
                if (off * off > w.var[l])
                    w.origin[l] = (float)w.mean[l], far = true;
            }
            w.done = !far;
        });
        bool all = true;
        for (i64 v = 0; v < sheet.vectors; v++) all &= sheet.all[v].done;
        if (all) break;
    }
    sheet.each<0>([&](Abreast& w, auto) {
        for (int l = 0; l < w.count; l++)
            if (!(w.square[l] < 1e37) || w.square[l] < 1e-30)
                in_double([&](i64 j) {
                    return number(u + j * width + w.first + l);
                }, n, w.mean[l], w.var[l]);
    });
    return true;
}

inline void larger(V& most, V a) { most = a > most ? a : most; }
inline void larger(V& most, V2 a) { larger(most, a.a), larger(most, a.b); }
// k, and ℓ of k where there is a transform, which are to be remembered
template <bool POWER = true, class E>
auto standardize(const E* u, i64 width) {
    return [=](const Here& here, auto T, V*) INLINED {
        const Abreast& w = here.w;
        ahead(u, here.at, width);
        auto k = (rows_of(u + here.at, width, here.lanes, T) - w.center)
                     * w.bare + w.bare_shift;
        here.remember(0, k);
        if (POWER) here.remember(1, log1p_of(absolute(k)));
    };
}
template <Ell ELL, class E>
bool averages(const Sheet& sheet, const E* u, float* ell_of) {
    const i64 width = sheet.job.columns;
    const bool done = sheet.visit<6, false, 1>(
        standardize(u, width), [=](const Here& here, auto T, V* t) INLINED {
            const Abreast& w = here.w;
            auto k = here.remembered(0, T), a = absolute(k),
                 ell = here.remembered(1, T), log = with_sign(ell, k),
                 g = a * ell + ell, d = g - a;
            add(t[0], log), add(t[1], d), add(t[2], k, d), add(t[3], d, d),
                add(t[4], g, ell), larger(t[5], a);
            if constexpr (ELL == NEAR)
                put_rows(ell_of + here.at, width, here.lanes,
                         ell_near(ell, a, w.gap, w.rho * 0.5f + 0.5f));
            if constexpr (ELL == DISTANT)
                put_rows(ell_of + here.at, width, here.lanes,
                         log1p_of(a * w.rho));
        });
    const double n = (double)sheet.rows;
    sheet.each<6, 1>([&](Abreast& w, const double (*sum)[VL]) {
        for (int l = 0; l < w.count; l++)
            w.averages[l] = {sum[0][l] / n, sum[1][l] / n, sum[2][l] / n,
                             sum[3][l] / n, sum[4][l] / n, sum[5][l]};
    });
    return done;
}

// h, and ℓ of h where it has not been kept and one part of it will do
template <class E>
auto normalize(const E* u, const float* ell_of, i64 width) {
    return [=](const Here& here, auto T, V*) INLINED {
        const Abreast& w = here.w;
        ahead(u, here.at, width);
        auto h = (rows_of(u + here.at, width, here.lanes, T) - w.center)
                     * w.rate + w.shift;
        here.remember(0, h);
        if (w.some && w.near && !ell_of)
            here.remember(1, log1p_of(absolute(h)));
    };
}
// the transformed value
template <class T>
INLINED inline T value_of(const Here& here, const float* ell_of, i64 width, T) {
    const Abreast& w = here.w;
    T h = here.remembered(0, T{}), x = h;
    if (!w.some) return h;
    auto kept = [&]() INLINED {
        return rows_of(ell_of + here.at, width, here.lanes, T{});
    };
    if (w.near)
        x = transform_near(h, ell_of ? kept() : here.remembered(1, T{}),
                           w.beyond, w.power.inverse);
    else
        x = ell_of ? transform(h, kept(), w.power)
                   : transform(h, log1p_in_parts(absolute(h)), w.power);
    return w.all ? x : either(w.moved, x, h);
}
// the values to `between`, and their means
template <class E>
bool values(const Sheet& sheet, const E* u, const float* ell_of) {
    const i64 width = sheet.job.columns;
    float* const to = sheet.between;
    return sheet.visit<1, false>(
        normalize(u, ell_of, width),
        [=](const Here& here, auto T, V* t) INLINED {
            ahead(to, here.at, width);
            auto x = value_of(here, ell_of, width, T);
            put_rows(to + here.at, width, here.lanes, x), add(t[0], x);
        });
}
// their absolute deviations from `middle`
bool deviations(const Sheet& sheet) {
    const i64 width = sheet.job.columns;
    const float* const from = sheet.between;
    return sheet.visit<1, false>([=](const Here& here, auto T, V* t) INLINED {
        ahead(from, here.at, width);
        add(t[0], absolute(rows_of(from + here.at, width, here.lanes, T)
                           - here.w.middle));
    });
}
// Output, where the spread of the values is known: from u, or from the values
template <class E>
bool output(const Sheet& sheet, const E* u, E* out, const float* ell_of,
            bool made) {
    const Job& job = sheet.job;
    const i64 width = job.columns;
    const float* const values = sheet.between;
    if (job.noise == 0)
        return sheet.visit<0, false>(
            normalize(u, ell_of, width),
            [=](const Here& here, auto T, V*) INLINED {
                ahead(out, here.at, width);
                put_rows(out + here.at, width, here.lanes,
                         value_of(here, ell_of, width, T) * here.w.weight
                             + here.w.bias);
            });
    const bool dropout = job.kind == DROPOUT;
    auto noisy = [=](const Here& here, auto x) INLINED {
        const Abreast& w = here.w;
        auto noise = rows_of(here.z, here.step, here.lanes, x) * w.amount;
        put_rows(out + here.at, width, here.lanes,
                 (dropout ? x * noise + x : x + noise) * w.weight + w.bias);
    };
    if (made)
        return sheet.visit<0, true>(
            [=](const Here& here, auto T, V*) INLINED {
                ahead(values, here.at, width), ahead(out, here.at, width);
                noisy(here, rows_of(values + here.at, width, here.lanes, T));
            });
    return sheet.visit<0, true>(
        normalize(u, ell_of, width),
        [=](const Here& here, auto T, V*) INLINED {
            ahead(out, here.at, width);
            noisy(here, value_of(here, ell_of, width, T));
        });
}

// f(u, grad, out), which lie at addresses of either type
template <class F> inline bool of_type(const Job& job, F f) {
    return job.half ? f(halves(job.u), halves(job.grad), halves(job.out))
                    : f(job.u, job.grad, job.out);
}
void take_spread(Abreast& w, int l, double spread) {
    if (w.kept(l)) w.kept(l)[1] = (float)spread;
    w.take_amount(l, spread);
}

bool forward_columns(const Job& job) {
    const bool scaled = job.noise != 0 && job.kind == SCALED;
    // ℓ in the place of the output, as in units that are not long
    const bool keeps = job.transform && job.length < LARGE;
    Sheet sheet(job, scaled || keeps);
    return sheet.ok && of_type(job, [&](auto u, auto, auto out) {
        if (!moments(sheet, u)) return false;
        auto own = [&](const Abreast& w, int l) {
            return unit_of(job, w.first + l, w.mean[l], w.var[l]);
        };
        sheet.each<0>([&](Abreast& w, auto) {
            for (int l = 0; l < w.count; l++) w.take(l, own(w, l));
        });
        bool near = true;
        for (i64 v = 0; v < sheet.vectors; v++)
            near &= sheet.all[v].ell == NEAR;
        float* const ell_of = keeps ? sheet.between : nullptr;
        if (job.transform
            && !(!ell_of ? averages<NOT_KEPT>(sheet, u, nullptr)
                 : near  ? averages<NEAR>(sheet, u, ell_of)
                         : averages<DISTANT>(sheet, u, ell_of)))
            return false;
        sheet.each<0>([&](Abreast& w, auto) {
            for (int l = 0; l < w.count; l++) {
                w.estimate(l, own(w, l), job.length, w.averages[l]);
                if (job.noise != 0)
                    take_spread(w, l, job.kind == UNSCALED
                                          ? std::sqrt(2 / M_PI) : 0);
            }
        });
        if (scaled) {
            if (!values(sheet, u, ell_of)) return false;
            sheet.each<1>([&](Abreast& w, const double (*sum)[VL]) {
                for (int l = 0; l < w.count; l++)
                    w.middle[l] = (float)(sum[0][l] / job.length);
            });
            if (!deviations(sheet)) return false;
            sheet.each<1>([&](Abreast& w, const double (*sum)[VL]) {
                for (int l = 0; l < w.count; l++)
                    take_spread(w, l, sum[0][l] / job.length);
            });
        }
        return output(sheet, u, out, ell_of, scaled);
    });
}

// First visit of the backward pass, as for a unit: g ∂x/∂h to `between`
template <Ell ELL, bool FAR, bool POWER, bool NOISY, class E>
bool reduce_rows(const Sheet& sheet, const E* u, const E* grad) {
    const i64 width = sheet.job.columns;
    const bool dropout = sheet.job.kind == DROPOUT;
    float* const to = sheet.between;
    // v's sums; ℓ becomes that of h, with its sign
    auto move = [=](const Here& here, auto T, V* t) INLINED {
        const Abreast& w = here.w;
        for (int row = 0; POWER && row < (int)(sizeof T / sizeof(V)); row++) {
            V k = here.remembered(0, V{}, row), a = absolute(k),
              ell = here.remembered(1, V{}, row), inverse = 1.0f / (a + 1.0f),
              v = w.move(a, ell, with_sign(ell, k), inverse);
            add(t[3], v), add(t[4], v, k);
            if constexpr (ELL == DISTANT) {
                ell = log1p_of(a * w.rho);
            } else {
                V share = inverse * w.gap - w.gap;
                ell = share * (share * -0.5f + 1.0f) + ell;
            }
            here.remember(1, with_sign(ell, k), row);
        }
    };
    auto slope = [=](const Here& here, auto T, V*) INLINED {
        if (POWER && !FAR)
            here.remember(
                2, steepness(here.remembered(1, T), here.w.turn));
    };
    return sheet.visit<7, NOISY>(
        standardize<POWER>(u, width), move, slope,
        [=](const Here& here, auto T, V* t) INLINED {
            const Abreast& w = here.w;
            const i64 at = here.at;
            ahead(grad, at, width), ahead(to, at, width);
            auto g = rows_of(grad + at, width, here.lanes, T),
                 k = here.remembered(0, T), upstream = g * w.weight, noise = T;
            if constexpr (NOISY) {
                noise = rows_of(here.z, here.step, here.lanes, T) * w.amount;
                if (dropout) upstream += upstream * noise;
            }
            auto x = k, of = upstream;
            if constexpr (POWER) {
                auto log = here.remembered(1, T),
                     size = absolute(k) * w.rho + 1.0f,
                     by_eta = choose(k, w.power.inverse), steep = T, expo = T;
                if constexpr (FAR) {
                    auto ell = absolute(log),
                         binary = choose(k, w.power.binary);
                    auto e = exp_of(binary, choose(k, w.power.low), ell);
                    expo = exp_from(e), steep = expo / size;
                    x = expm1_from(e, by_eta);
                    add(t[2], upstream,
                        slope_in_lambda(log, binary * ell * 0.69314718056f,
                                        expo, x, by_eta));
                } else {
                    steep = here.remembered(2, T), expo = steep * size;
                    x = (expo - 1.0f) * by_eta;
                    add(t[2], upstream, (log * expo - x) * by_eta);
                }
                of = upstream * steep;
                if (!w.all)
                    x = either(w.moved, x, k),
                    of = either(w.moved, of, upstream);
            }
            add(t[0], of), add(t[1], of, k);
            put_rows(to + at, width, here.lanes, of);
            auto y = x;
            if constexpr (NOISY) y = dropout ? x * noise + x : x + noise;
            add(t[5], g, y), add(t[6], g);
        });
}

// The sums of each unit, and with them the gradients of weight and bias
template <class E> bool find_sums(const Sheet& sheet, const E* u,
                                  const E* grad) {
    const Job& job = sheet.job;
    bool some = false, near = true, far = false;
    sheet.each<0>([](Abreast& w, auto) {
        for (int l = 0; l < w.count; l++) w.take_known(l);
    });
    for (i64 v = 0; v < sheet.vectors; v++) {
        const Abreast& w = sheet.all[v];
        some |= w.some, near &= w.ell == NEAR, far |= w.far;
    }
    const bool noisy =
        job.noise != 0 && (job.weight_grad || job.kind == DROPOUT);
    auto visit = [&](auto noise) {
        constexpr bool NOISY = decltype(noise)::value;
        return !some   ? reduce_rows<NEAR, false, false, NOISY, E>
               : far   ? near ? reduce_rows<NEAR, true, true, NOISY, E>
                              : reduce_rows<DISTANT, true, true, NOISY, E>
               : near  ? reduce_rows<NEAR, false, true, NOISY, E>
                       : reduce_rows<DISTANT, false, true, NOISY, E>;
    };
    const bool done = noisy ? visit(std::true_type())(sheet, u, grad)
                            : visit(std::false_type())(sheet, u, grad);
    const double n = (double)sheet.rows;
    sheet.each<7>([&](Abreast& w, const double (*sum)[VL]) {
        for (int l = 0; l < w.count; l++) {
            Sums& m = w.sums[l];
            m.g = sum[0][l] / n, m.gh = sum[1][l] / n, m.slope = sum[2][l] / n;
            m.v = sum[3][l] / n, m.vk = sum[4][l] / n;
            if (w.moved[l]) m.gh *= w.rates[l] / w.bares[l];
            if (job.weight_grad)
                job.weight_grad[w.first + l] = (float)sum[5][l];
            if (job.bias_grad) job.bias_grad[w.first + l] = (float)sum[6][l];
        }
    });
    return done;
}

// Second visit: the gradient of u. v is computed again, which takes no longer
// than to write it down and to read it.
template <class E> bool gradient(const Sheet& sheet, const E* u, E* out) {
    const Job& job = sheet.job;
    const i64 width = job.columns;
    const float* const of_h = sheet.between;
    sheet.each<0>([&](Abreast& w, auto) {
        for (int l = 0; l < w.count; l++) {
            const Sums& m = w.sums[l];
            const bool moved = w.moved[l];
            const double rate = w.rates[l], bare = w.bares[l],
                         kappa = moved ? -job.alpha * m.slope * bare
                                             * w.kept(l)[3]
                                       : 0;
            w.of_v[l] = (float)kappa;
            w.c0[l] = (float)(-rate * m.g - (moved ? kappa * m.v : 0));
            w.c1[l] = (float)(moved ? -rate * m.gh * rate / bare - kappa * m.vk
                                    : -rate * m.gh);
        }
    });
    return sheet.visit<0, false>(
        standardize(u, width), [=](const Here& here, auto T, V*) INLINED {
            const Abreast& w = here.w;
            const i64 at = here.at;
            ahead(of_h, at, width), ahead(out, at, width);
            auto k = here.remembered(0, T),
                 x = rows_of(of_h + at, width, here.lanes, T) * w.rate
                     + (k * w.c1 + w.c0);
            if (w.some) {
                auto a = absolute(k), ell = here.remembered(1, T);
                x = x + w.move(a, ell, with_sign(ell, k), 1.0f / (a + 1.0f))
                        * w.of_v;
            }
            put_rows(out + at, width, here.lanes, x);
        });
}

bool backward_columns(const Job& job) {
    Sheet sheet(job, true);
    return sheet.ok && of_type(job, [&](auto u, auto grad, auto out) {
        return find_sums(sheet, u, grad) && gradient(sheet, u, out);
    });
}

// A stage of units in several processes
bool stage_of_columns(int stage, const Job& job_, const Table& t) {
    Job job = job_;
    const bool back = stage >= SUMS,
               made = back || stage == CENTRE || stage == SCALE;
    Sheet sheet(job, made);
    if (!sheet.ok) return false;
    auto each = [&](auto f) {
        sheet.each<0>([&](Abreast& w, auto) {
            for (int l = 0; l < w.count; l++) f(w, l, w.first + l);
        });
    };
    return of_type(job, [&](auto u, auto grad, auto out) {
        if (stage == MOMENTS) {
            if (!moments(sheet, u)) return false;
            each([&](Abreast& w, int l, i64 i) {
                t(MEAN, i) = w.mean[l], t(VAR, i) = w.var[l];
            });
            return true;
        }
        if (back) {
            if (!find_sums(sheet, u, grad)) return false;
            each([&](Abreast& w, int l, i64 i) {
                exchange(stage, job, i, w.sums[l], t);
            });
            return stage == SUMS || gradient(sheet, u, out);
        }
        each([&](Abreast& w, int l, i64 i) {
            const Unit own = merged_unit(job, i, t);
            if (stage == AVERAGES) return w.take(l, own);
            w.estimate(l, own, t.count, averages_in(t, i));
        });
        if (stage == AVERAGES) {
            if (!averages<NOT_KEPT>(sheet, u, nullptr)) return false;
            each([&](Abreast& w, int l, i64 i) {
                const Averages m = w.moved[l] ? w.averages[l] : Averages{};
                t(D, i) = m.d, t(KD, i) = m.kd, t(LOG, i) = m.log,
                     t(Q, i) = m.q, t(DD, i) = m.dd,
                     t(FARTHEST, i) = m.largest;
            });
            return true;
        }
        if (stage == OUTPUT) {
            each([&](Abreast& w, int l, i64 i) {
                take_spread(w, l, job.kind == UNSCALED ? std::sqrt(2 / M_PI)
                                  : job.kind == SCALED ? t(SPREAD, i)
                                                       : 0);
            });
            return output(sheet, u, out, nullptr, false);
        }
        if (!values(sheet, u, nullptr)) return false;
        if (stage == CENTRE) {
            sheet.each<1>([&](Abreast& w, const double (*sum)[VL]) {
                for (int l = 0; l < w.count; l++)
                    t(MIDDLE, w.first + l) = sum[0][l] / job.length;
            });
            return true;
        }
        each([&](Abreast& w, int l, i64 i) {
            w.middle[l] = (float)t(MIDDLE, i);
        });
        if (!deviations(sheet)) return false;
        sheet.each<1>([&](Abreast& w, const double (*sum)[VL]) {
            for (int l = 0; l < w.count; l++)
                t(SPREAD, w.first + l) = sum[0][l] / job.length;
        });
        return true;
    });
}

struct Channel {  // given statistics of a channel
    // `far`: where |h| could overflow exp_of, or log1p_of
    float center, rate, far, weight, bias;
    // λ = 1 is a transform, too; whether coefficients times the weight can be
    // represented
    bool transform, table;
    Power power;
    Channel() : power(1) {}
    Channel(const Job& job, i64 c)
        : weight(job.weight ? job.weight[c] : 1),
          bias(job.bias ? job.bias[c] : 0),
          power(job.transform ? job.lmbda[c] : 1, true) {
        Unit w(job, c);
        w.var = job.var[c], center = job.mean[c];
        w.set_rates();
        rate = std::isnan(w.var) ? NAN : (float)w.rate;
        transform = job.transform;
        table = weight == 0
                || (std::fabs(weight) > 1e-20f && std::fabs(weight) < 1e20f);
        double eta = std::fmax(power.most, 2);
        far = power.identity ? std::numeric_limits<float>::infinity()
              : eta < 1000   ? (float)std::fmin(std::expm1(80 / eta), 2800)
                             : 0;
    }
    // ψ'(h), as the definition has it: 0 where the value was moved; for an
    // infinite h the limit, and NaN for λ = 1, where that is ∞ / ∞
    double slope(double h) const {
        const double l = power.lmbda, eta = h < 0 ? 2 - l : l,
                     ell = std::log1p(std::fabs(h));
        return eta > 1 && std::isfinite(h) && eta * ell > TOP
                   ? 0
                   : std::exp((eta - 1) * ell);
    }
    bool beyond(float u) const {
        const float h = (u - center) * rate;
        return transform && !(std::fabs(h) < far);
    }
    float slowly(float u) const {
        return (float)slow_power((u - center) * rate, power.lmbda) * weight
               + bias;
    }
};

// Gradients for given statistics: of the elements of a channel, and what they
// add to those of weight and bias
void given_gradient(const Channel& channel, const float* u, const float* grad,
                    float* out, i64 length, double& of_weight,
                    double& of_bias) {
    const Channel c = channel;
    const V center = set(c.center), rate = set(c.rate),
            factor = set(c.rate * c.weight);
    const I far = (I)set(c.far);                    // infinite for λ = 1
    for (i64 b = 0; b < length; b += BLOCK) {
        const i64 end = b + BLOCK < length ? b + BLOCK : length;
        V s_weight{}, s_bias{};
        I most{};
        each(b, end, [&](i64 j, int n, auto T) INLINED {
            auto g = get(grad, j, n, 0, T),
                 h = (get(u, j, n, c.center, T) - center) * rate,
                 a = absolute(h), x = h, slope = T + factor;
            if (c.transform) largest(most, a);
            if (!c.power.identity) {
                auto ell = log1p_in_parts(a);
                auto e = exp_of(choose(h, c.power.binary),
                                choose(h, c.power.low), ell);
                x = expm1_from(e, choose(h, c.power.inverse));
                slope = exp_from(e) / (a + 1.0f) * factor;
            }
            put(out, j, n, g * slope);
            add(s_weight, g, x), add(s_bias, g);
        });
        of_bias += total(s_bias);
        if (!any(most >= far)) {
            of_weight += total(s_weight);
            continue;
        }
        for (i64 j = b; j < end; j++) {
            const double h = (u[j] - c.center) * c.rate;
            out[j] = (float)(grad[j] * c.slope(h) * c.rate * c.weight);
            of_weight += grad[j] * slow_power(h, c.power.lmbda);
        }
    }
}

void evaluate_run(const Channel& channel, const float* u, float* out,
                  i64 length) {
    const Channel c = channel;  // its constants in registers
    const V weight = set(c.weight), bias = set(c.bias), center = set(c.center),
            rate = set(c.rate);
    if (c.power.identity) {
        each(0, length, [&](i64 j, int n, auto T) INLINED {
            put(out, j, n,
                (get(u, j, n, 0, T) - center) * rate * weight + bias);
        });
        return;
    }
    const I far = (I)set(c.far);
    for (i64 b = 0; b < length; b += BLOCK) {
        i64 end = b + BLOCK < length ? b + BLOCK : length;
        // of the bits of |h|, which are ordered as the numbers are, NaN above
        // all
        I most{};
        each(b, end, [&](i64 j, int n, auto T) INLINED {
            auto h = (get(u, j, n, c.center, T) - center) * rate,
                 a = absolute(h);
            largest(most, a);
            put(out, j, n,
                transform(h, log1p_in_parts(a), c.power) * weight + bias);
        });
        if (any(most >= far))  // each by itself, whatever stands beside it
            for (i64 j = b; j < end; j++)
                if (c.beyond(u[j])) out[j] = c.slowly(u[j]);
    }
}

#if defined(KERNEL_TABLES)
void evaluate_by_pieces(const Channel& channel, const Pieces& pieces,
                        const float* u, float* out, i64 length) {
    const Lookup table(pieces);
    const V bias = set(channel.bias), center = set(channel.center),
            rate = set(channel.rate);
    const float fill = channel.center;
    auto stretch = [&](i64 b, i64 end) INLINED {
        I most{};  // of the bits of |h|
        each(b, end, [&](i64 j, int n, auto T) INLINED {
            auto h = (get(u, j, n, fill, T) - center) * rate, a = absolute(h);
            largest(most, a);
            put(out, j, n, table(h, a, bias));
        });
        // 15
        if (any(most >= 0x41700000))
            for (i64 j = b; j < end; j++)
                if (!(std::fabs((u[j] - channel.center) * channel.rate) < 15))
                    evaluate_run(channel, u + j, out + j, 1);
    };
    // without cheap parts of vectors the last goes over the one before again
    const i64 whole = VL == 16 || length < VL ? length : length / VL * VL;
    for (i64 b = 0; b < whole; b += BLOCK)
        stretch(b, b + BLOCK < whole ? b + BLOCK : whole);
    if (whole < length) stretch(length - VL, length);
}
#endif

// VL channels side by side: lane by lane what a vector of a row needs. Lanes
// behind the last channel give 0.
struct Channels {
    V center{}, rate{}, weight{}, bias{};
    I far{}, same{};                                // same: λ is 1
    Power power;
    bool identity = true, some = false;             // all lanes; any
    Channels(const Channel* of, int n) : power(1) {
        far = I{} + 0x7fffffff;
        for (int k = 0; k < n; k++) {
            const Channel& c = of[k];
            center[k] = c.center, rate[k] = c.rate, weight[k] = c.weight,
            bias[k] = c.bias, same[k] = -c.power.identity;
            if (c.transform) far[k] = ((I)set(c.far))[0];
            identity &= c.power.identity, some |= c.power.identity;
            for (int side = 0; side < 2; side++)
                power.binary[side][k] = c.power.binary[side][0],
                power.low[side][k] = c.power.low[side][0],
                power.inverse[side][k] = c.power.inverse[side][0];
        }
    }
};

inline I reaches(V a, I far) { return (I)a >= far; }  // of bits, as above
inline I2 reaches(V2 a, I far) {
    return {reaches(a.a, far), reaches(a.b, far)};
}
inline V unless(I which, V x) { return (V)(~which & (I)x); }
inline V2 unless(I2 which, V2 x) {
    return {unless(which.a, x.a), unless(which.b, x.b)};
}
inline void note(I& found, I which) { found |= which; }
inline void note(I& found, I2 which) { found |= which.a | which.b; }

// f(place, vector, lanes, type) for rows of channels: two rows at a time, then
// one, vector by vector. Where f has noted a value that is too far for the
// vectors, again(place, column) for the elements since.
template <class F, class G>
INLINED inline void over_rows(const Job& job, i64 first, i64 last, F f,
                              G again) {
    const i64 width = job.columns;
    auto visit = [&](i64 row, auto T) INLINED {
        for (i64 b = 0; b < width; b += BLOCK) {
            const i64 end = b + BLOCK < width ? b + BLOCK : width;
            I beyond{};
            for (i64 j = b; j < end; j += VL)
                f(row * width + j, j / VL,
                  end - j < VL ? (int)(end - j) : VL, beyond, T);
            if (any(beyond))
                for (i64 at = 0; at < (i64)(sizeof T / sizeof(V)); at++)
                    for (i64 j = b; j < end; j++)
                        again((row + at) * width + j, j);
        }
    };
    i64 row = first;
    for (; row + 2 <= last; row += 2) visit(row, V2{});
    if (row < last) visit(row, V{});
}
// the same place two and three rows later, in time
template <class E> inline void two_rows_later(const E* p, i64 at, i64 width) {
    if (at % (64 / sizeof(E)) < VL)
        __builtin_prefetch(p + at + 2 * width, 0, 2),
            __builtin_prefetch(p + at + 3 * width, 0, 2);
}
template <class E> inline void two_rows_later(E* p, i64 at, i64 width) {
    if (at % (64 / sizeof(E)) < VL)
        __builtin_prefetch(p + at + 2 * width, 1, 2),
            __builtin_prefetch(p + at + 3 * width, 1, 2);
}

// channels along the rows of a matrix
template <class E>
void evaluate_rows(const Job& job, const E* u, E* out, const Channel* of,
                   const Channels* all, i64 first, i64 last) {
    const i64 width = job.columns;
    over_rows(
        job, first, last,
        [&](i64 at, i64 vector, int n, I& beyond, auto T) INLINED {
            const Channels& c = all[vector];
            two_rows_later(u, at, width), two_rows_later(out, at, width);
            auto h = (rows_of(u + at, width, n, T) - c.center) * c.rate, x = h;
            if (!c.identity) {
                auto a = absolute(h);
                note(beyond, reaches(a, c.far));
                x = transform(h, log1p_in_parts(a), c.power);
                if (c.some) x = either(c.same, h, x);
            }
            put_rows(out + at, width, n, x * c.weight + c.bias);
        },
        [&](i64 at, i64 j) {
            const float value = number(u + at);
            if (of[j].beyond(value))
                put(out + at, 0, 1, set(of[j].slowly(value)));
        });
}

// The gradients of rows, and the sums that weight and bias get from them, two
// numbers a channel; `sums` has room for as many floats as well
template <class E>
void given_rows(const Job& job, const E* u, const E* grad, E* out,
                const Channel* of, const Channels* all, i64 first, i64 last,
                double* sums) {
    const i64 width = job.columns, room = (width + VL - 1) / VL * VL;
    float* const part = (float*)(sums + 2 * room);
    std::memset(sums, 0, 2 * room * sizeof(double));
    for (i64 top = first; top < last; top += 64) {
        std::memset(part, 0, 2 * room * sizeof(float));
        over_rows(
            job, top, top + 64 < last ? top + 64 : last,
            [&](i64 at, i64 vector, int n, I& beyond, auto T) INLINED {
                const Channels& c = all[vector];
                two_rows_later(u, at, width), two_rows_later(grad, at, width);
                two_rows_later(out, at, width);
                auto g = rows_of(grad + at, width, n, T),
                     h = (rows_of(u + at, width, n, T) - c.center) * c.rate,
                     x = h, slope = T + c.rate * c.weight;
                const auto a = absolute(h);
                const auto far = reaches(a, c.far);
                if (!c.identity) {
                    auto ell = log1p_in_parts(a);
                    auto e = exp_of(choose(h, c.power.binary),
                                    choose(h, c.power.low), ell);
                    x = expm1_from(e, choose(h, c.power.inverse));
                    auto steep = exp_from(e) / (a + 1.0f) * slope;
                    if (c.some)
                        x = either(c.same, h, x),
                        steep = either(c.same, slope, steep);
                    slope = steep;
                }
                note(beyond, far);
                put_rows(out + at, width, n, g * slope);
                float* const here = part + vector * 2 * VL;
                V s_weight = load(here), s_bias = load(here + VL);
                add(s_weight, g, unless(far, x)), add(s_bias, g);
                store(here, s_weight), store(here + VL, s_bias);
            },
            [&](i64 at, i64 j) {
                const Channel& c = of[j];
                const float value = number(u + at), g = number(grad + at);
                if (!c.beyond(value)) return;
                const double h = (value - c.center) * c.rate;
                put(out + at, 0, 1,
                    set((float)(g * c.slope(h) * c.rate * c.weight)));
                sums[j / VL * 2 * VL + j % VL] +=
                    g * slow_power(h, c.power.lmbda);
            });
        for (i64 k = 0; k < 2 * room; k++) sums[k] += part[k];
    }
}

// The channels of a job, one after another, and VL at a time; null where there
// is no memory
const Channel* channels_of(const Job& job) {
    const i64 count = job.weight_period;
    Channel* const made =
        (Channel*)given_memory[0].take(count * sizeof(Channel) / 4);
    if (!made) return nullptr;
    share_out(count > 64 ? job.threads : 1, count,
              [&](i64 c, float*&) { new (made + c) Channel(job, c); });
    return made;
}
const Channels* side_by_side(const Job& job, const Channel* channels) {
    const i64 count = job.weight_period;
    Channels* const made = (Channels*)given_memory[1].take(
        (count + VL - 1) / VL * sizeof(Channels) / 4);
    for (i64 c = 0; made && c < count; c += VL)
        new (made + c / VL)
            Channels(channels + c, count - c < VL ? (int)(count - c) : VL);
    return made;
}

// f(u, out, count): a stretch of elements as floats
template <class F> void in_floats(const Job& job, i64 at, i64 count, F f) {
    if (!job.half) return f(job.u + at, job.out + at, count);
    alignas(64) float u[BLOCK], out[BLOCK];
    for (i64 b = at; b < at + count; b += BLOCK) {
        const i64 n = at + count - b < BLOCK ? at + count - b : BLOCK;
        copy_runs(halves(job.u) + b, n, u, n, n, 1);
        f(u, out, n);
        copy_runs(out, n, halves(job.out) + b, n, n, 1);
    }
}

// Shorter runs go together, so that they fill the vectors; still shorter ones
// without a table, which would take longer than so few elements of an image
constexpr i64 GATHERED = 32, TABLED = 16;
inline i64 side_of(i64 length) {
    return length < GATHERED ? BLOCK / length : 1;
}

// f(u, out, count): a channel's run at `at` and in the images behind it. Each
// element is computed by itself: its neighbours do not matter
template <class F> void in_runs(const Job& job, i64 at, i64 images, F f) {
    const i64 n = job.length, stride = n * job.weight_period;
    if (images == 1) return in_floats(job, at, n, f);
    alignas(64) float runs[BLOCK], result[BLOCK];
    auto together = [&](const auto* u, auto* out) {
        copy_runs(u + at, stride, runs, n, n, images);
        f(runs, result, n * images);
        copy_runs(result, n, out + at, stride, n, images);
    };
    job.half ? together(halves(job.u), halves(job.out))
             : together(job.u, job.out);
}

// As many channels at a time in each image as have their tables in the cache.
// Threads share out the images in order, as PyTorch's operations before and
// after do, whose data are then in the cache of the same core; if there is too
// little, they share out the channels. False where there is no memory for the
// tables.
#if defined(KERNEL_TABLES)
inline void evaluate_channel(const Channel& channel, const Pieces& pieces,
                             const float* u, float* out, i64 length) {
    if (channel.table && Pieces::apply(channel.power))
        evaluate_by_pieces(channel, pieces, u, out, length);
    else evaluate_run(channel, u, out, length);
}
bool evaluate_in_groups(const Job& job, const Channel* channels, i64 images) {
    const i64 count = job.weight_period, length = job.length,
              some = side_of(length),
              size = some > 1 ? 16 : (1 << 18) / (i64)sizeof(Pieces),
              groups = (count + size - 1) / size;
    const i64 slices = images * length < 512 * job.threads ? 1
                       : images < job.threads              ? images
                                                           : job.threads;
    Pieces* const tables =
        (Pieces*)given_memory[1].take(count * sizeof(Pieces) / 4);
    if (!tables) return false;
    share_out(job.threads, count, [&](i64 c, float*&) {
        tables[c].set(channels[c].power, channels[c].weight);
    });
    share_out(job.threads, groups * slices, [&](i64 item, float*&) {
        const i64 slice = item / groups, first = item % groups * size,
                  n = count - first < size ? count - first : size,
                  last = images * (slice + 1) / slices;
        const Pieces* const pieces = tables + first;
        for (i64 image = images * slice / slices; image < last; image += some)
            for (i64 c = 0; c < n; c++)
                in_runs(job, (image * count + first + c) * length,
                        last - image < some ? last - image : some,
                        [&](const float* u, float* out, i64 n) {
                            evaluate_channel(channels[first + c], pieces[c], u,
                                             out, n);
                        });
    });
    return true;
}
#else  // never called where TABLES is false
bool evaluate_in_groups(const Job&, const Channel*, i64) { return false; }
#endif

}  // namespace

extern "C" {

// Vectors of how many numbers, + 32 if a·b + c is one operation, + 64 if tables
// are looked up
int normalnorm_path() { return VL + 32 * FUSED + 64 * TABLES; }

int normalnorm_kept() { return KEPT; }

const char* normalnorm_layout() { return job_layout.text; }

uint64_t normalnorm_refused() { return refused; }

int normalnorm_forward(const Job* job_) {
    const Job& job = *job_;
    if (!all_here(job.u, job.out)
        || any_freed(job.weight, job.bias, job.running_mean, job.running_var,
                     job.running_lambda))
        return NO_DATA;
    if (job.given || job.mean ? !all_here(job.mean, job.var) : false)
        return NO_DATA;
    if (job.given ? job.transform && !all_here(job.lmbda)
                  : job.mean && !all_here(job.lmbda, job.beside))
        return NO_DATA;
    if (job.given) {
        const Channel* const channels = channels_of(job);
        if (!channels) return NO_MEMORY;
        const i64 images = job.units / job.weight_period;
        if (job.columns) {
            const Channels* const all = side_by_side(job, channels);
            if (!all) return NO_MEMORY;
            const i64 rows = job.units, step = 16384 / job.columns + 1,
                      pieces = (rows + step - 1) / step;
            share_out(job.threads, pieces, [&](i64 p, float*&) {
                const i64 last = (p + 1) * step < rows ? (p + 1) * step : rows;
                if (job.half)
                    evaluate_rows(job, halves(job.u), halves(job.out), channels,
                                  all, p * step, last);
                else
                    evaluate_rows(job, job.u, job.out, channels, all, p * step,
                                  last);
            });
        } else if (TABLES && job.length >= TABLED) {  // whatever the batch is
            return evaluate_in_groups(job, channels, images) ? DONE : NO_MEMORY;
        } else {
            const i64 n = job.weight_period, some = side_of(job.length);
            share_out(job.threads, (images + some - 1) / some * n,
                      [&](i64 i, float*&) {
                          const i64 image = i / n * some, left = images - image;
                          in_runs(job, (image * n + i % n) * job.length,
                                  left < some ? left : some,
                                  [&](const float* u, float* out, i64 count) {
                                      evaluate_run(channels[i % n], u, out,
                                                   count);
                                  });
                      });
        }
        return DONE;
    }
    if (job.columns) return forward_columns(job) ? DONE : NO_MEMORY;
    return each_piece(job, forward_room,
                      [&](i64, i64 first, i64 last, float* memory) {
                          forward_piece(job, first, last, memory);
                      })
               ? DONE
               : NO_MEMORY;
}

int normalnorm_backward(const Job* job_) {
    const Job& job = *job_;
    if (!all_here(job.u, job.grad, job.out, job.mean, job.var, job.lmbda,
                  job.beside)
        || any_freed(job.weight, job.bias, job.weight_grad, job.bias_grad))
        return NO_DATA;
    if (job.columns) return backward_columns(job) ? DONE : NO_MEMORY;
    if (job.weights >= 0)
        return each_piece(job, backward_room,
                          [&](i64, i64 first, i64 last, float* memory) {
                              backward_piece(job, first, last,
                                             {job.weight_grad, job.bias_grad},
                                             memory);
                          })
                   ? DONE
                   : NO_MEMORY;
    // One weight an element: each piece has sums of its own
    const i64 n = job.segments * job.length, size = piece_size(job),
              pieces = (job.units + size - 1) / size;
    float* sums[2];
    for (int which = 0; which < 2; which++) {
        const bool wanted = which ? job.bias_grad : job.weight_grad;
        sums[which] = wanted ? all_sums[which].take(pieces * n) : nullptr;
        if (wanted && !sums[which]) return NO_MEMORY;
    }
    const bool done = each_piece(
        job, backward_room, [&](i64 p, i64 first, i64 last, float* memory) {
            for (float* of : sums)
                if (of) std::memset(of + p * n, 0, 4 * n);
            backward_piece(job, first, last,
                           {sums[0] ? sums[0] + p * n : nullptr,
                            sums[1] ? sums[1] + p * n : nullptr},
                           memory);
        });
    if (!done) return NO_MEMORY;
    for (int which = 0; which < 2; which++) {
        float* const to = which ? job.bias_grad : job.weight_grad;
        for (i64 b = 0; to && b < n; b += BLOCK) {
            const i64 count = n - b < BLOCK ? n - b : BLOCK;
            double sum[BLOCK] = {};
            for (i64 p = 0; p < pieces; p++)
                for (i64 j = 0; j < count; j++)
                    sum[j] += sums[which][p * n + b + j];
            for (i64 j = 0; j < count; j++) to[b + j] = (float)sum[j];
        }
        if (pieces * n > (1 << 20)) all_sums[which].release();
    }
    return DONE;
}

// One stage of a unit in several processes: `table` has its rows, of `units`
// numbers, and `count` is that of a unit's elements in all processes
int normalnorm_stage(int stage, const Job* job_, double* table, i64 count) {
    Job job = *job_;
    if (stage != OUTPUT)  // averages move once
        job.running_mean = job.running_var = job.running_lambda = nullptr;
    if (!all_here(job.u, table)
        || any_freed(job.weight, job.bias, job.running_mean, job.running_var,
                     job.running_lambda, job.weight_grad, job.bias_grad)
        || (stage > AVERAGES && !all_here(job.mean))
        || (stage >= SUMS && !all_here(job.grad))
        || ((stage == OUTPUT || stage == GRADIENT) && !all_here(job.out)))
        return NO_DATA;
    const Table t{table, job.units, count};
    if (job.columns) return stage_of_columns(stage, job, t) ? DONE : NO_MEMORY;
    return each_piece(job, stage_room,
                      [&](i64, i64 first, i64 last, float* memory) {
                          stage_piece(stage, job, first, last, memory, t);
                      })
               ? DONE
               : NO_MEMORY;
}

// Gradients for given statistics; `columns`: with the channels along the rows
// of a matrix of `units` rows
int normalnorm_given_backward(const Job* job_) {
    const Job& job = *job_;
    if (!all_here(job.u, job.grad, job.out, job.mean, job.var)
        || (job.transform && !all_here(job.lmbda))
        || any_freed(job.weight, job.bias, job.weight_grad, job.bias_grad))
        return NO_DATA;
    const i64 count = job.weight_period, images = job.units / count;
    if (!job.columns) {
        share_out<WHERE_FREE>(job.threads, count, [&](i64 c, float*&) {
            const Channel channel(job, c);
            double of_weight = 0, of_bias = 0;
            for (i64 image = 0; image < images; image++) {
                const i64 at = (image * count + c) * job.length;
                i64 taken = 0;
                in_floats(job, at, job.length,
                          [&](const float* u, float* out, i64 n) {
                              alignas(64) float wide[BLOCK];
                              const float* grad = job.grad + at;
                              if (job.half) {
                                  copy_runs(halves(job.grad) + at + taken, n,
                                            wide, n, n, 1);
                                  grad = wide, taken += n;
                              }
                              given_gradient(channel, u, grad, out, n,
                                             of_weight, of_bias);
                          });
            }
            if (job.weight_grad) job.weight_grad[c] = (float)of_weight;
            if (job.bias_grad) job.bias_grad[c] = (float)of_bias;
        });
        return DONE;
    }
    const Channel* const channels = channels_of(job);
    const Channels* const all =
        channels ? side_by_side(job, channels) : nullptr;
    // a number of rows that does not depend on that of threads, and its sums
    const i64 rows = 64 * (1024 / count + 1),
              pieces = (job.units + rows - 1) / rows,
              room = (count + VL - 1) / VL * VL;
    double* const sums = (double*)all_sums[0].take(pieces * 6 * room);
    if (!all || !sums) return NO_MEMORY;
    share_out(job.threads, pieces, [&](i64 p, float*&) {
        const i64 first = p * rows,
                  last = first + rows < job.units ? first + rows : job.units;
        double* const own = sums + p * 3 * room;
        if (job.half)
            given_rows(job, halves(job.u), halves(job.grad), halves(job.out),
                       channels, all, first, last, own);
        else
            given_rows(job, job.u, job.grad, job.out, channels, all, first,
                       last, own);
    });
    for (i64 c = 0; c < count; c++)
        for (int which = 0; which < 2; which++) {
            double sum = 0;
            for (i64 p = 0; p < pieces; p++)
                sum += sums[p * 3 * room + c / VL * 2 * VL + which * VL
                            + c % VL];
            float* const to = which ? job.bias_grad : job.weight_grad;
            if (to) to[c] = (float)sum;
        }
    return DONE;
}

int normalnorm_normals(uint64_t start, i64 count, uint64_t key, float* z) {
    if (!all_here(z)) return NO_DATA;
    normals(start, count, Keys(key), z);
    return DONE;
}
}

// ---- the statistics of a proxy: mean and variance of φ(m + tξ) over given
// nodes ξ, and their derivatives; derived and tested in the chapter "A proxy
// for the activations"

namespace {

struct ProxyJob {
    // m = bias + weight · shift, t = weight · (1 + scale), one each a channel;
    // shift and scale may be null: 0
    const float *weight, *bias, *shift, *scale;
    // `count` of them, then any numbers up to a multiple of 16
    const float* nodes;
    // one a channel; the four derivatives of mean in m, t, of variance in m, t:
    // four a channel, or null
    float *mean, *var, *jacobian;
    const float *of_mean, *of_var;                  // upstream gradients
    float *of_weight, *of_bias, *of_shift, *of_scale;           // may be null
    i64 channels, count, kind, threads;
    double slope;  // of the piecewise linear kind below 0
};
constexpr Layout proxy_layout = [] {
    using Here = ProxyJob;
    return Layout() FIELD(weight) FIELD(bias) FIELD(shift) FIELD(scale)
        FIELD(nodes) FIELD(mean) FIELD(var) FIELD(jacobian) FIELD(of_mean)
        FIELD(of_var) FIELD(of_weight) FIELD(of_bias) FIELD(of_shift)
        FIELD(of_scale) FIELD(channels) FIELD(count) FIELD(kind) FIELD(threads)
        FIELD(slope).size(sizeof(ProxyJob));
}();
enum { LINEAR, GELU, GELU_TANH, SILU, TANH };
struct Activated { V value, slope; };
// f of the kind as a constant
template <class F> void by_kind(i64 kind, F f) {
    switch (kind) {
    case LINEAR: return f(std::integral_constant<int, LINEAR>());
    case GELU: return f(std::integral_constant<int, GELU>());
    case GELU_TANH: return f(std::integral_constant<int, GELU_TANH>());
    case SILU: return f(std::integral_constant<int, SILU>());
    default: return f(std::integral_constant<int, TANH>());
    }
}

inline V least(V a, float b) { return a > b ? set(b) : a; }        // NaN stays

// p = 1/(1+e^x) = 1/(2+E) for x ≥ 0, and E = expm1(x), from which tanh(x/2) = E
// p keeps its digits near 0
struct Logistic { V p, expm1; };
inline Logistic logistic(V x) {
    V e =
        expm1_from(exp_of(set(1.44269502f), set(1.92596299e-8f * 0.519860386f),
                          least(x, 80.0f)),
                   set(1));
    return {1.0f / (e + 2.0f), e};
}

// ϕ(x) and Q(x) = P(ξ > x) for x ≥ 0: the ratio Q/ϕ is a polynomial in w =
// 1/(1+x/3), to 7e-8; from 13.1 on, Q is that of 13.1, 3e-39
struct Tail { V density, above; };
constexpr Polynomial of_tail(-0.0583937913, 0.331181079, -0.692749977,
                             0.563007772, -0.143247634, 0.30446583, 0.280839443,
                             0.33495006, 0.3332614);
inline Tail normal_tail(V x) {
    x = least(x, 13.1f);
    V square = x * x, lost = fma(x, x, -square);  // x² = square + lost
    V e = exp_from(exp_of(set(-0.721347511f),
                          set(-0.5f * 1.92596299e-8f * 0.519860386f), square));
    V density = (e - e * lost * 0.5f) * 0.398942280f,
      w = 1.0f / (x * 0.333333333f + 1.0f);
    return {density, density * of_tail(w) * w};
}

// φ at y = m + d less φ's value or limit on the side of m (`base`), and φ'(y).
// φ is L(y) = max(y, 0) + slope · min(y, 0) and a small rest, or it is bounded.
struct Proxy {
    // L(m+d) − L(m) is d + above where m + d > 0, else slope · d + below
    V m, t, slope, above, below;
    V side;  // of tanh: ±1 where m is far from 0, else 0
    double base;
    Proxy(double m_, double t_, i64 kind, double a) {
        const float side_ = kind != TANH || std::fabs(m_) <= 1 ? 0
                            : m_ > 0                           ? 1
                                                               : -1;
        m = set((float)m_), t = set((float)t_), slope = set((float)a),
        side = set(side_);
        above = set((float)(m_ > 0 ? 0.0 : (1 - a) * m_)),
        below = set((float)(m_ > 0 ? (a - 1) * m_ : 0.0));
        base = kind == TANH ? side_ : m_ > 0 ? m_ : a * m_;
    }
    Proxy(const ProxyJob& job, i64 c)
        : Proxy(job.bias[c] + job.weight[c] * (job.shift ? job.shift[c] : 0.0),
                job.weight[c] * (1.0 + (job.scale ? job.scale[c] : 0.0)),
                job.kind, job.slope) {}
};

template <int KIND, bool SLOPE>
inline Activated activated(const Proxy& c, V node) {
    V d = c.t * node, y = c.m + d;
    I right = y > 0.0f;
    if (KIND == TANH) {
        Logistic l = logistic(absolute(y) * 2.0f);
        V one = right ? set(1) : set(-1), near = one * (l.expm1 * l.p) - c.side;
        return {one * c.side > 0.0f ? l.p * -2.0f * one : near,
                SLOPE ? 4.0f * l.p * (1.0f - l.p) : V{}};
    }
    V kink = right ? d + c.above : fma(c.slope, d, c.below);
    if (KIND == LINEAR) return {kink, right ? set(1) : c.slope};
    // beyond, the rest is nothing
    V a = least(absolute(y), 200.0f), z = right ? a : -a;
    if (KIND == GELU) {
        Tail n = normal_tail(a);
        return {
            fma(-a, n.above, kink),
            SLOPE ? fma(z, n.density, right ? 1.0f - n.above : n.above) : V{}};
    }
    // 2√(2/π): the argument of the logistic function is R (y + K y³)
    constexpr float R = 1.59576912f, K = 0.044715f;
    Logistic l = logistic(KIND == SILU ? a : a * (R + R * K * a * a));
    V rate = KIND == SILU ? z : z * (R + 3 * R * K * a * a), rest = 1.0f - l.p;
    return {fma(-a, l.p, kink),
            SLOPE ? fma(rate, l.p * rest, right ? rest : l.p) : V{}};
}

template <int KIND>
void proxy_channel(const ProxyJob& job, i64 c, float* values, float* slopes) {
    const Proxy proxy(job, c);
    if (!std::isfinite(proxy.m[0]) || !std::isfinite(proxy.t[0])) {
        job.mean[c] = job.var[c] = std::numeric_limits<float>::quiet_NaN();
        for (int k = 0; job.jacobian && k < 4; k++)
            job.jacobian[4 * c + k] = job.var[c];
        return;
    }
    const i64 vectors = (job.count + VL - 1) / VL;
    alignas(64) float ones[VL];
    for (int k = 0; k < VL; k++) ones[k] = (vectors - 1) * VL + k < job.count;
    const V last = load(ones);  // which elements of the last vector count
    double sum = 0, squares = 0, derivative[4] = {};
    // at most 16 vectors are added in float
    for (i64 i = 0; i < vectors; i += 16) {
        const i64 end = i + 16 < vectors ? i + 16 : vectors;
        V s{};
        for (i64 k = i; k < end; k++) {
            const V node = load(job.nodes + k * VL);
            Activated x = job.jacobian ? activated<KIND, true>(proxy, node)
                                       : activated<KIND, false>(proxy, node);
            store(values + k * VL, x.value);
            if (job.jacobian) store(slopes + k * VL, x.slope);
            s += k + 1 == vectors ? (last > 0.0f ? x.value : V{}) : x.value;
        }
        sum += total(s);
    }
    const double middle = sum / job.count;
    for (i64 i = 0; i < vectors; i += 16) {         // about the mean
        const i64 end = i + 16 < vectors ? i + 16 : vectors;
        V s{}, by_m{}, by_t{}, of_m{}, of_t{};
        for (i64 k = i; k < end; k++) {
            V x = load(values + k * VL) - (float)middle;
            if (k + 1 == vectors) x = last > 0.0f ? x : V{};
            s += x * x;
            if (!job.jacobian) continue;
            V slope = load(slopes + k * VL);
            if (k + 1 == vectors) slope = last > 0.0f ? slope : V{};
            V along = slope * load(job.nodes + k * VL);
            of_m += slope, of_t += along, by_m += slope * x, by_t += along * x;
        }
        squares += total(s);
        if (job.jacobian)
            derivative[0] += total(of_m), derivative[1] += total(of_t),
                derivative[2] += 2 * total(by_m),
                derivative[3] += 2 * total(by_t);
    }
    job.mean[c] = (float)(proxy.base + middle);
    job.var[c] = (float)(squares / job.count);
    for (int k = 0; job.jacobian && k < 4; k++)
        job.jacobian[4 * c + k] = (float)(derivative[k] / job.count);
}

// From the derivatives in m and t, which the forward pass has kept: added to
// what γ and β have already, which need not pass through the statistics alone
void add_gradients(const ProxyJob& job) {
    for (i64 c = 0; c < job.channels; c++) {
        const float *kept = job.jacobian + 4 * c, weight = job.weight[c],
                    of_mean = job.of_mean[c], of_var = job.of_var[c];
        const float of_m = of_mean * kept[0] + of_var * kept[2],
                    of_t = of_mean * kept[1] + of_var * kept[3];
        if (job.of_weight)
            job.of_weight[c] +=
                of_m * (job.shift ? job.shift[c] : 0.0f)
                + of_t * (1.0f + (job.scale ? job.scale[c] : 0.0f));
        if (job.of_bias) job.of_bias[c] += of_m;
        if (job.of_shift) job.of_shift[c] = of_m * weight;
        if (job.of_scale) job.of_scale[c] = of_t * weight;
    }
}

}  // namespace

extern "C" {

const char* normalnorm_proxy_layout() { return proxy_layout.text; }

int normalnorm_proxy_forward(const ProxyJob* job_) {
    const ProxyJob& job = *job_;
    if (!all_here(job.weight, job.bias, job.nodes, job.mean, job.var)
        || any_freed(job.shift, job.scale, job.jacobian))
        return NO_DATA;
    const i64 room = (job.count + VL - 1) / VL * VL,
              wanted = 1 + job.channels * job.count / 16384;
    const int threads = (int)(wanted < job.threads ? wanted : job.threads);
    Shares shares(2 * room, threads, threads);
    if (!shares.memory) return NO_MEMORY;
    share_out(threads, job.channels, [&](i64 c, float*& memory) {
        if (!memory) memory = shares.mine();
        by_kind(job.kind, [&](auto kind) {
            proxy_channel<kind>(job, c, memory, memory + room);
        });
    });
    return DONE;
}

int normalnorm_proxy_backward(const ProxyJob* job_) {
    const ProxyJob& job = *job_;
    if (!all_here(job.weight, job.jacobian, job.of_mean, job.of_var)
        || any_freed(job.shift, job.scale, job.of_weight, job.of_bias,
                     job.of_shift, job.of_scale))
        return NO_DATA;
    for (i64 c = 0; c < job.channels; c++) {
        if (job.of_weight) job.of_weight[c] = 0;
        if (job.of_bias) job.of_bias[c] = 0;
    }
    add_gradients(job);
    return DONE;
}
}

// ---- group norm, affine map, activation and proxy, in one visit to a group;
// derived and tested in the chapter "An activation that takes its mean off"

namespace {

struct GroupedJob {
    const float *u, *grad;
    float* out;  // or the gradient of u
    // one a channel: γ, β, and β̃, γ̃, which are read for the nodes
    const float *weight, *bias, *shift, *scale;
    // without nodes: the proxy's mean, and the factor, null for 1
    const float *mean, *factor;
    const float* nodes;  // of a ProxyJob: statistics are to be computed
    // three a group: its mean in two parts, and 1/√(σ²+ε); with nodes, six a
    // channel behind: mean, factor and the four derivatives of a ProxyJob
    float* kept;
    // may be null
    float *of_weight, *of_bias, *of_shift, *of_scale, *of_mean, *of_factor;
    // `divided`: whether the proxy's variance divides, with `added` to it
    i64 images, channels, groups, length, kind, count, divided;
    double eps, slope, added;
    i64 threads;
};
constexpr Layout grouped_layout = [] {
    using Here = GroupedJob;
    return Layout() FIELD(u) FIELD(grad) FIELD(out) FIELD(weight) FIELD(bias)
        FIELD(shift) FIELD(scale) FIELD(mean) FIELD(factor) FIELD(nodes)
        FIELD(kept) FIELD(of_weight) FIELD(of_bias) FIELD(of_shift)
        FIELD(of_scale) FIELD(of_mean) FIELD(of_factor) FIELD(images)
        FIELD(channels) FIELD(groups) FIELD(length) FIELD(kind) FIELD(count)
        FIELD(divided) FIELD(eps) FIELD(slope) FIELD(added) FIELD(threads)
        .size(sizeof(GroupedJob));
}();
#undef FIELD

// The proxy's part of a job
ProxyJob proxy_of(const GroupedJob& job) {
    ProxyJob of{};
    of.weight = job.weight, of.bias = job.bias, of.shift = job.shift;
    of.scale = job.scale, of.nodes = job.nodes;
    of.mean = job.kept + 3 * job.images * job.groups;
    of.var = of.mean + job.channels, of.jacobian = of.var + job.channels;
    of.channels = job.channels, of.count = job.count, of.kind = job.kind;
    of.threads = job.threads, of.slope = job.slope;
    return of;
}
// The job with statistics as if they were given, of those that it has kept
GroupedJob with_statistics(GroupedJob job) {
    if (job.nodes) {
        const ProxyJob of = proxy_of(job);
        job.mean = of.mean, job.factor = job.divided ? of.var : nullptr;
    }
    return job;
}

// A group: `count` channels from `first` on, `n` elements from `start` on
struct Group {
    i64 first, count, n, start;
    float center, rest, rate;  // y = (u − center) · rate − rest · rate
    Group(const GroupedJob& job, i64 i)
        : count(job.channels / job.groups), n(count * job.length) {
        first = i % job.groups * count, start = i * n;
        center = job.kept[3 * i], rest = job.kept[3 * i + 1],
        rate = job.kept[3 * i + 2];
    }
    V normalized(V u) const { return (u - center) * rate - rest * rate; }
};
void find_moments(const GroupedJob& job, i64 i) {
    Job of_unit{};
    of_unit.segments = 1, of_unit.eps = job.eps;
    of_unit.length = job.channels / job.groups * job.length;
    Unit w(of_unit, i);
    w.moments(job.u + i * w.n, nullptr);
    // as PyTorch has it, a variance beyond float leaves nothing of the values
    const float var = (float)w.var;
    job.kept[3 * i] = w.center, job.kept[3 * i + 1] = w.rest;
    job.kept[3 * i + 2] = (float)(1 / std::sqrt((var < 0 ? 0 : var) + job.eps));
}
// What a channel does to its normalized values
struct OfChannel {
    Proxy proxy;
    float shift, factor;  // of φ less its `base`: the proxy's mean
    OfChannel(const GroupedJob& job, i64 c)
        : proxy(job.bias[c], job.weight[c], job.kind, job.slope),
          shift((float)(job.mean[c] - proxy.base)),
          factor(job.factor ? job.factor[c] : 1.0f) {}
};

template <int KIND> void grouped_forward(const GroupedJob& job, i64 i) {
    const Group group(job, i);
    for (i64 c = 0; c < group.count; c++) {
        const OfChannel channel(job, group.first + c);
        const i64 start = group.start + c * job.length;
        const float* u = job.u + start;
        float* out = job.out + start;
        auto of = [&](V x) INLINED {
            V y = group.normalized(x);
            return (activated<KIND, false>(channel.proxy, y).value
                    - channel.shift) * channel.factor;
        };
        i64 j = 0;
        for (; j + VL <= job.length; j += VL) store(out + j, of(load(u + j)));
        const int left = (int)(job.length - j);
        if (left)
            store_part(out + j, left, of(load_part(u + j, left, group.center)));
    }
}

// Sums over a channel of a group, g upstream: of g · factor · φ', that times
// y, g, and g · (φ − mean), to `sums`. The gradient of u.
template <int KIND>
void grouped_backward(const GroupedJob& job, i64 i, double* sums) {
    const Group group(job, i);
    double by_one = 0, by_y = 0;
    for (i64 c = 0; c < group.count; c++) {
        const OfChannel channel(job, group.first + c);
        const i64 start = group.start + c * job.length;
        const float *u = job.u + start, *grad = job.grad + start;
        float* out = job.out + start;
        double* const sum = sums + 4 * c;
        sum[0] = sum[1] = sum[2] = sum[3] = 0;
        for (i64 b = 0; b < job.length; b += BLOCK) {
            const i64 end = b + BLOCK < job.length ? b + BLOCK : job.length;
            V s[4] = {};
            auto of = [&](V x, V g) INLINED {
                V y = group.normalized(x);
                Activated a = activated<KIND, true>(channel.proxy, y);
                V w = g * channel.factor * a.slope;
                s[0] += w, s[1] += w * y, s[2] += g,
                    s[3] += g * (a.value - channel.shift);
                return w * channel.proxy.t;
            };
            i64 j = b;
            for (; j + VL <= end; j += VL)
                store(out + j, of(load(u + j), load(grad + j)));
            const int left = (int)(end - j);
            if (left)
                store_part(out + j, left,
                           of(load_part(u + j, left, group.center),
                              load_part(grad + j, left, 0)));
            totals(s, 4, sum);
        }
        by_one += job.weight[group.first + c] * sum[0];
        by_y += job.weight[group.first + c] * sum[1];
    }
    // out holds ∂/∂y: less its mean, and less its projection on y
    const float mean = (float)(by_one / group.n),
                along = (float)(by_y / group.n);
    each(0, group.n, [&](i64 j, int n, auto type) INLINED {
        if constexpr (std::is_same_v<decltype(type), V>) {
            float* out = job.out + group.start;
            V y = group.normalized(
                get(job.u + group.start, j, n, group.center, V{}));
            V x = (get(out, j, n, 0, V{}) - mean - y * along) * group.rate;
            put(out, j, n, x);
        } else {
            float* out = job.out + group.start + j;
            const float* u = job.u + group.start + j;
            for (int k = 0; k < 2 * VL; k += VL)
                store(out + k, (load(out + k) - mean
                                - group.normalized(load(u + k)) * along)
                                   * group.rate);
        }
    });
}

// unused where there is no OpenMP
[[maybe_unused]] int threads_for(const GroupedJob& job) {
    const i64 wanted =
        1 + job.images * job.channels * job.length / 16384;
    return (int)(wanted < job.threads ? wanted : job.threads);
}

}  // namespace

extern "C" {

const char* normalnorm_grouped_layout() { return grouped_layout.text; }

int normalnorm_grouped_forward(const GroupedJob* job_) {
    const GroupedJob job = with_statistics(*job_);
    if (!all_here(job.u, job.out, job.weight, job.bias, job.mean, job_->kept)
        || any_freed(job.factor, job.nodes))
        return NO_DATA;
    if (job.nodes) {
        const ProxyJob of = proxy_of(job);
        if (const int status = normalnorm_proxy_forward(&of)) return status;
        // in the place of the variance, of which the factor tells as much
        for (i64 c = 0; c < job.channels; c++)
            of.var[c] = (float)(1 / std::sqrt(of.var[c] + job.added));
    }
    share_out(threads_for(job), job.images * job.groups, [&](i64 i, float*&) {
        find_moments(job, i);
        by_kind(job.kind,
                [&](auto kind) { grouped_forward<kind>(job, i); });
    });
    return DONE;
}

// The sums of a channel are kept apart for each image, so that they do not
// depend on the number of threads.
int normalnorm_grouped_backward(const GroupedJob* job_) {
    const GroupedJob job = with_statistics(*job_);
    if (!all_here(job.u, job.grad, job.out, job.weight, job.bias, job.mean,
                  job_->kept)
        || any_freed(job.factor, job.nodes, job.of_weight, job.of_bias,
                     job.of_shift, job.of_scale, job.of_mean, job.of_factor))
        return NO_DATA;
    const i64 rows = job.images * job.channels, each_row = 4;
    double* const sums =
        (double*)all_sums[0].take(2 * each_row * (size_t)rows);
    // upstream of the proxy's mean and variance
    float* const upstream = all_sums[1].take(2 * (size_t)job.channels);
    if (!sums || !upstream) return NO_MEMORY;
    const i64 count = job.channels / job.groups;
    share_out(threads_for(job), job.images * job.groups, [&](i64 i, float*&) {
        by_kind(job.kind, [&](auto kind) {
            grouped_backward<kind>(job, i, sums + each_row * count * i);
        });
    });
    for (i64 c = 0; c < job.channels; c++) {
        double sum[4] = {};
        for (i64 image = 0; image < job.images; image++)
            for (int k = 0; k < 4; k++)
                sum[k] += sums[each_row * (image * job.channels + c) + k];
        const double factor = job.factor ? job.factor[c] : 1.0;
        if (job.of_weight) job.of_weight[c] = (float)sum[1];
        if (job.of_bias) job.of_bias[c] = (float)sum[0];
        if (job.of_mean) job.of_mean[c] = (float)(-sum[2] * factor);
        if (job.of_factor) job.of_factor[c] = (float)sum[3];
        upstream[c] = (float)(-sum[2] * factor);
        // f = 1/√(v+ε): ∂f/∂v is −f³/2
        upstream[job.channels + c] =
            job.factor ? (float)(-0.5 * factor * factor * factor * sum[3]) : 0;
    }
    if (job.nodes) {
        ProxyJob of = proxy_of(job);
        of.of_mean = upstream, of.of_var = upstream + job.channels;
        of.of_weight = job.of_weight, of.of_bias = job.of_bias;
        of.of_shift = job.of_shift, of.of_scale = job.of_scale;
        add_gradients(of);
    }
    if (rows > (1 << 17)) all_sums[0].release();
    return DONE;
}
}
