// Normality normalization of float32 units in one visit each; derived and tested in the chapter "A kernel in C++".
// A unit is gathered into contiguous scratch memory that stays in the cache; sums run in float for 64 vectors at most, then in double.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstdlib>
#include <limits>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int VL = 16;
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif
typedef float V __attribute__((vector_size(4 * VL)));
typedef int32_t I __attribute__((vector_size(4 * VL)));
typedef uint32_t U __attribute__((vector_size(4 * VL)));
typedef uint64_t W __attribute__((vector_size(4 * VL)));
typedef float Unaligned __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int64_t i64;

inline V load(const float* p) { return *(const Unaligned*)p; }
inline void store(float* p, V v) { *(Unaligned*)p = v; }
inline V set(float x) { return V{} + x; }

inline V load_part(const float* p, int n, float fill) {        // the first n < VL values, then `fill`
#if defined(__AVX512F__)
    return (V)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), (__mmask16)((1u << n) - 1), p);
#else
    V v = set(fill);
    for (int i = 0; i < n; i++) v[i] = p[i];
    return v;
#endif
}
inline void store_part(float* p, int n, V v) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
    for (int i = 0; i < n; i++) p[i] = v[i];
#endif
}
inline V absolute(V x) { return (V)((I)x & 0x7fffffff); }
inline V fma(V a, V b, V c) {                                   // a·b + c with one rounding, which the compiler may not simplify
#if defined(__AVX512F__)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    V d;
    for (int i = 0; i < VL; i++) d[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return d;
#endif
}
inline V with_sign(V magnitude, V sign) {                       // magnitude ≥ 0
#if defined(__AVX512F__)
    return (V)_mm512_ternarylogic_epi32((__m512i)magnitude, (__m512i)sign, _mm512_set1_epi32(0x7fffffff), 0xE4 /* mask ? a : b */);
#else
    return (V)((I)magnitude | ((I)sign & (int32_t)0x80000000));
#endif
}
inline bool any(I mask) {                                       // lanes of all zeros or all ones
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#else
    bool found = false;
    for (int i = 0; i < VL; i++) found |= mask[i] != 0;
    return found;
#endif
}
inline V square_root(V x) {                                     // x ≥ 0, to 2 ulp
#if defined(__AVX512F__)
    x = (V)_mm512_max_ps((__m512)x, _mm512_set1_ps(1e-36f));
    V y = (V)_mm512_rsqrt14_ps((__m512)x), root = x * y;
    return (root * y - 1.0f) * (root * -0.5f) + root;
#else
    V y;
    for (int i = 0; i < VL; i++) y[i] = __builtin_sqrtf(x[i]);
    return y;
#endif
}
inline double total(V x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float s = 0;
    for (int i = 0; i < VL; i++) s += x[i];
    return s;
#endif
}

// Two vectors side by side: a processor finds more to do at once in two chains of dependent steps than in one.
struct V2 { V a, b; };
struct I2 { I a, b; };
#define BINARY(op)                                                                              \
    inline V2 operator op(V2 x, V2 y) { return {x.a op y.a, x.b op y.b}; }                      \
    inline V2 operator op(V2 x, V y) { return {x.a op y, x.b op y}; }                           \
    inline V2 operator op(V2 x, float y) { return {x.a op y, x.b op y}; }                       \
    inline V2 operator op(float x, V2 y) { return {x op y.a, x op y.b}; }
BINARY(+) BINARY(-) BINARY(*) BINARY(/)
#undef BINARY
inline V2& operator+=(V2& x, V2 y) { return x = x + y; }
inline I bits(V x) { return (I)x; }
inline I2 bits(V2 x) { return {(I)x.a, (I)x.b}; }
inline V floats(I x) { return (V)x; }
inline V2 floats(I2 x) { return {(V)x.a, (V)x.b}; }
inline V converted(I x) { return __builtin_convertvector(x, V); }
inline V2 converted(I2 x) { return {converted(x.a), converted(x.b)}; }
inline I2 operator-(I2 x, int y) { return {x.a - y, x.b - y}; }
inline I2 operator-(int x, I2 y) { return {x - y.a, x - y.b}; }
inline I2 operator+(I2 x, int y) { return {x.a + y, x.b + y}; }
inline I2 operator>>(I2 x, int y) { return {x.a >> y, x.b >> y}; }
inline I2 operator<<(I2 x, int y) { return {x.a << y, x.b << y}; }
inline I2 operator&(I2 x, int y) { return {x.a & y, x.b & y}; }
inline V2 absolute(V2 x) { return {absolute(x.a), absolute(x.b)}; }
inline V2 with_sign(V2 x, V2 y) { return {with_sign(x.a, y.a), with_sign(x.b, y.b)}; }
inline V2 fma(V2 x, V2 y, V2 z) { return {fma(x.a, y.a, z.a), fma(x.b, y.b, z.b)}; }
inline V2 fma(V2 x, V y, V2 z) { return {fma(x.a, y, z.a), fma(x.b, y, z.b)}; }
inline I negative(V x) { return (I)x < 0; }
inline I2 negative(V2 x) { return {(I)x.a < 0, (I)x.b < 0}; }
inline V choose(I left, const V c[2]) { return left ? c[1] : c[0]; }
inline V2 choose(I2 left, const V c[2]) { return {choose(left.a, c), choose(left.b, c)}; }
inline void add(V& sum, V x) { sum += x; }
inline void add(V& sum, V2 x) { sum += x.a + x.b; }
inline void add(V& sum, V x, V y) { sum += x * y; }
inline void add(V& sum, V2 x, V2 y) { sum += x.a * y.a, sum += x.b * y.b; }

// log(1+a) for 0 ≤ a < 2^64: 1+a = 2^e (1+f) with 1+f in [√½, √2); f has one rounding, and none where e = 0.
template <class T>
inline T log1p_of(T a) {
    auto e = (bits(1.0f + a) - 0x3f3504f3) >> 23;
    T scale = floats(0x3f800000 - (e << 23));
    T f = a * scale + (scale - 1.0f);
    T p = f * -0.07621757593f + 0.1290441861f;
    p = p * f - 0.132429888f;
    p = p * f + 0.1418182765f;
    p = p * f - 0.166090828f;
    p = p * f + 0.200019738f;
    p = p * f - 0.2500158295f;
    p = p * f + 0.3333332569f;
    p = p * f - 0.4999998835f;
    return converted(e) * 0.69314718056f + (f * f * p + f);
}

template <class T>
struct Exp { T m, scale; };          // exp(t) = scale (1+m), expm1(t) = scale m + (scale − 1), for t = eta·ell + low·ell, |t| ≤ 87
template <class T>
inline Exp<T> exp_of(T eta, T low, T ell) {
    T n = (eta * ell) * 1.44269504089f + 12582912.0f;
    T scale = floats((bits(n) << 23) + 0x3f800000);
    n = n - 12582912.0f;
    T r = fma(eta, ell, n * -0.693145752f);         // this product is exact
    r = fma(n, set(-1.42860677e-6f), low * ell + r);
    T p = r * 0.001388252153f + 0.008366513932f;
    p = p * r + 0.04166719966f;
    p = p * r + 0.1666654367f;
    p = p * r + 0.4999999816f;
    return {r * r * p + r, scale};
}
template <class T>
inline T expm1_from(Exp<T> x) { return x.m * x.scale + (x.scale - 1.0f); }
template <class T>
inline T exp_from(Exp<T> x) { return x.m * x.scale + x.scale; }

// The power transform of one unit: constants for h ≥ 0 and h < 0.
struct Power {
    V eta[2], low[2], inverse[2];
    float lmbda;
    bool identity, small;
    explicit Power(double l) {
        lmbda = (float)l;
        identity = l == 1.0;
        small = std::fabs(l) < 0.25 || std::fabs(2 - l) < 0.25;
        for (int side = 0; side < 2; side++) {
            double eta_ = side ? 2 - l : l;
            if (std::fabs(eta_) < 1e-20) eta_ = 1e-20;
            eta[side] = set((float)eta_);
            low[side] = set((float)(eta_ - (float)eta_));
            inverse[side] = set((float)(1 / eta_));
        }
    }
};

template <class T>
inline T transform(T h, T ell, const V eta[2], const V low[2], const V inverse[2]) {        // ψ(h), given ℓ = log1p|h|
    auto left = negative(h);
    return with_sign(expm1_from(exp_of(choose(left, eta), choose(left, low), ell)) * choose(left, inverse), h);
}
template <class T>
inline T transform(T h, T ell, const Power& w) { return transform(h, ell, w.eta, w.low, w.inverse); }

// ---- noise: Philox 4×32-10 with the element's index divided by four as counter, then Box–Muller ----

#if defined(__AVX512F__)
inline W multiply(W x, uint32_t m) { return (W)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(m)); }
#elif defined(__AVX2__)
inline W multiply(W x, uint32_t m) { return (W)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(m)); }
#else
inline W multiply(W x, uint32_t m) { return (x & 0xffffffffull) * (uint64_t)m; }
#endif

struct Keys {                                       // of the ten rounds
    uint64_t k[20];
    explicit Keys(uint64_t key) {
        uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
        for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) k[2 * round] = k0, k[2 * round + 1] = k1;
    }
};

struct Words { W x0, x1, x2, x3; };                 // 32-bit words in the lower halves of 64-bit lanes; the upper halves are not used
inline void rounds(Words& s, const Keys& keys) {
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        W p0 = multiply(s.x0, 0xD2511F53u), p1 = multiply(s.x2, 0xCD9E8D57u);
        s.x0 = (p1 >> 32) ^ s.x1 ^ keys.k[2 * round];
        s.x2 = (p0 >> 32) ^ s.x3 ^ keys.k[2 * round + 1];
        s.x1 = p1, s.x3 = p0;
    }
}
inline U both(W even, W odd) { return (U)((even & 0xffffffffull) | (odd << 32)); }

inline V natural_log(V u) {                         // 2^-34 < u ≤ 1
    I e = ((I)u - 0x3f3504f3) >> 23;
    V f = (V)((I)u - (e << 23)) - 1.0f;
    V p = f * 0.08734839204f - 0.1430751438f;
    p = p * f + 0.1491797176f;
    p = p * f - 0.1657050917f;
    p = p * f + 0.1996207242f;
    p = p * f - 0.2500175522f;
    p = p * f + 0.3333395021f;
    p = p * f - 0.4999999161f;
    return __builtin_convertvector(e, V) * 0.69314718056f + (f * f * p + f);
}

inline void box_muller(U a, U b, V& first, V& second) {
    V u = __builtin_convertvector(a, V) * 0x1p-32f + 0x1p-33f;
    V radius = square_root(natural_log(u) * -2.0f);
    U turned = b + 0x20000000u;                     // the angle in eighths of a turn, rounded to quarters: exact in integers
    V x = __builtin_convertvector((I)(turned & 0x3fffffffu) - 0x20000000, V) * 1.4629180792671596e-09f;         // 2π 2^-32
    V y = x * x;
    V s = y * -1.9515296e-4f + 8.3321609e-3f;
    s = s * y - 0.16666655f;
    s = s * y * x + x;
    V c = y * 2.443315711809948e-5f - 1.388731625493765e-3f;
    c = c * y + 4.166664568298827e-2f;
    c = c * y - 0.5f;
    c = c * y + 1.0f;
    I odd = (I)((turned & 0x40000000u) << 1) < 0;
    V cosine = odd ? s : c, sine = odd ? c : s;
    cosine = (V)((U)cosine ^ ((turned ^ (turned << 1)) & 0x80000000u));
    sine = (V)((U)sine ^ (turned & 0x80000000u));
    first = radius * cosine, second = radius * sine;
}

inline void interleave(V a, V b, V c, V d, float* z) {          // in each block of four lanes: a transpose
#if defined(__AVX512F__)
    __m512 ab = _mm512_unpacklo_ps((__m512)a, (__m512)b), cd = _mm512_unpacklo_ps((__m512)c, (__m512)d);
    __m512 AB = _mm512_unpackhi_ps((__m512)a, (__m512)b), CD = _mm512_unpackhi_ps((__m512)c, (__m512)d);
    store(z, (V)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd));
    store(z + VL, (V)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
    store(z + 2 * VL, (V)_mm512_unpacklo_pd((__m512d)AB, (__m512d)CD));
    store(z + 3 * VL, (V)_mm512_unpackhi_pd((__m512d)AB, (__m512d)CD));
#else
    V from[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < VL; l++) z[VL * i + l] = from[l % 4][l / 4 * 4 + i];
#endif
}

struct Lanes {                                      // lane 4b+i holds counter + (VL/4) i + b, so that the transposes come out in order
    W even, odd;
    Lanes() {
        for (int j = 0; j < VL / 2; j++) {
            int l = 2 * j, m = 2 * j + 1;
            even[j] = VL / 4 * (l % 4) + l / 4, odd[j] = VL / 4 * (m % 4) + m / 4;
        }
    }
};
const Lanes lanes;

// Batches of 4·VL numbers: z[4j+i] = number i of counter + j. First all words, then all numbers: two loops with more work in flight than one.
constexpr int BATCH = 4 * VL, BATCHES = 8;
void batches(uint64_t counter, int count, const Keys& keys, float* z) {
    alignas(64) U words[BATCHES][4];
    for (int b = 0; b < count; b++) {
        W even = lanes.even + (counter + b * VL), odd = lanes.odd + (counter + b * VL);
        Words p{even, even >> 32, W{}, W{}}, q{odd, odd >> 32, W{}, W{}};
        rounds(p, keys), rounds(q, keys);
        words[b][0] = both(p.x0, q.x0), words[b][1] = both(p.x1, q.x1), words[b][2] = both(p.x2, q.x2), words[b][3] = both(p.x3, q.x3);
    }
    for (int b = 0; b < count; b++) {
        V m, n, o, p;
        box_muller(words[b][0], words[b][1], m, n);
        box_muller(words[b][2], words[b][3], o, p);
        interleave(m, n, o, p, z + b * BATCH);
    }
}

void normals(uint64_t start, i64 count, const Keys& keys, float* z) {   // for elements start, start+1, …
    alignas(64) float part[BATCHES * BATCH];
    uint64_t counter = start >> 2;
    int skip = (int)(start & 3);
    while (count > 0) {
        i64 wanted = (skip + count + BATCH - 1) / BATCH;
        const int b = wanted < BATCHES ? (int)wanted : BATCHES;
        i64 n = (i64)b * BATCH - skip < count ? (i64)b * BATCH - skip : count;
        if (n == (i64)b * BATCH) {
            batches(counter, b, keys, z);
        } else {
            batches(counter, b, keys, part);
            std::memcpy(z, part + skip, 4 * n);
        }
        z += n, count -= n, skip = 0, counter += b * VL;
    }
}

// ---- a unit ----

constexpr i64 BLOCK = 64 * VL;                      // elements between two transfers of float sums to double
constexpr int KEPT = 10;                            // numbers per unit, beside mean, variance and λ, that the backward pass needs
enum Noise { NONE, SCALED, UNSCALED, DROPOUT };

struct Job {
    const float *u, *grad;
    float* out;
    const float *weight, *bias;
    float *mean, *var, *lmbda, *kept;               // per unit; `kept`: KEPT numbers each, or null in a forward pass that nothing follows
    float *weight_grad, *bias_grad;                 // see below
    i64 units;                                      // unit i starts at element (i / period) * outer + (i % period) * inner
    i64 period, outer, inner;
    i64 segments, length, stride;                   // and consists of `segments` runs of `length` elements, `stride` apart
    i64 columns, run;                               // columns > 0: units are the columns of a matrix; index: see `index_of`
    i64 weights;                                    // 0: none; 1: one a unit; −1: one an element; n: one for each of n equal parts of a unit
    i64 weight_period;                              // unit i takes weights (i % weight_period) · n, …
    i64 given, transform, kind, threads;
    double eps, alpha, noise;
    uint64_t seed, offset;
};

struct Scratch {                                    // memory of a thread, kept between calls
    float* data = nullptr;
    size_t size = 0;
    float* take(size_t n) {
        if (n > size) {
            std::free(data);
            size = (n + 1023) / 1024 * 1024;
            data = (float*)std::aligned_alloc(64, 4 * size);
            if (!data) size = 0;
        }
        return data;
    }
    ~Scratch() { std::free(data); }
};
thread_local Scratch scratch;

// f(position, lanes, type): two vectors at a time, then one, then a part of one
template <class F>
inline void each(i64 from, i64 to, F f) {
    i64 j = from;
    for (; j + 2 * VL <= to; j += 2 * VL) f(j, 2 * VL, V2{});
    for (; j + VL <= to; j += VL) f(j, VL, V{});
    if (j < to) f(j, (int)(to - j), V{});
}
inline V get(const float* p, i64 j, int n, float fill, V) { return n == VL ? load(p + j) : load_part(p + j, n, fill); }
inline V2 get(const float* p, i64 j, int, float, V2) { return {load(p + j), load(p + j + VL)}; }
inline void put(float* p, i64 j, int n, V v) { n == VL ? store(p + j, v) : store_part(p + j, n, v); }
inline void put(float* p, i64 j, int, V2 v) { store(p + j, v.a), store(p + j + VL, v.b); }

// Asks for the memory of the next unit while this one is computed: one line a vector, in the order in which it will be read.
struct Ahead {
    const float* next = nullptr;
    i64 segments = 0, length = 0, stride = 0, segment = 0, at = 0;
    inline void operator()(int lanes) {
        if (!next) return;
        for (int k = 0; k < lanes; k += VL) __builtin_prefetch(next + segment * stride + at + k, 0, 2);
        at += lanes;
        if (at >= length) {
            at = 0;
            if (++segment == segments) next = nullptr;
        }
    }
};

struct Unit {
    const Job& job;
    i64 i, n;                                       // number of the unit, of its elements
    double mean = 0, var = 0, rate = 0, bare = 0;   // rate = 1/√(σ²+ε), bare = 1/σ or 0
    float center = 0, rest = 0;                     // mean ≈ center + rest
    const float* own_noise = nullptr;               // noise made beforehand
    Ahead u_ahead, grad_ahead;

    void look_ahead(i64 next, i64 start) {          // to unit `next`, which begins at `start`
        if (job.columns || next >= job.units) return;
        u_ahead = {job.u + start, job.segments, job.length, job.stride};
        if (job.grad) grad_ahead = {job.grad + start, job.segments, job.length, job.stride};
    }

    Unit(const Job& job_, i64 i_) : job(job_), i(i_), n(job_.segments * job_.length) {}

    void set_rates() {
        float v = (float)var;
        bool varies = v > std::numeric_limits<float>::min() / std::numeric_limits<float>::epsilon();
        rate = v == 0 && job.eps == 0 ? 0 : std::isfinite(v) ? 1 / std::sqrt(var + job.eps) : NAN;
        bare = varies && std::isfinite(v) ? 1 / std::sqrt(var) : 0;
    }

    void moments(const float* u) {
        double sum = 0;
        for (i64 b = 0; b < n; b += BLOCK) {
            V s{}, s2{}, s3{}, s4{};
            i64 j = b, end = b + BLOCK < n ? b + BLOCK : n;
            for (; j + 4 * VL <= end; j += 4 * VL) s += load(u + j), s2 += load(u + j + VL), s3 += load(u + j + 2 * VL), s4 += load(u + j + 3 * VL);
            each(j, end, [&](i64 k, int m, auto T) { add(s, get(u, k, m, 0, T)); });
            sum += total((s + s2) + (s3 + s4));
        }
        mean = sum / n;
        center = (float)mean;
        double off = 0, square = 0;
        for (i64 b = 0; b < n; b += BLOCK) {
            V s{}, q{}, s2{}, q2{};
            i64 j = b, end = b + BLOCK < n ? b + BLOCK : n;
            for (; j + 2 * VL <= end; j += 2 * VL) {
                V c = load(u + j) - center, d = load(u + j + VL) - center;
                s += c, q += c * c, s2 += d, q2 += d * d;
            }
            each(j, end, [&](i64 k, int m, auto T) { auto c = get(u, k, m, center, T) - center; add(s, c), add(q, c, c); });
            off += total(s + s2), square += total(q + q2);
        }
        off /= n, square /= n;
        var = square - off * off;
        if (!(square < 1e37)) {                     // the squares do not fit into float, or are not finite
            off = 0, square = 0;
            for (i64 j = 0; j < n; j++) off += (double)u[j] - center;
            off /= n;
            for (i64 j = 0; j < n; j++) square += ((double)u[j] - center - off) * ((double)u[j] - center - off);
            var = square / n;
        } else if (square < 1e-30) {                // nor do these
            square = 0;
            for (i64 j = 0; j < n; j++) square += ((double)u[j] - center - off) * ((double)u[j] - center - off);
            var = square / n;
        }
        mean = center + off;
        center = (float)mean;
        rest = (float)(mean - center);
        set_rates();
    }

    // noise for positions from … from + count of the unit
    uint64_t index_of(i64 position) const {
        if (job.columns) return job.offset + (position / job.run) * job.columns * job.run + i * job.run + position % job.run;
        return job.offset + (i / job.period) * job.outer + (i % job.period) * job.inner + (position / job.length) * job.stride + position % job.length;
    }
    void noise_at(i64 from, i64 count, float* z) const {
        if (own_noise) {
            std::memcpy(z, own_noise + from, 4 * count);
            return;
        }
        i64 run = job.columns ? job.run : job.length;
        const Keys keys(job.seed);
        while (count > 0) {
            i64 m = run - from % run;
            if (m > count) m = count;
            normals(index_of(from), m, keys, z);
            z += m, from += m, count -= m;
        }
    }
};

inline V2 first_lanes(V2 x, int) { return x; }

inline double slow_power(double h, double l) {      // number by number, far from zero: kept where float can represent the result, as `representable` does
    double eta = h < 0 ? 2 - l : l, ell = std::log1p(std::fabs(h));
    const double top = std::log((double)std::numeric_limits<float>::max()) - 0.7;
    if (eta > 1 && std::isfinite(h) && eta * ell > top) ell = top / eta;
    return std::copysign(eta == 0 ? ell : std::expm1(eta * ell) / eta, h);
}


inline V first_lanes(V x, int n) {                  // zeros from lane n on
    I lane;
    for (int i = 0; i < VL; i++) lane[i] = i;
    return lane < n ? x : V{};
}

// ℓ of h = ρk from ℓ of k, for 1−ρ small: log(1+ρa) = log(1+a) + log(1 − (1−ρ) a/(1+a))
template <class T>
inline T nearby(T ell, T share) { return ell - share * (share * 0.5f + 1.0f); }

struct Averages { double log, d, kd, dd, q, a, ell, inverse, ka, kl, ki, logd, logl, ll, ald; };

// Averages over k = (u−μ)/σ, the last ten only for a backward pass; ℓ of h for the transform
template <bool KEEP, bool CLOSE>
void averages(const Unit& w, const float* u, float* ell_of, Averages& result) {
    Ahead ahead = w.u_ahead;
    constexpr int COUNT = KEEP ? 15 : 5;
    const float r = (float)w.bare, shift = -w.rest * r, rho = (float)(w.rate / w.bare), gap = (float)(1 - w.rate / w.bare);
    double s[15] = {0};
    for (i64 b = 0; b < w.n; b += BLOCK) {
        V t[COUNT];
        for (int m = 0; m < COUNT; m++) t[m] = V{};
        each(b, b + BLOCK < w.n ? b + BLOCK : w.n, [&](i64 j, int m, auto T) {
            auto k = (get(u, j, m, 0, T) - w.center) * r + shift;
            if (m < VL) k = first_lanes(k, m);
            auto a = absolute(k), ell = log1p_of(a), log = with_sign(ell, k), g = a * ell + ell, d = g - a, inverse = 1.0f / (a + 1.0f);
            add(t[0], log), add(t[1], d), add(t[2], k, d), add(t[3], d, d), add(t[4], g, ell);
            if constexpr (KEEP) {
                add(t[5], a), add(t[6], ell), add(t[7], inverse), add(t[8], a, k), add(t[9], ell, k), add(t[10], inverse, k);
                add(t[11], log, d), add(t[12], log, ell), add(t[13], ell, ell), add(t[14], g - ell, d);
            }
            put(ell_of, j, m, CLOSE ? nearby(ell, a * inverse * gap) : log1p_of(a * rho));
            ahead(m);
        });
        for (int m = 0; m < COUNT; m++) s[m] += total(t[m]);
    }
    s[7] -= (VL - w.n % VL) % VL;
    for (int m = 0; m < 15; m++) (&result.log)[m] = s[m] / w.n;
}

// λ̂, and for the backward pass the numbers in `kept`
double estimate(const Unit& w, const float* u, float* ell_of, float* kept) {
    Averages m;
    bool close = 1 - w.rate / w.bare < 4e-3;
    if (kept)
        close ? averages<true, true>(w, u, ell_of, m) : averages<true, false>(w, u, ell_of, m);
    else
        close ? averages<false, true>(w, u, ell_of, m) : averages<false, false>(w, u, ell_of, m);
    double first = m.kd - m.log, second = 1 - m.q + m.d * m.d + 2 * (m.dd - m.d * m.d - m.kd * m.kd);
    if (kept) {                                     // p = d + aℓ = 2d + a − ℓ
        double p = 2 * m.d + m.a - m.ell, pk = 2 * m.kd + m.ka - m.kl, al = m.d + m.a - m.ell, all = m.q - m.ll;
        kept[2] = (float)(first / second), kept[3] = (float)(1 / second), kept[4] = (float)m.d, kept[5] = (float)m.kd;
        kept[6] = (float)(p - m.inverse), kept[7] = (float)(pk - m.ki);
        kept[8] = (float)(4 * m.logd - (2 * m.d + 2) * m.log - m.logl - 4 * m.kd * p);
        kept[9] = (float)(4 * m.ald - (2 * m.d + 2) * al - all - 4 * m.kd * pk);
    }
    return 1 - w.job.alpha * first / second;
}

// The weight and bias that apply to part `part` of a unit: numbers, or pointers to one number an element
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
void parts(const Job& job, i64 n, F f) {            // f(part, from, to)
    i64 count = job.weights > 1 ? job.weights : 1, length = n / count;
    for (i64 p = 0; p < count; p++) f(p, p * length, (p + 1) * length);
}

// From u to the output, which may be the same memory
void finish(const Unit& w, const float* u, const float* ell_of, double lmbda, float* out, float* kept) {
    const Job& job = w.job;
    const float rate = (float)w.rate, shift = (float)(-w.rest * w.rate);
    const Power power(lmbda);
    const bool noisy = job.noise != 0;
    auto h_at = [&](i64 j, int n, auto T) { return (get(u, j, n, 0, T) - w.center) * rate + shift; };
    double top = std::fmax(std::fabs(power.eta[0][0]), std::fabs(power.eta[1][0])) * std::log1p(std::sqrt((double)w.n));
    const bool slow = !(top < 80), plain = !job.transform || power.identity;
    if (slow && !plain) {                           // λ̂ so far from 1 that exp_of could overflow: number by number, and finished as plain
        for (i64 j = 0; j < w.n; j++) out[j] = (float)slow_power((double)(u[j] - w.center) * rate + shift, lmbda);
        u = out;
    }
    auto x_at = [&](i64 j, int n, auto T) {
        if (plain) return h_at(j, n, T);
        return slow ? get(u, j, n, 0, T) : transform(h_at(j, n, T), get(ell_of, j, n, 0, T), power);
    };
    if (!noisy) {
        parts(job, w.n, [&](i64 part, i64 from, i64 to) {
            Affine affine(job, w.i, part);
            if (plain || slow) each(from, to, [&](i64 j, int n, auto T) { put(out, j, n, affine(x_at(j, n, T), j, n)); });
            else if (affine.weights && affine.biases) {
                const float *weights = affine.weights, *biases = affine.biases;
                each(from, to, [&](i64 j, int n, auto T) { put(out, j, n, transform(h_at(j, n, T), get(ell_of, j, n, 0, T), power) * get(weights, j, n, 0, T) + get(biases, j, n, 0, T)); });
            } else if (!affine.weights && !affine.biases) {
                const V weight = set(affine.weight), bias = set(affine.bias);
                each(from, to, [&](i64 j, int n, auto T) { put(out, j, n, transform(h_at(j, n, T), get(ell_of, j, n, 0, T), power) * weight + bias); });
            } else each(from, to, [&](i64 j, int n, auto T) { put(out, j, n, affine(x_at(j, n, T), j, n)); });
        });
        return;
    }
    double spread = job.kind == UNSCALED ? std::sqrt(2 / M_PI) : 0, sum = 0;
    auto fill = [&](auto x) {                       // x into `out`, and its sum
        for (i64 b = 0; b < w.n; b += BLOCK) {
            V s{};
            each(b, b + BLOCK < w.n ? b + BLOCK : w.n, [&](i64 j, int n, auto T) {
                auto y = x(j, n, T);
                put(out, j, n, y);
                add(s, n < VL ? first_lanes(y, n) : y);
            });
            sum += total(s);
        }
    };
    if (plain || slow) fill(x_at);
    else fill([&](i64 j, int n, auto T) { return transform(h_at(j, n, T), get(ell_of, j, n, 0, T), power); });
    if (job.kind == SCALED) {
        const float mean = (float)(sum / w.n);
        for (i64 b = 0; b < w.n; b += BLOCK) {
            V s{};
            each(b, b + BLOCK < w.n ? b + BLOCK : w.n, [&](i64 j, int n, auto T) { add(s, absolute(get(out, j, n, mean, T) - mean)); });
            spread += total(s);
        }
        spread /= w.n;
    }
    if (kept) kept[1] = (float)spread;
    const float amount = (float)(job.noise * (job.kind == DROPOUT ? 1 : spread));
    const bool dropout = job.kind == DROPOUT;
    alignas(64) float z[BLOCK];
    parts(job, w.n, [&](i64 part, i64 from, i64 to) {
        Affine affine(job, w.i, part);
        for (i64 b = from; b < to; b += BLOCK) {
            i64 end = b + BLOCK < to ? b + BLOCK : to;
            w.noise_at(b, end - b, z);
            each(b, end, [&](i64 j, int n, auto T) {
                auto x = get(out, j, n, 0, T), noise = get(z, j - b, n, 0, T) * amount;
                put(out, j, n, affine(dropout ? x * noise + x : x + noise, j, n));
            });
        }
    });
}

i64 start_of(const Job& job, i64 i) { return (i / job.period) * job.outer + (i % job.period) * job.inner; }

void forward_unit(const Job& job, i64 i, const float* u, float* out, float* ell_of, const float* noise, i64 next) {
    Unit w(job, i);
    w.own_noise = noise;
    w.look_ahead(next, start_of(job, next));
    w.moments(u);
    float* kept = job.kept ? job.kept + KEPT * i : nullptr;
    if (kept) std::memset(kept, 0, 4 * KEPT), kept[0] = w.rest;
    double lmbda = 1;
    if (job.transform && w.bare > 0) lmbda = (float)estimate(w, u, ell_of, kept);
    else if (std::isnan(w.var)) w.rate = NAN;
    job.mean[i] = (float)w.mean, job.var[i] = (float)w.var, job.lmbda[i] = (float)lmbda;
    finish(w, u, ell_of, lmbda, out, kept);
}


// ∂ψ/∂λ = ℓ²φ(t), t = ηℓ, φ(t) = (t eᵗ − expm1 t)/t²: its series where |t| < 1
inline V slope_in_lambda(V ell, V t, V expo, V value, V inverse) {
    V p = t * (1.0f / 3991680) + 1.0f / 403200;
    p = p * t + 1.0f / 45360;
    p = p * t + 1.0f / 5760;
    p = p * t + 1.0f / 840;
    p = p * t + 1.0f / 144;
    p = p * t + 1.0f / 30;
    p = p * t + 1.0f / 8;
    p = p * t + 1.0f / 3;
    p = p * t + 0.5f;
    return absolute(t) < 1.0f ? ell * ell * p : (ell * expo - value) * inverse;
}
inline V2 slope_in_lambda(V2 ell, V2 t, V2 expo, V2 value, V2 inverse) {
    return {slope_in_lambda(ell.a, t.a, expo.a, value.a, inverse.a), slope_in_lambda(ell.b, t.b, expo.b, value.b, inverse.b)};
}

struct Sums { double g = 0, gh = 0, slope = 0; };

// First visit of the backward pass: sums over the unit; g ∂x/∂h goes to `of_h`, ℓ of k to `ell_of`.
template <bool CLOSE, bool SMALL>
void reduce(const Unit& w, const float* u, const float* grad, const Power& power, float spread, float* of_h, float* ell_of, float* weight_grad, float* bias_grad, Sums& sums) {
    const Job& job = w.job;
    const bool transformed = job.transform && w.bare > 0, scaled = job.weights != 0 && job.weight, dropout = job.kind == DROPOUT && job.noise != 0;
    const float r = (float)(transformed ? w.bare : w.rate), shift = -w.rest * r;
    const float rho = (float)(w.rate / w.bare), gap = (float)(1 - w.rate / w.bare), amount = (float)(job.noise * (dropout ? 1 : spread));
    const bool noisy = job.noise != 0 && (weight_grad || dropout), each_one = job.weights < 0;
    alignas(64) float z[BLOCK];
    Ahead u_ahead = w.u_ahead, grad_ahead = w.grad_ahead;
    parts(job, w.n, [&](i64 part, i64 from, i64 to) {
        Affine affine(job, w.i, part);
        const V weight = set(affine.weight);
        double of_weight = 0, of_bias = 0;
        for (i64 b = from; b < to; b += BLOCK) {
            i64 end = b + BLOCK < to ? b + BLOCK : to;
            if (noisy) w.noise_at(b, end - b, z);
            V s_g{}, s_gh{}, s_slope{}, s_weight{}, s_bias{};
            each(b, end, [&](i64 j, int n, auto T) {
                auto g = get(grad, j, n, 0, T), k = (get(u, j, n, 0, T) - w.center) * r + shift;
                if (n < VL) k = first_lanes(k, n);
                auto upstream = g;
                if (each_one) { if (affine.weights) upstream = g * get(affine.weights, j, n, 0, T); }
                else if (scaled) upstream = g * weight;
                auto noise = T;
                if (noisy) noise = get(z, j - b, n, 0, T) * amount;
                if (dropout) upstream += upstream * noise;
                auto x = k, of = upstream;
                if (transformed) {
                    auto a = absolute(k), ell_k = log1p_of(a), inverse = 1.0f / (a + 1.0f), ell = ell_k;
                    if constexpr (CLOSE) {
                        auto share = a * inverse * gap;
                        ell = nearby(ell_k, share);
                        inverse = inverse * (share * share + share) + inverse;
                    } else {
                        a = a * rho;
                        ell = log1p_of(a);
                        inverse = 1.0f / (a + 1.0f);
                    }
                    auto left = negative(k);
                    auto eta = choose(left, power.eta), by_eta = choose(left, power.inverse);
                    auto e = exp_of(eta, choose(left, power.low), ell);
                    auto expo = exp_from(e), value = expm1_from(e) * by_eta;
                    of = upstream * expo * inverse;
                    if constexpr (SMALL) add(s_slope, upstream, slope_in_lambda(ell, eta * ell, expo, value, by_eta));
                    else add(s_slope, upstream, (ell * expo - value) * by_eta);
                    x = with_sign(value, k);
                    put(ell_of, j, n, ell_k);
                }
                add(s_g, of), add(s_gh, of, k);
                put(of_h, j, n, of);
                u_ahead(n), grad_ahead(n);
                if (weight_grad) {
                    auto y = dropout ? x * noise + x : x + noise;
                    if (each_one) put(weight_grad, j, n, get(weight_grad, j, n, 0, T) + g * y);
                    else add(s_weight, g, y);
                }
                if (bias_grad) {
                    if (each_one) put(bias_grad, j, n, get(bias_grad, j, n, 0, T) + g);
                    else add(s_bias, g);
                }
            });
            sums.g += total(s_g), sums.gh += total(s_gh), sums.slope += total(s_slope), of_weight += total(s_weight), of_bias += total(s_bias);
        }
        if (!each_one) {
            i64 k = w.i * (job.weights > 1 ? job.weights : 1) + part;
            if (weight_grad) weight_grad[k] = (float)of_weight;
            if (bias_grad) bias_grad[k] = (float)of_bias;
        }
    });
    sums.g /= w.n, sums.gh /= w.n, sums.slope /= w.n;
    if (transformed) sums.gh *= w.rate / w.bare;
}

void backward_unit(const Job& job, i64 i, const float* u, const float* grad, float* of_u, float* ell_of, const float* noise, float* weight_grad, float* bias_grad, i64 next) {
    Unit w(job, i);
    w.look_ahead(next, start_of(job, next));
    const float* kept = job.kept + KEPT * i;
    w.own_noise = noise;
    w.center = job.mean[i], w.var = job.var[i], w.rest = kept[0];
    w.set_rates();
    if (std::isnan(w.var)) w.rate = NAN;
    const Power power(job.lmbda[i]);
    Sums m;
    const bool transformed = job.transform && w.bare > 0, close = !transformed || 1 - w.rate / w.bare < 4e-3;
    auto visit = power.small ? (close ? reduce<true, true> : reduce<false, true>) : (close ? reduce<true, false> : reduce<false, false>);
    visit(w, u, grad, power, kept[1], of_u, ell_of, weight_grad, bias_grad, m);
    const float rate = (float)w.rate;
    if (!transformed) {
        const float shift = -w.rest * rate, c0 = (float)(-w.rate * m.g), c1 = (float)(-w.rate * m.gh);
        each(0, w.n, [&](i64 j, int n, auto T) {
            auto h = (get(u, j, n, 0, T) - w.center) * rate + shift;
            put(of_u, j, n, get(of_u, j, n, 0, T) * rate + (h * c1 + c0));
        });
        return;
    }
    // rate·(of_h − mean − h·mean(of_h h)) + κ·(v − mean v − k·mean(v k)), v = p − 1/(1+a) − ratio·q₂
    const double kappa = -job.alpha * m.slope * w.bare * kept[3], ratio = kept[2];
    const float r = (float)w.bare, shift = -w.rest * r;
    const float c0 = (float)(-w.rate * m.g - kappa * (kept[6] - ratio * kept[8]));
    const float c1 = (float)(-w.rate * m.gh * w.rate / w.bare - kappa * (kept[7] - ratio * kept[9]));
    const float of_p = (float)(kappa * (1 + 4 * ratio * kept[5])), of_inverse = (float)-kappa;
    const float of_d = (float)(-4 * kappa * ratio), of_log = (float)(kappa * ratio * (2 * kept[4] + 2)), of_ell = (float)(kappa * ratio);
    each(0, w.n, [&](i64 j, int n, auto T) {
        auto k = (get(u, j, n, 0, T) - w.center) * r + shift, a = absolute(k), ell = get(ell_of, j, n, 0, T);
        auto g = a * ell + ell, d = g - a, p = d + (g - ell), inverse = 1.0f / (a + 1.0f);
        auto log = with_sign(ell, k), inner = d * of_d + (ell * of_ell + of_log);
        put(of_u, j, n, get(of_u, j, n, 0, T) * rate + (k * c1 + c0) + (p * of_p + (inverse * of_inverse + log * inner)));
    });
}

// ---- units in memory ----

struct Rows {                                       // a unit that consists of runs
    const Job& job;
    i64 start(i64 i) const { return start_of(job, i); }
    void gather(const float* from, i64 i, float* to) const {
        for (i64 s = 0; s < job.segments; s++) std::memcpy(to + s * job.length, from + start(i) + s * job.stride, 4 * job.length);
    }
    void scatter(const float* from, i64 i, float* to) const {
        for (i64 s = 0; s < job.segments; s++) std::memcpy(to + start(i) + s * job.stride, from + s * job.length, 4 * job.length);
    }
};

// Columns are taken together: a cache line of each row, or, in small matrices, as many as one batch of noise holds.
constexpr i64 MOST = 64;
i64 group_of(const Job& job) { return job.run == 1 && job.length <= 8192 ? MOST : 16; }
i64 pitch_of(i64 n) { return (n + VL - 1) / VL * VL + VL; }     // not a power of two, which would fill a few sets of the cache only

void gather_columns(const Job& job, const float* from, i64 first, i64 count, i64 n, float* to) {
    for (i64 row = 0; row < n; row++)
        for (i64 c = 0; c < count; c++) to[c * pitch_of(n) + row] = from[row * job.columns + first + c];
}
void scatter_columns(const Job& job, const float* from, i64 first, i64 count, i64 n, float* to) {
    for (i64 row = 0; row < n; row++)
        for (i64 c = 0; c < count; c++) to[row * job.columns + first + c] = from[c * pitch_of(n) + row];
}
void noise_of_columns(const Job& job, i64 first, i64 count, i64 n, float* to) {         // for runs of one element
    float line[MOST];
    const Keys keys(job.seed);
    for (i64 row = 0; row < n; row++) {
        normals(job.offset + row * job.columns + first, count, keys, line);
        for (i64 c = 0; c < count; c++) to[c * pitch_of(n) + row] = line[c];
    }
}

i64 padded(i64 n) { return (n + 2 * VL - 1) / VL * VL; }

// All units that thread-independent piece `piece` holds
void forward_piece(const Job& job, i64 first, i64 last) {
    const i64 n = job.segments * job.length, room = padded(n);
    if (job.columns) {
        const i64 count = last - first;
        const bool noisy = job.noise != 0 && job.run == 1;
        const i64 pitch = pitch_of(n), all = count * pitch;
        float* memory = scratch.take((noisy ? 2 : 1) * all + room);
        float *u = memory, *ell = memory + all, *noise = ell + room;
        gather_columns(job, job.u, first, count, n, u);
        if (noisy) noise_of_columns(job, first, count, n, noise);
        for (i64 c = 0; c < count; c++) forward_unit(job, first + c, u + c * pitch, u + c * pitch, ell, noisy ? noise + c * pitch : nullptr, job.units);
        scatter_columns(job, u, first, count, n, job.out);
        return;
    }
    Rows rows{job};
    float* memory = scratch.take((job.segments > 1 ? 2 : 1) * room);
    for (i64 i = first; i < last; i++) {
        const i64 next = i + 1 < last ? i + 1 : i + job.threads * (last - first);       // a guess, where other threads take pieces too
        if (job.segments == 1) {
            forward_unit(job, i, job.u + rows.start(i), job.out + rows.start(i), memory, nullptr, next);
        } else {
            rows.gather(job.u, i, memory + room);
            forward_unit(job, i, memory + room, memory + room, memory, nullptr, next);
            rows.scatter(memory + room, i, job.out);
        }
    }
}

void backward_piece(const Job& job, i64 first, i64 last, float* weight_grad, float* bias_grad) {
    const i64 n = job.segments * job.length, room = padded(n);
    if (job.columns) {
        const i64 count = last - first;
        const bool noisy = job.noise != 0 && job.run == 1;
        const i64 pitch = pitch_of(n), all = count * pitch;
        float* memory = scratch.take((noisy ? 3 : 2) * all + room);
        float *u = memory, *g = u + all, *ell = g + all, *noise = ell + room;
        gather_columns(job, job.u, first, count, n, u), gather_columns(job, job.grad, first, count, n, g);
        if (noisy) noise_of_columns(job, first, count, n, noise);
        for (i64 c = 0; c < count; c++) backward_unit(job, first + c, u + c * pitch, g + c * pitch, g + c * pitch, ell, noisy ? noise + c * pitch : nullptr, weight_grad, bias_grad, job.units);
        scatter_columns(job, g, first, count, n, job.out);
        return;
    }
    Rows rows{job};
    float* memory = scratch.take((job.segments > 1 ? 3 : 1) * room);
    for (i64 i = first; i < last; i++) {
        const i64 start = rows.start(i), next = i + 1 < last ? i + 1 : i + job.threads * (last - first);
        if (job.segments == 1) {
            backward_unit(job, i, job.u + start, job.grad + start, job.out + start, memory, nullptr, weight_grad, bias_grad, next);
        } else {
            rows.gather(job.u, i, memory + room), rows.gather(job.grad, i, memory + 2 * room);
            backward_unit(job, i, memory + room, memory + 2 * room, memory + 2 * room, memory, nullptr, weight_grad, bias_grad, next);
            rows.scatter(memory + 2 * room, i, job.out);
        }
    }
}

i64 piece_size(const Job& job) {                    // does not depend on the number of threads, so that sums do not either
    if (job.columns) return group_of(job);
    i64 n = job.segments * job.length, size = (job.units + 63) / 64, enough = (16384 + n - 1) / n;
    return size < enough ? enough : size > 512 ? 512 : size;
}

struct Channel {                                    // given statistics of a channel
    float center, rate, far, weight, bias;          // `far`: where |h| could overflow exp_of, or log1p_of
    Power power;
    Channel(const Job& job, i64 c) : weight(job.weight ? job.weight[c] : 1), bias(job.bias ? job.bias[c] : 0), power(job.transform ? job.lmbda[c] : 1) {
        Unit w(job, c);
        w.var = job.var[c], center = job.mean[c];
        w.set_rates();
        rate = std::isnan(w.var) ? NAN : (float)w.rate;
        double eta = std::fmax(std::fmax(std::fabs(power.eta[0][0]), std::fabs(power.eta[1][0])), 2);
        far = power.identity ? std::numeric_limits<float>::infinity() : (float)std::expm1(80 / eta);
    }
    float slowly(float u) const { return (float)slow_power((u - center) * rate, power.lmbda) * weight + bias; }
};

inline void largest(I& most, V a) { most = (I)a > most ? (I)a : most; }
inline void largest(I& most, V2 a) { largest(most, a.a), largest(most, a.b); }

void evaluate_run(const Channel& channel, const float* u, float* out, i64 length) {
    const Channel c = channel;                      // its constants in registers
    const V weight = set(c.weight), bias = set(c.bias), center = set(c.center), rate = set(c.rate);
    if (c.power.identity) {
        each(0, length, [&](i64 j, int n, auto T) { put(out, j, n, (get(u, j, n, 0, T) - center) * rate * weight + bias); });
        return;
    }
    const I far = (I)set(c.far);
    for (i64 b = 0; b < length; b += BLOCK) {
        i64 end = b + BLOCK < length ? b + BLOCK : length;
        I most{};                                   // of the bits of |h|, which are ordered as the numbers are, NaN above all
        each(b, end, [&](i64 j, int n, auto T) {
            auto h = (get(u, j, n, c.center, T) - center) * rate, a = absolute(h);
            largest(most, a);
            put(out, j, n, transform(h, log1p_of(a), c.power) * weight + bias);
        });
        if (any(most >= far))
            for (i64 j = b; j < end; j++) out[j] = c.slowly(u[j]);
    }
}

void evaluate_rows(const Job& job, const Channel* channels, i64 first, i64 last) {      // channels along the rows of a matrix
    for (i64 b = 0; b < job.columns; b += VL) {
        const int n = job.columns - b < VL ? (int)(job.columns - b) : VL;
        V center{}, rate{}, far = set(1), weight{}, bias{}, eta[2]{}, low[2]{}, inverse[2]{};
        for (int k = 0; k < n; k++) {
            const Channel& c = channels[b + k];
            center[k] = c.center, rate[k] = c.rate, far[k] = c.far, weight[k] = c.weight, bias[k] = c.bias;
            for (int side = 0; side < 2; side++) eta[side][k] = c.power.eta[side][0], low[side][k] = c.power.low[side][0], inverse[side][k] = c.power.inverse[side][0];
        }
        bool identity = true;
        for (int k = 0; k < n; k++) identity &= channels[b + k].power.identity;
        for (i64 row = first; row < last; row++) {
            i64 at = row * job.columns + b;
            V h = (get(job.u, at, n, 0, V{}) - center) * rate, x = h;
            if (!identity) {
                V a = absolute(h);
                x = transform(h, log1p_of(a), eta, low, inverse);
                if (any(~(a < far))) {
                    for (int k = 0; k < n; k++) job.out[at + k] = channels[b + k].slowly(job.u[at + k]);
                    continue;
                }
            }
            put(job.out, at, n, x * weight + bias);
        }
    }
}

}  // namespace

extern "C" {

void normalnorm_forward(const Job* job_) {
    const Job& job = *job_;
    if (job.given) {
        std::vector<Channel> channels;
        channels.reserve(job.weight_period);
        for (i64 c = 0; c < job.weight_period; c++) channels.emplace_back(job, c);
        if (job.columns) {
            const i64 rows = job.units, step = 16384 / job.columns + 1, pieces = (rows + step - 1) / step;
#pragma omp parallel for num_threads((int)job.threads) schedule(static)
            for (i64 p = 0; p < pieces; p++) evaluate_rows(job, channels.data(), p * step, (p + 1) * step < rows ? (p + 1) * step : rows);
        } else {
#pragma omp parallel for num_threads((int)job.threads) schedule(static)
            for (i64 i = 0; i < job.units; i++) evaluate_run(channels[i % job.weight_period], job.u + i * job.length, job.out + i * job.length, job.length);
        }
        return;
    }
    const i64 size = piece_size(job), pieces = (job.units + size - 1) / size;
#pragma omp parallel for num_threads((int)job.threads) schedule(dynamic, 1)
    for (i64 p = 0; p < pieces; p++) forward_piece(job, p * size, (p + 1) * size < job.units ? (p + 1) * size : job.units);
}

i64 normalnorm_pieces(const Job* job) {
    i64 size = piece_size(*job);
    return (job->units + size - 1) / size;
}

// With one weight an element, weight_grad and bias_grad have a row for each piece, filled with zeros.
void normalnorm_backward(const Job* job_) {
    const Job& job = *job_;
    const i64 size = piece_size(job), pieces = (job.units + size - 1) / size, n = job.weights < 0 ? job.segments * job.length : 0;
#pragma omp parallel for num_threads((int)job.threads) schedule(dynamic, 1)
    for (i64 p = 0; p < pieces; p++)
        backward_piece(job, p * size, (p + 1) * size < job.units ? (p + 1) * size : job.units,
                       job.weight_grad ? job.weight_grad + p * n : nullptr, job.bias_grad ? job.bias_grad + p * n : nullptr);
}

void normalnorm_normals(uint64_t start, i64 count, uint64_t key, float* z) { normals(start, count, Keys(key), z); }
}
