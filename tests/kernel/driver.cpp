// Runs the kernel (normalnorm/layers/engines/native.cpp, linked to this) on
// recorded inputs and compares with recorded outputs; see record.py. What the
// kernel computes of bfloat16, and in stages for several processes, is compared
// with its own results in float32, and of the whole. Needs neither Python nor
// PyTorch, so that it runs under an emulator and under sanitizers.
//
//     driver recorded.bin [most threads]
//
// Returns 0 where every number is within its tolerance and does not depend on
// the number of threads, else 1; 2 where the record cannot be read. Arrays have
// exactly the size that the kernel may touch, so that a sanitizer sees one
// element more.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

typedef int64_t i64;
typedef std::vector<float> Floats;
typedef std::vector<uint16_t> Halves;  // of bfloat16

// As in native.cpp
struct Job {
    const float *u, *grad;
    float* out;
    const float *weight, *bias;
    float *mean, *var, *lmbda, *beside;
    float *weight_grad, *bias_grad;
    float *running_mean, *running_var, *running_lambda;
    i64 units, period, outer, inner, segments, length, stride, columns, run,
        weights, weight_period;
    i64 given, transform, kind, half;
    double eps, alpha, noise;
    i64 threads;
    uint64_t seed, offset;
    double momentum;
};
struct ProxyJob {
    const float *weight, *bias, *shift, *scale, *nodes;
    float *mean, *var, *jacobian;
    const float *of_mean, *of_var;
    float *of_weight, *of_bias, *of_shift, *of_scale;
    i64 channels, count, kind, threads;
    double slope;
};
struct GroupedJob {
    const float *u, *grad;
    float* out;
    const float *weight, *bias, *shift, *scale, *mean, *factor, *nodes;
    float* kept;
    float *of_weight, *of_bias, *of_shift, *of_scale, *of_mean, *of_factor;
    i64 images, channels, groups, length, kind, count, divided;
    double eps, slope, added;
    i64 threads;
};
enum Stage { MOMENTS, AVERAGES, CENTRE, SCALE, OUTPUT, SUMS, GRADIENT };
// rows of a stage's table, forward and backward
enum { MEAN, VAR, D, KD, LOG, Q, DD, FARTHEST, MIDDLE, SPREAD, FORWARD_ROWS };
enum { BACKWARD_ROWS = 5 };
// 0: done, 1: no memory, 2: an address that is null or of freed memory
extern "C" {
int normalnorm_path();
int normalnorm_kept();
int normalnorm_forward(const Job*);
int normalnorm_backward(const Job*);
int normalnorm_given_backward(const Job*);
int normalnorm_stage(int stage, const Job*, double* table, i64 count);
int normalnorm_normals(uint64_t start, i64 count, uint64_t key, float* z);
int normalnorm_proxy_forward(const ProxyJob*);
int normalnorm_proxy_backward(const ProxyJob*);
int normalnorm_grouped_forward(const GroupedJob*);
int normalnorm_grouped_backward(const GroupedJob*);
}

namespace {

// ---- the record ----

struct Array {
    Floats f;
    std::vector<double> d;
    std::vector<i64> q;
};
std::map<std::string, Array> record;

[[noreturn]] void stop(const std::string& problem) {
    std::fprintf(
        stderr,
        "driver: %s; `python -m tests.kernel.record` writes the record\n",
        problem.c_str());
    std::exit(2);
}
const Array& at(const std::string& name) {
    auto found = record.find(name);
    if (found == record.end()) stop("the record has no array \"" + name + "\"");
    return found->second;
}
bool has(const std::string& name) { return record.count(name) != 0; }
const Floats& floats(const std::string& name) { return at(name).f; }
i64 integer(const std::string& name) { return at(name).q.at(0); }

void read(const char* path) {
    std::FILE* file = std::fopen(path, "rb");
    if (!file) stop(std::string(path) + " cannot be read");
    auto take = [&](void* to, size_t size) {
        if (size && std::fread(to, 1, size, file) != size)
            stop(std::string(path) + " ends too early");
    };
    auto number = [&] { i64 n; take(&n, 8); return n; };
    char magic[22];
    take(magic, sizeof magic);
    if (std::memcmp(magic, "normalnorm recorded 1\n", sizeof magic))
        stop(std::string(path) + " is no record for this driver");
    for (i64 left = number(); left > 0; left--) {
        std::string name((size_t)number(), ' ');
        take(&name[0], name.size());
        char letter;
        take(&letter, 1);
        const size_t size = (size_t)number();
        Array& to = record[name];
        if (letter == 'f') to.f.resize(size), take(to.f.data(), 4 * size);
        else if (letter == 'd') to.d.resize(size), take(to.d.data(), 8 * size);
        else if (letter == 'q') to.q.resize(size), take(to.q.data(), 8 * size);
        else stop("the array \"" + name + "\" has an unknown type");
    }
    std::fclose(file);
}

// ---- comparisons ----

int arrays = 0, failures = 0;
double worst = 0;  // error as a share of its tolerance
std::string worst_name;
struct Worst { double share = 0, error = 0; std::string name; int arrays = 0; };
std::map<std::string, Worst> by_rule;

enum Kind { SHARE, EACH, BOUND, ULP };
struct Found { double share = 0, error = 0; size_t index = 0; };

double share_of(double error, double tolerance) {
    return error == 0 ? 0 : error / tolerance;
}

void report(const std::string& name, const std::string& rule, const Found& most,
            double found, double expected) {
    arrays++;
    Worst& w = by_rule[rule];
    w.arrays++;
    if (most.share >= w.share)
        w.share = most.share, w.error = most.error, w.name = name;
    if (most.share >= worst) worst = most.share, worst_name = name;
    if (most.share <= 1) return;                    // not so for NaN either
    failures++;
    std::printf(
        "WRONG %s: element %zu is %.9g, expected %.9g: error %.3g, %.3g of the "
        "tolerance (rule \"%s\")\n",
        name.c_str(), most.index, found, expected, most.error, most.share,
        rule.c_str());
}

// `bounds`: for the rule of that kind; `t`: for ulp. Not finite: the same
// infinity, or NaN for NaN
template <class T>
void compare(const std::string& name, const std::string& rule,
             const float* found, const T* expected, size_t count,
             const float* bounds = nullptr, const double* t = nullptr) {
    const std::vector<double>& numbers = at("tolerance/" + rule).d;
    const int kind = (int)numbers.at(0);
    const double a = numbers.at(1), b = numbers.at(2);
    double largest = b;
    for (size_t i = 0; i < count; i++)
        if (std::isfinite(expected[i]))
            largest = std::fmax(largest, std::fabs((double)expected[i]));
    Found most;
    for (size_t i = 0; i < count; i++) {
        const double e = expected[i], f = found[i];
        double error, tolerance = 1;
        if (!std::isfinite(e) || !std::isfinite(f)) {
            error = (std::isnan(e) && std::isnan(f)) || e == f ? 0 : INFINITY;
        } else {
            error = std::fabs(f - e);
            if (kind == SHARE) error /= largest, tolerance = a;
            else if (kind == EACH) tolerance = a * std::fabs(e) + b;
            else if (kind == BOUND) tolerance = a * bounds[i] + b;
            else
                error /= std::ldexp(
                    1.0, std::ilogb(std::fmax(std::fabs(e), 0x1p-126)) - 23),
                    tolerance = a + b * (t ? std::fabs(t[i]) : 0);
        }
        const double share = share_of(error, tolerance);
        if (share >= most.share) most = {share, error, i};
    }
    report(name, rule, most, found[most.index], (double)expected[most.index]);
}
void compare(const std::string& name, const std::string& rule,
             const Floats& found, const Floats& expected,
             const float* bounds = nullptr) {
    if (found.size() != expected.size())
        stop("the array \"" + name + "\" has " + std::to_string(expected.size())
             + " elements, not " + std::to_string(found.size()));
    compare(name, rule, found.data(), expected.data(), found.size(), bounds);
}
void same_bits(const std::string& name, const std::vector<Floats>& found,
               const std::vector<Floats>& first,
               const char* otherwise = "depends on the number of threads") {
    arrays++;
    for (size_t k = 0; k < found.size(); k++) {
        if (found[k].size() == first[k].size()
            && (found[k].empty()
                || !std::memcmp(found[k].data(), first[k].data(),
                                4 * found[k].size())))
            continue;
        failures++;
        std::printf("WRONG %s: result %zu %s\n", name.c_str(), k, otherwise);
        return;
    }
}

void done(int returned, const char* function, int expected = 0) {
    if (returned == expected) return;
    failures++;
    std::printf("WRONG %s returned %d, not %d\n", function, returned, expected);
}

// ---- layouts ----

// (images, channels, length) to (images, length, channels), and back
Floats channels_last(const Floats& x, i64 images, i64 channels, i64 length,
                     bool back = false) {
    Floats y(x.size());
    for (i64 n = 0; n < images; n++)
        for (i64 c = 0; c < channels; c++)
            for (i64 j = 0; j < length; j++) {
                const i64 first = (n * channels + c) * length + j,
                          last = (n * length + j) * channels + c;
                if (back) y[first] = x[last];
                else y[last] = x[first];
            }
    return y;
}
// and to (channels, images, length)
Floats channels_first(const Floats& x, i64 images, i64 channels, i64 length) {
    Floats y;
    for (i64 c = 0; c < channels; c++)
        for (i64 n = 0; n < images; n++) {
            const auto run = x.begin() + (n * channels + c) * length;
            y.insert(y.end(), run, run + length);
        }
    return y;
}
Floats every(const Floats& x, i64 step) {
    Floats y;
    for (size_t i = 0; i < x.size(); i += (size_t)step) y.push_back(x[i]);
    return y;
}
Floats repeated(const Floats& x, i64 times) {
    Floats y;
    for (i64 k = 0; k < times; k++) y.insert(y.end(), x.begin(), x.end());
    return y;
}
const float* data(const Floats& x) { return x.empty() ? nullptr : x.data(); }
float* data(Floats& x) { return x.empty() ? nullptr : x.data(); }

// ---- bfloat16: the upper half of a float ----

uint32_t bits_of(float x) {
    uint32_t w;
    std::memcpy(&w, &x, 4);
    return w;
}
float float_of(uint32_t w) {
    float x;
    std::memcpy(&x, &w, 4);
    return x;
}
Halves rounded(const Floats& x) {  // to the nearest, or even
    Halves y;
    for (float v : x) {
        const uint32_t w = bits_of(v);
        y.push_back(std::isnan(v) ? 0x7fc0
                                  : (w + 0x7fff + (w >> 16 & 1)) >> 16);
    }
    return y;
}
Floats widened(const Halves& x) {
    Floats y;
    for (uint16_t h : x) y.push_back(float_of((uint32_t)h << 16));
    return y;
}
// Of the floats that are rounded to `found`, of bfloat16, those nearest to
// `expected`. So what is left of a comparison is the error before rounding.
Floats before_rounding(const Floats& found, const Floats& expected) {
    Floats y;
    for (size_t i = 0; i < found.size(); i++) {
        const uint32_t w = bits_of(found[i]), size = w & 0x7fffffff,
                       sign = w ^ size, odd = size >> 16 & 1;
        if (std::isnan(found[i])) {
            y.push_back(found[i]);
            continue;
        }
        float far = float_of(sign | (size + 0x8000 - odd)),
              near = size ? float_of(sign | (size - 0x8000 + odd)) : -far;
        if (near > far) std::swap(near, far);
        y.push_back(std::fmin(std::fmax(expected[i], near), far));
    }
    return y;
}

// ---- what is compared ----

const i64 KEPT = normalnorm_kept();     // numbers of a unit

// A recorded tensor with its weights, as a job without addresses. `times`: as
// many copies of the tensor, one after the other, so that there is work for
// several threads. They are more units, or longer ones with the same
// statistics; only their noise is another.
struct Case {
    Job job{};
    i64 images, channels, length;  // where channels lie last
    bool longer;
    Floats u, grad, weight, bias;

    Case(const std::string& name, const std::string& layout,
         const std::string& kind, i64 times) {
        std::vector<i64> visit = at(name + "/traversal/" + layout).q;
        images = visit.at(11) * times, channels = visit[12], length = visit[13];
        enum { UNITS, PERIOD, OUTER, INNER, SEGMENTS, LENGTH, STRIDE, COLUMNS };
        longer = visit[COLUMNS] || visit[SEGMENTS] > 1;
        const i64 units = visit[UNITS];
        visit[visit[COLUMNS] ? LENGTH : longer ? SEGMENTS : UNITS] *= times;
        if (visit[PERIOD] == units) visit[PERIOD] = visit[UNITS];
        std::memcpy(&job.units, visit.data(), 11 * sizeof(i64));
        auto laid = [&](const Floats& x) {
            return images ? channels_last(repeated(x, times), images, channels,
                                          length)
                          : repeated(x, times);
        };
        u = laid(floats(name + "/u")), grad = laid(floats(name + "/grad"));
        if (kind == "far out") u[u.size() / 2] = 100;  // beyond the tables
        if (has(name + "/weight"))
            weight = floats(name + "/weight"), bias = floats(name + "/bias");
        job.transform = kind != "no transform", job.eps = 1e-5, job.alpha = 1,
        job.momentum = 0.25;
        job.kind = kind == "noise" || kind == "no transform" ? 1
                   : kind == "unscaled"                      ? 2
                   : kind == "dropout"                       ? 3
                                                             : 0,
        job.noise = job.kind == 1 ? 0.4
                    : job.kind    ? 0.3
                                  : 0;
        job.seed = (uint64_t)at("noise").q[0],
        job.offset = (uint64_t)at("noise").q[1];
    }
    Floats back(const Floats& x) const {
        return images ? channels_last(x, images, channels, length, true) : x;
    }
    // sets of units that share their weights
    i64 rows() const {
        return job.weights < 0 ? 1 : job.units / job.weight_period;
    }
    i64 elements() const { return job.segments * job.length; }  // of a unit
    // How many images units extend over, and some of them
    i64 share() const {
        return job.columns ? job.length / job.run : job.segments;
    }
    Case some(i64 from, i64 to) const {
        Case part = *this;
        const i64 size = (i64)u.size() / share();
        if (job.columns) part.job.length = (to - from) * job.run;
        else part.job.segments = to - from;
        part.job.offset += (uint64_t)(from * size);
        part.u = Floats(u.begin() + from * size, u.begin() + to * size),
        part.grad =
            Floats(grad.begin() + from * size, grad.begin() + to * size);
        return part;
    }
};

enum { OUT, NUMBERS, OF_U, OF_WEIGHT, OF_BIAS, RUNNING, RESULTS = RUNNING + 3 };

// A case with memory for its results; forward and backward have the addresses.
// `half`: with input, upstream gradient, output and gradient of bfloat16
struct Memory {
    Job forward, backward;
    Halves u, grad, half_out, half_of_u;
    std::vector<Floats> results;
    Memory(const Memory&) = delete;
    Memory(const Case& c, i64 threads, bool half)
        : forward(c.job), results(RESULTS) {
        const size_t size = c.u.size(), units = (size_t)c.job.units,
                     rows = (size_t)c.rows();
        for (int k : {OUT, OF_U}) results[k].resize(half ? 0 : size);
        results[NUMBERS].resize(units * (size_t)KEPT);
        results[OF_WEIGHT].resize(c.weight.size() * rows),
            results[OF_BIAS].resize(c.bias.size() * rows);
        for (int k = 0; k < 3; k++)
            results[RUNNING + k].assign(units, k ? 1.0f : 0.0f);
        forward.threads = threads, forward.half = half;
        if (half) {
            u = rounded(c.u), grad = rounded(c.grad);
            half_out.resize(size), half_of_u.resize(size);
        }
        forward.u = half ? (const float*)u.data() : c.u.data(),
        forward.out = half ? (float*)half_out.data() : results[OUT].data();
        forward.weight = data(c.weight), forward.bias = data(c.bias);
        forward.mean = results[NUMBERS].data(),
        forward.var = forward.mean + units, forward.lmbda = forward.var + units,
        forward.beside = forward.lmbda + units;
        backward = forward;
        forward.running_mean = results[RUNNING].data(),
        forward.running_var = results[RUNNING + 1].data(),
        forward.running_lambda = results[RUNNING + 2].data();
        backward.grad = half ? (const float*)grad.data() : c.grad.data(),
        backward.out = half ? (float*)half_of_u.data() : results[OF_U].data();
        backward.bias = nullptr,
        backward.weight_grad = data(results[OF_WEIGHT]),
        backward.bias_grad = data(results[OF_BIAS]);
    }
    std::vector<Floats> found() const {
        std::vector<Floats> all = results;
        if (forward.half)
            all[OUT] = widened(half_out), all[OF_U] = widened(half_of_u);
        return all;
    }
};

std::vector<Floats> computed(const Case& c, i64 threads, bool half = false) {
    Memory memory(c, threads, half);
    done(normalnorm_forward(&memory.forward), "normalnorm_forward");
    done(normalnorm_backward(&memory.backward), "normalnorm_backward");
    return memory.found();
}

// Output, statistics and gradients of units with statistics of their own, by 1
// … `most` threads.
void whole(const std::string& name, const std::string& layout,
           const std::string& kind, i64 most, i64 times) {
    const Case c(name, layout, kind, times);
    const bool known = times == 1 || kind == "no noise";
    const size_t size = floats(name + "/u").size();
    auto last_copy = [&](const Floats& x) {
        return Floats(x.end() - (long)size, x.end());
    };
    std::vector<Floats> first;
    for (i64 threads = 1; threads <= most; threads *= 2) {
        const std::vector<Floats> found = computed(c, threads);
        const std::string here =
            name + "/" + layout + "/" + kind
            + (times > 1 ? "/" + std::to_string(times) + " times" : "");
        if (threads > 1) {
            same_bits(here + ", " + std::to_string(threads) + " threads", found,
                      first);
            continue;
        }
        first = found;
        if (!known) continue;
        const i64 step = integer(name + "/every");
        const std::string expected = name + "/" + kind;
        compare(here + "/out", "train",
                every(last_copy(c.back(found[OUT])), step),
                floats(expected + "/out"));
        compare(here + "/of u", "train",
                every(last_copy(c.back(found[OF_U])), step),
                floats(expected + "/of u"));
        const float n = (float)c.elements();
        for (int k = 0; k < 3; k++) {
            const char* names[] = {"mean", "var", "lmbda"};
            const Floats exact =
                repeated(floats(name + "/" + names[k]), c.longer ? 1 : times);
            const auto of = found[NUMBERS].begin() + k * c.job.units;
            compare(here + "/" + names[k], "train",
                    Floats(of, of + c.job.units), exact);
            Floats average;
            for (float x : exact)
                average.push_back((k ? 0.75f : 0)
                                  + 0.25f * (k == 1 ? x * (n / (n - 1)) : x));
            compare(here + "/running " + names[k], "train", found[RUNNING + k],
                    average);
        }
        for (int k = 0; c.job.weights != 0 && k < 2; k++) {
            const Floats& parts = found[k ? OF_BIAS : OF_WEIGHT];
            const size_t rows = (size_t)c.rows(), count = parts.size() / rows;
            Floats sum;
            for (size_t i = 0; i < count; i++) {
                double s = 0;
                for (size_t row = 0; row < rows; row++)
                    s += parts[row * count + i];
                sum.push_back((float)(s / (double)times));
            }
            compare(here + (k ? "/of bias" : "/of weight"), "train", sum,
                    floats(expected + (k ? "/of bias" : "/of weight")));
        }
    }
}

// One way to the results against another, each kind of number by itself
void alike(const std::string& name, const std::string& rule, const Case& c,
           std::vector<Floats> found, const std::vector<Floats>& expected,
           bool half) {
    const char* names[] = {"out",         "numbers",      "of u",
                           "of weight",   "of bias",      "running mean",
                           "running var", "running lmbda"};
    for (int k : {OUT, OF_U})
        if (half) found[k] = before_rounding(found[k], expected[k]);
    for (int k = 0; k < RESULTS; k++)
        if (k != NUMBERS && !expected[k].empty())
            compare(name + "/" + names[k], rule, found[k], expected[k]);
    const char* of_units[] = {"mean", "var", "lmbda", "beside"};
    for (int k = 0; k < 4; k++) {
        auto row = [&](const Floats& x) {
            return Floats(x.begin() + k * c.job.units,
                          k < 3 ? x.begin() + (k + 1) * c.job.units : x.end());
        };
        compare(name + "/" + of_units[k], rule, row(found[NUMBERS]),
                row(expected[NUMBERS]));
    }
}

// bfloat16 against the same numbers in float32
void halved(const std::string& name, const std::string& layout,
            const std::string& kind, i64 most, i64 times) {
    Case c(name, layout, kind, times);
    c.u = widened(rounded(c.u)), c.grad = widened(rounded(c.grad));
    const std::string here =
        name + "/" + layout + "/" + kind + "/half"
        + (times > 1 ? "/" + std::to_string(times) + " times" : "");
    const std::vector<Floats> first = computed(c, 1, true);
    alike(here, "half", c, first, computed(c, 1), true);
    for (i64 threads = 2; threads <= most; threads *= 2)
        same_bits(here + ", " + std::to_string(threads) + " threads",
                  computed(c, threads, true), first);
}

// ---- in stages, by processes that exchange averages ----

typedef std::vector<double> Doubles;

// The images are shared out to processes: those from 0, `cuts`[0], … on. All
// are in this one, which averages in between as `layers.sync.Across` does; the
// gradients of the weights are added.
std::vector<Floats> staged(const std::string& name, const Case& c,
                           std::vector<i64> cuts, i64 threads, bool half) {
    cuts.insert(cuts.begin(), 0), cuts.push_back(c.share());
    const size_t count = cuts.size() - 1, units = (size_t)c.job.units;
    std::vector<Case> parts;
    Doubles share;
    for (size_t p = 0; p < count; p++) {
        parts.push_back(c.some(cuts[p], cuts[p + 1]));
        share.push_back((double)parts[p].elements() / (double)c.elements());
    }
    std::vector<std::unique_ptr<Memory>> memory;
    for (const Case& part : parts)
        memory.emplace_back(new Memory(part, threads, half));
    std::vector<Doubles> tables(count, Doubles(2 * units));
    auto stage = [&](Stage which) {
        for (size_t p = 0; p < count; p++) {
            Job job = which < SUMS ? memory[p]->forward : memory[p]->backward;
            if (which == MOMENTS) {  // has no more than an input
                job = parts[p].job;
                job.threads = threads, job.half = half;
                job.u = memory[p]->forward.u;
            } else if (which != OUTPUT && which != GRADIENT) job.out = nullptr;
            if (which == GRADIENT) job.weight_grad = job.bias_grad = nullptr;
            done(normalnorm_stage(which, &job, tables[p].data(),
                                  which == MOMENTS ? 0 : c.elements()),
                 "normalnorm_stage");
        }
    };
    auto exchange = [&](size_t from, size_t to) {
        for (size_t i = from * units; i < to * units; i++) {
            double sum = 0;
            for (size_t p = 0; p < count; p++) sum += share[p] * tables[p][i];
            for (Doubles& table : tables) table[i] = sum;
        }
    };
    stage(MOMENTS);
    for (size_t i = 0; i < units; i++) {
        double mean = 0, var = 0;
        for (size_t p = 0; p < count; p++) mean += share[p] * tables[p][i];
        for (size_t p = 0; p < count; p++) {
            const double off = tables[p][i] - mean;
            var += share[p] * (tables[p][units + i] + off * off);
        }
        for (Doubles& table : tables) table[i] = mean, table[units + i] = var;
    }
    for (Doubles& table : tables) table.resize(FORWARD_ROWS * units, INFINITY);
    if (c.job.transform) stage(AVERAGES), exchange(D, FARTHEST);
    if (c.job.kind == 1) {
        stage(CENTRE), exchange(MIDDLE, MIDDLE + 1);
        stage(SCALE), exchange(SPREAD, SPREAD + 1);
    }
    stage(OUTPUT);
    tables.assign(count, Doubles(BACKWARD_ROWS * units));
    stage(SUMS), exchange(0, c.job.transform ? BACKWARD_ROWS : 2);
    stage(GRADIENT);
    std::vector<Floats> all;
    for (const auto& own : memory) {
        const std::vector<Floats> found = own->found();
        if (all.empty()) {
            all = found;
            continue;
        }
        for (int k : {OUT, OF_U})
            all[k].insert(all[k].end(), found[k].begin(), found[k].end());
        for (int k : {OF_WEIGHT, OF_BIAS})
            for (size_t i = 0; i < found[k].size(); i++)
                all[k][i] += found[k][i];
        auto common = [](const std::vector<Floats>& x) {
            std::vector<Floats> y(x.begin() + RUNNING, x.end());
            y.push_back(x[NUMBERS]);
            return y;
        };
        same_bits(name, common(found), common(all),
                  "is not the same in both processes");
    }
    return all;
}

// Stages of one process, and of two with unequal shares, against the whole; in
// float32 and in bfloat16
void stages(const std::string& name, const std::string& layout,
            const std::string& kind, i64 most, i64 times) {
    Case c(name, layout, kind, times);
    c.u = widened(rounded(c.u)), c.grad = widened(rounded(c.grad));
    const std::vector<Floats> expected = computed(c, 1);
    for (bool half : {false, true})
        for (bool shared : {false, true}) {
            if (shared && c.share() == 1) continue;
            const std::vector<i64> cuts(shared, (c.share() + 2) / 3);
            const std::string here =
                name + "/" + layout + "/" + kind + "/stages"
                + (shared ? " of two" : "") + (half ? "/half" : "")
                + (times > 1 ? "/" + std::to_string(times) + " times" : "");
            const std::vector<Floats> first = staged(here, c, cuts, 1, half);
            alike(here, shared ? "stages of two" : "stages", c, first, expected,
                  half);
            for (i64 threads = 2; threads <= most; threads *= 2)
                same_bits(here + ", " + std::to_string(threads) + " threads",
                          staged(here, c, cuts, threads, half), first);
        }
}

// Output and gradients for given statistics. `times`: as many copies of the
// images, of which the sums are as many times as large; "one image" has all
// elements of a channel in one run. bfloat16 gives the bits of float32,
// rounded.
void given(const std::string& name, const std::string& layout, i64 times,
           i64 most) {
    const std::vector<i64>& shape = at(name + "/shape").q;
    const bool far = name == "far", backward = has(name + "/of u"),
               last = layout == "channels last", one = layout == "one image";
    const i64 copies = shape.at(0) * times, channels = shape[1],
              images = one ? 1 : copies,
              length = one ? copies * shape[2] : shape[2];
    auto laid = [&](const Floats& x) {
        const Floats y = repeated(x, times);
        return last  ? channels_last(y, images, channels, length)
               : one ? channels_first(y, copies, channels, shape[2])
                     : y;
    };
    const Floats u = laid(floats(name + "/u")),
                 grad = laid(floats(name + "/grad")),
                 out_expected = laid(floats(name + "/out"));
    Floats mean = floats(name + "/mean"), var = floats(name + "/var"),
           lmbda = floats(name + "/lmbda");
    const Floats &weight = floats(name + "/weight"),
                 &bias = floats(name + "/bias");
    auto run = [&](const float* u_, const float* grad_, float* out, float* of_u,
                   Floats& of_weight, Floats& of_bias, i64 threads, bool half) {
        Job job{};
        job.u = u_, job.out = out, job.weight = weight.data(),
        job.bias = bias.data(), job.mean = mean.data(), job.var = var.data(),
        job.lmbda = lmbda.data(), job.half = half;
        job.units = images * (last ? length : channels),
        job.length = last ? 1 : length, job.columns = last ? channels : 0,
        job.weight_period = channels;
        job.period = job.segments = job.run = 1, job.given = job.transform = 1,
        job.eps = at(name + "/eps").d[0], job.alpha = 1, job.threads = threads;
        done(normalnorm_forward(&job), "normalnorm_forward");
        if (!backward) return;
        job.grad = grad_, job.out = of_u, job.bias = nullptr,
        job.weight_grad = of_weight.data(), job.bias_grad = of_bias.data();
        done(normalnorm_given_backward(&job), "normalnorm_given_backward");
    };
    const std::string here =
        name + "/" + layout
        + (times > 1 ? "/" + std::to_string(times) + " times" : "");
    const Halves narrow = rounded(u), narrow_grad = rounded(grad);
    std::vector<Floats> first, first_half;
    for (i64 threads = 1; threads <= most; threads *= 2) {
        Floats out(u.size()), of_u(u.size()), of_weight((size_t)channels),
            of_bias((size_t)channels);
        Halves half_out(u.size()), half_of_u(u.size());
        run((const float*)narrow.data(), (const float*)narrow_grad.data(),
            (float*)half_out.data(), (float*)half_of_u.data(), of_weight,
            of_bias, threads, true);
        const std::vector<Floats> found_half = {
            widened(half_out), widened(half_of_u), of_weight, of_bias};
        if (threads > 1) {
            same_bits(here + "/half, " + std::to_string(threads) + " threads",
                      found_half, first_half);
        } else {
            first_half = found_half;
            const Floats wide = widened(narrow),
                         wide_grad = widened(narrow_grad);
            run(wide.data(), wide_grad.data(), out.data(), of_u.data(),
                of_weight, of_bias, threads, false);
            same_bits(here + "/half", found_half,
                      {widened(rounded(out)), widened(rounded(of_u)), of_weight,
                       of_bias},
                      "is not that of float32, rounded");
        }
        run(u.data(), grad.data(), out.data(), of_u.data(), of_weight, of_bias,
            threads, false);
        const std::vector<Floats> found = {out, of_u, of_weight, of_bias};
        if (threads > 1) {
            same_bits(here + ", " + std::to_string(threads) + " threads", found,
                      first);
            continue;
        }
        first = found;
        compare(here + "/out", far ? "far" : "given", out, out_expected);
        if (!backward) continue;
        compare(here + "/of u", far ? "far of input" : "given of input", of_u,
                laid(floats(name + "/of u")));
        for (float& x : of_weight) x /= (float)times;
        for (float& x : of_bias) x /= (float)times;
        if (far && times > 1) continue;             // sums beyond float32
        compare(here + "/of weight", "given of weight", of_weight,
                floats(name + "/of weight"));
        compare(here + "/of bias", "given of bias", of_bias,
                floats(name + "/of bias"));
    }
}

// In the middle between two numbers of bfloat16: to the even one
void ties() {
    const float mean = 0, var = 1, half_a_unit = 0x1p-8f;
    Floats u, even;
    for (int k = 0; k < 128; k++)
        u.push_back(1 + (float)k / 128),
            even.push_back(1 + (float)(k + k % 2) / 128);
    const Halves narrow = rounded(u);
    Halves out(narrow.size());
    Job job{};
    job.u = (const float*)narrow.data(), job.out = (float*)out.data(),
    job.mean = const_cast<float*>(&mean), job.var = const_cast<float*>(&var),
    job.bias = &half_a_unit;
    job.units = job.period = job.segments = job.run = job.weight_period = 1,
    job.length = (i64)u.size(), job.given = job.half = job.threads = 1;
    done(normalnorm_forward(&job), "normalnorm_forward");
    same_bits("ties/half", {widened(out)}, {even}, "is not the even number");
}

// ψ(h; λ) in units in the last place: few values of one λ at a time, and 512 or
// more, for which there are tables where the kernel has any
void values(bool tables) {
    const Floats &h = floats("values/h"), &lambdas = floats("values/lmbda");
    const std::vector<double>& exact = at("values/out").d;
    size_t start = 0;
    for (size_t k = 0; k < lambdas.size(); k++) {
        const size_t count = (size_t)at("values/counts").q[k];
        for (size_t together : {(size_t)128, h.size(), 4 * h.size()}) {
            const Floats u = repeated(
                h, together > h.size() ? (i64)(together / h.size()) : 1);
            Floats out(u.size()), mean(1, 0.0f), var(1, 1.0f),
                lmbda(1, lambdas[k]);
            for (size_t from = 0; from < u.size(); from += together) {
                Job job{};
                job.u = u.data() + from, job.out = out.data() + from,
                job.mean = mean.data(), job.var = var.data(),
                job.lmbda = lmbda.data();
                job.units = job.weight_period = job.period = job.segments =
                    job.run = 1,
                job.length = (i64)together;
                job.given = job.transform = 1, job.alpha = 1, job.threads = 1;
                done(normalnorm_forward(&job), "normalnorm_forward");
            }
            Floats found;
            std::vector<double> t;
            for (size_t i = k % 3; i < h.size(); i += 3) {
                found.push_back(out[i]);
                t.push_back(
                    (h[i] < 0 ? 2 - (double)lambdas[k] : (double)lambdas[k])
                    * std::log1p(std::fabs((double)h[i])));
            }
            if (found.size() != count || h.size() % 128)
                stop("the array \"values/out\" does not fit \"values/h\"");
            char name[64];
            std::snprintf(name, sizeof name, "values/%.4g/%zu together",
                          (double)lambdas[k], together);
            compare(name,
                    tables && together >= 512 ? "ulp by tables"
                                              : "ulp by logarithms",
                    found.data(), exact.data() + start, count, nullptr,
                    t.data());
        }
        start += count;
    }
}

void normals() {
    const Floats& expected = floats("normals/out");
    const std::vector<i64>& starts = at("normals/starts").q;
    const i64 most = (i64)(expected.size() / starts.size());
    for (size_t k = 0; k < starts.size(); k++)
        for (i64 count : {(i64)1, (i64)3, (i64)63, (i64)64, (i64)65, most}) {
            Floats z((size_t)count);
            done(normalnorm_normals((uint64_t)starts[k], count,
                                    (uint64_t)integer("normals/key"), z.data()),
                 "normalnorm_normals");
            compare("normals/" + std::to_string(starts[k]) + "/"
                        + std::to_string(count),
                    "normals", z.data(), expected.data() + (i64)k * most,
                    z.size());
        }
}

void proxies(i64 most) {
    const char* names[] = {"leaky_relu", "gelu", "gelu_tanh", "silu", "tanh"};
    const Floats &weight = floats("proxy/weight"), &bias = floats("proxy/bias"),
                 &shift = floats("proxy/shift"), &scale = floats("proxy/scale"),
                 &nodes = floats("proxy/nodes");
    const Floats& upstream = floats("proxy/upstream");
    const size_t n = weight.size();
    for (int kind = 0; kind < 5; kind++) {
        const std::string here = std::string("proxy/") + names[kind];
        std::vector<Floats> first;
        for (i64 threads = 1; threads <= most; threads *= 2) {
            std::vector<Floats> found(6, Floats(n));
            Floats jacobian(4 * n);
            ProxyJob job{};
            job.weight = weight.data(), job.bias = bias.data(),
            job.shift = shift.data(), job.scale = scale.data(),
            job.nodes = nodes.data();
            job.mean = found[0].data(), job.var = found[1].data(),
            job.jacobian = jacobian.data();
            job.channels = (i64)n, job.count = integer("proxy/samples"),
            job.kind = kind, job.threads = threads,
            job.slope = kind ? 0 : at("proxy/slope").d[0];
            done(normalnorm_proxy_forward(&job), "normalnorm_proxy_forward");
            job.of_mean = upstream.data(), job.of_var = upstream.data() + n;
            job.of_weight = found[2].data(), job.of_bias = found[3].data(),
            job.of_shift = found[4].data(), job.of_scale = found[5].data();
            done(normalnorm_proxy_backward(&job), "normalnorm_proxy_backward");
            if (threads > 1) {
                same_bits(here + ", " + std::to_string(threads) + " threads",
                          found, first);
                continue;
            }
            first = found;
            compare(here + "/mean", "proxy mean", found[0],
                    floats(here + "/mean"),
                    floats("proxy/bound of mean").data());
            compare(here + "/var", "proxy var", found[1], floats(here + "/var"),
                    floats(here + "/bound of var").data());
            const char* of[] = {"/of weight", "/of bias", "/of shift",
                                "/of scale"};
            for (int k = 0; k < 4; k++)
                compare(here + of[k], "proxy gradient", found[2 + k],
                        floats(here + of[k]),
                        floats("proxy/bound of gradient").data());
        }
    }
}

// An activation and its slope, as in native.cpp's list of kinds
void active(i64 kind, double a, double y, double& value, double& slope) {
    const double k = std::sqrt(2 / M_PI), cube = 0.044715;
    if (kind == 0) {
        value = y > 0 ? y : a * y, slope = y > 0 ? 1 : a;
    } else if (kind == 1) {
        const double below = 0.5 * std::erfc(-y / std::sqrt(2.0));
        value = y * below, slope = below + y * k / 2 * std::exp(-y * y / 2);
    } else if (kind == 2) {
        const double t = std::tanh(k * (y + cube * y * y * y));
        value = 0.5 * y * (1 + t);
        slope = 0.5 * (1 + t)
                + 0.5 * y * (1 - t * t) * k * (1 + 3 * cube * y * y);
    } else if (kind == 3) {
        const double share = 1 / (1 + std::exp(-y));
        value = y * share, slope = share * (1 + y * (1 - share));
    } else {
        value = std::tanh(y), slope = 1 - value * value;
    }
}

// What a channel of `grouped` has in double: the proxy's mean and factor, and
// their derivatives in m and t of m + tξ
struct Proxied {
    double mean, factor, mean_by[2] = {}, factor_by[2] = {};
    // over `count` nodes
    Proxied(i64 kind, double a, double m, double t, const float* nodes,
            i64 count, bool scaled, double added) {
        double var = 0, var_by[2] = {};
        mean = 0;
        for (bool last : {false, true})
            for (i64 k = 0; k < count; k++) {
                double value, slope;
                active(kind, a, m + t * nodes[k], value, slope);
                if (!last) mean += value / (double)count;
                const double by[2] = {slope, slope * nodes[k]};
                for (int i = 0; last && i < 2; i++) {
                    mean_by[i] += by[i] / (double)count;
                    var_by[i] += 2 * by[i] * (value - mean) / (double)count;
                }
                if (last) var += (value - mean) * (value - mean);
            }
        factor = scaled ? 1 / std::sqrt(var / (double)count + added) : 1;
        for (int i = 0; scaled && i < 2; i++)
            factor_by[i] = -0.5 * factor * factor * factor * var_by[i];
    }
    Proxied(double mean_, double factor_) : mean(mean_), factor(factor_) {}
};

// Group norm, affine map, activation and proxy, against their definition in
// double, element by element; the proxy's statistics given, or by nodes
void grouped(i64 most) {
    const Floats& nodes = floats("proxy/nodes");
    const i64 samples = integer("proxy/samples");
    const i64 shapes[][4] = {{2, 6, 2, 35}, {3, 4, 4, 9}, {1, 4, 1, 4970},
                             {5, 24, 2, 1}, {4, 8, 2, 1024}};
    for (const auto& [images, channels, groups, length] : shapes)
        for (i64 kind = 0; kind < 5; kind++)
            for (int which = 0; which < 4; which++) {
                const bool scaled = which % 2 == 0, given = which < 2;
                const size_t n = (size_t)(images * channels * length),
                             c_ = (size_t)channels;
                Floats u(n), g(n), weight(c_), bias(c_), mean(c_), factor(c_),
                    shift(c_), scale(c_);
                uint64_t state = 5;
                auto draw = [&] {
                    state = state * 6364136223846793005u + 1442695040888963407u;
                    return (float)((double)(state >> 40) * 0x1p-23 - 1);
                };
                for (float& x : u) x = 3 * draw() + 20;
                for (float& x : g) x = draw();
                for (size_t c = 0; c < c_; c++)
                    weight[c] = 1 + draw(), bias[c] = draw(), mean[c] = draw(),
                    factor[c] = 1 + 0.5f * draw(), shift[c] = 0.3f * draw(),
                    scale[c] = 0.3f * draw();
                const double eps = 1e-5, a = kind ? 0 : 0.3, added = 0.03;
                std::vector<Proxied> proxied;
                for (size_t c = 0; c < c_; c++)
                    proxied.push_back(
                        given ? Proxied(mean[c], scaled ? factor[c] : 1.0)
                              : Proxied(kind, a,
                                        bias[c] + (double)weight[c] * shift[c],
                                        weight[c] * (1.0 + scale[c]),
                                        nodes.data(), samples, scaled, added));
                const i64 count = channels / groups, size = count * length;
                // of γ, β, β̃, γ̃, and of mean and factor
                std::vector<double> out(n), of_u(n), of[6];
                for (auto& sums : of) sums.assign(c_, 0.0);
                for (i64 i = 0; i < images * groups; i++) {
                    const float *v = u.data() + i * size,
                                *up = g.data() + i * size;
                    double m = 0, var = 0, by_one = 0, by_y = 0;
                    for (i64 j = 0; j < size; j++) m += v[j];
                    m /= (double)size;
                    for (i64 j = 0; j < size; j++)
                        var += (v[j] - m) * (v[j] - m);
                    const double rate = 1 / std::sqrt(var / (double)size + eps);
                    for (bool last : {false, true})
                        for (i64 j = 0; j < size; j++) {
                            const size_t c =
                                (size_t)(i % groups * count + j / length);
                            const double y = (v[j] - m) * rate,
                                         f = proxied[c].factor;
                            double value, slope;
                            active(kind, a, weight[c] * y + bias[c], value,
                                   slope);
                            const double w = up[j] * f * slope,
                                         of_y = w * weight[c];
                            if (last) {
                                of_u[(size_t)(i * size + j)] =
                                    rate * (of_y - by_one / (double)size
                                            - y * by_y / (double)size);
                                continue;
                            }
                            const double rest = value - proxied[c].mean;
                            out[(size_t)(i * size + j)] = rest * f;
                            by_one += of_y, by_y += of_y * y;
                            of[0][c] += w * y, of[1][c] += w;
                            of[4][c] -= up[j] * f, of[5][c] += up[j] * rest;
                        }
                }
                for (size_t c = 0; c < c_; c++) {
                    const Proxied& p = proxied[c];
                    const double of_m = of[4][c] * p.mean_by[0]
                                        + of[5][c] * p.factor_by[0],
                                 of_t = of[4][c] * p.mean_by[1]
                                        + of[5][c] * p.factor_by[1];
                    of[0][c] += of_m * shift[c] + of_t * (1 + scale[c]);
                    of[1][c] += of_m;
                    of[2][c] = of_m * weight[c], of[3][c] = of_t * weight[c];
                }
                const std::string here =
                    "grouped/" + std::to_string(length) + "/"
                    + std::to_string(kind) + (scaled ? "" : "/no factor")
                    + (given ? "" : "/by nodes");
                std::vector<Floats> first;
                for (i64 threads = 1; threads <= most; threads *= 2) {
                    std::vector<Floats> found = {Floats(n), Floats(n)};
                    for (int k = 0; k < 6; k++) found.emplace_back(c_);
                    Floats kept((size_t)(3 * images * groups + 6 * channels));
                    GroupedJob job{};
                    job.u = u.data(), job.out = found[0].data(),
                    job.weight = weight.data(), job.bias = bias.data(),
                    job.kept = kept.data(), job.images = images,
                    job.channels = channels, job.groups = groups,
                    job.length = length, job.kind = kind,
                    job.threads = threads, job.eps = eps, job.slope = a;
                    if (given) {
                        job.mean = mean.data();
                        job.factor = scaled ? factor.data() : nullptr;
                    } else {
                        job.shift = shift.data(), job.scale = scale.data(),
                        job.nodes = nodes.data(), job.count = samples,
                        job.divided = scaled, job.added = added;
                    }
                    done(normalnorm_grouped_forward(&job),
                         "normalnorm_grouped_forward");
                    job.grad = g.data(), job.out = found[1].data(),
                    job.of_weight = found[2].data(),
                    job.of_bias = found[3].data(),
                    job.of_shift = given ? nullptr : found[4].data(),
                    job.of_scale = given ? nullptr : found[5].data(),
                    job.of_mean = given ? found[6].data() : nullptr,
                    job.of_factor =
                        given && scaled ? found[7].data() : nullptr;
                    done(normalnorm_grouped_backward(&job),
                         "normalnorm_grouped_backward");
                    if (threads > 1) {
                        same_bits(here + ", " + std::to_string(threads)
                                      + " threads",
                                  found, first);
                        continue;
                    }
                    first = found;
                    compare(here + "/out", "grouped", found[0].data(),
                            out.data(), n);
                    compare(here + "/of u", "grouped", found[1].data(),
                            of_u.data(), n);
                    for (int k = 0; k < 6; k++)
                        if (given ? k < 2 || k == 4 || (k == 5 && scaled)
                                  : k < 4)
                            compare(here + "/of " + std::to_string(k),
                                    "grouped", found[(size_t)(2 + k)].data(),
                                    of[k].data(), c_);
                }
            }
}

// An address of 0, where one is needed, or 1, which stands for freed memory:
// refused, and nothing is written
void refused() {
    const Floats u(12, 1.0f), weight(3, 1.0f);
    Floats out(12, 7.0f), numbers((size_t)(3 * KEPT), 7.0f);
    float* const nowhere[] = {nullptr, (float*)1};
    auto job = [&] {
        Job made{};
        made.u = made.grad = u.data(), made.out = out.data(),
        made.weight = made.bias = weight.data();
        made.mean = numbers.data(), made.var = made.mean + 3,
        made.lmbda = made.var + 3, made.beside = made.lmbda + 3;
        made.units = made.weight_period = 3,
        made.period = made.segments = made.run = made.weights = 1,
        made.outer = made.length = 4, made.transform = 1, made.alpha = 1,
        made.threads = 1;
        return made;
    };
    auto with = [&](auto change, const char* function, int (*call)(const Job*),
                    bool given) {
        Job made = job();
        made.given = given;
        change(made);
        done(call(&made), function, 2);
    };
    for (float* p : nowhere) {
        for (bool given : {false, true}) {
            with([&](Job& j) { j.u = p; },
                 "normalnorm_forward without an input", normalnorm_forward,
                 given);
            with([&](Job& j) { j.out = p; },
                 "normalnorm_forward without an output", normalnorm_forward,
                 given);
            with([&](Job& j) { j.lmbda = p; },
                 "normalnorm_forward without lambda", normalnorm_forward,
                 given);
        }
        with([&](Job& j) { j.grad = p; },
             "normalnorm_backward without a gradient", normalnorm_backward,
             false);
        with([&](Job& j) { j.beside = p; },
             "normalnorm_backward without what forward kept",
             normalnorm_backward, false);
        with([&](Job& j) { j.grad = p; },
             "normalnorm_given_backward without a gradient",
             normalnorm_given_backward, true);
        with([&](Job& j) { j.var = p; },
             "normalnorm_given_backward without a variance",
             normalnorm_given_backward, true);
        done(normalnorm_normals(0, 12, 1, p),
             "normalnorm_normals without a place", 2);
        ProxyJob proxy{};
        proxy.weight = p, proxy.bias = proxy.nodes = u.data(),
        proxy.mean = proxy.var = out.data(), proxy.channels = proxy.count = 3,
        proxy.threads = 1;
        done(normalnorm_proxy_forward(&proxy),
             "normalnorm_proxy_forward without a weight", 2);
        proxy.weight = proxy.of_mean = proxy.of_var = u.data(),
        proxy.jacobian = p;
        done(normalnorm_proxy_backward(&proxy),
             "normalnorm_proxy_backward without a jacobian", 2);
        for (auto field : {&GroupedJob::u, &GroupedJob::weight,
                           &GroupedJob::bias, &GroupedJob::mean}) {
            GroupedJob groups{};
            groups.u = groups.grad = u.data(), groups.out = out.data(),
            groups.weight = groups.bias = groups.mean = weight.data(),
            groups.kept = numbers.data(),
            groups.images = groups.groups = groups.threads = 1,
            groups.channels = 3, groups.length = 4;
            groups.*field = p;
            done(normalnorm_grouped_forward(&groups),
                 "normalnorm_grouped_forward without what it reads", 2);
            done(normalnorm_grouped_backward(&groups),
                 "normalnorm_grouped_backward without what it reads", 2);
            groups.*field = u.data(), groups.kept = p;
            done(normalnorm_grouped_forward(&groups),
                 "normalnorm_grouped_forward without what it keeps", 2);
            done(normalnorm_grouped_backward(&groups),
                 "normalnorm_grouped_backward without what it kept", 2);
        }
    }
    for (const Floats* x : {&out, &numbers})
        for (float y : *x)
            if (y != 7) done(-1, "a refused call wrote something;");
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 2) stop("usage: driver recorded.bin [most threads]");
    const i64 most = count > 2 ? std::atoi(arguments[2]) : 4;
    read(arguments[1]);
    const int path = normalnorm_path();
    std::printf("kernel: vectors of %d numbers, %s, %s\n", path & 31,
                path & 32 ? "fused multiplication and addition"
                          : "no fused multiplication and addition",
                path & 64 ? "tables" : "no tables");
    const bool tables = path & 64;
    const std::pair<const char*, i64> cases[] = {
        {"batch", 60},  {"runs", 100},   {"layer", 100}, {"instance", 150},
        {"group", 100}, {"matrix", 260}, {"long", 6}};
    for (const auto& [name, times] : cases)
        for (const char* layout : {"contiguous", "channels last"})
            for (i64 copies : {(i64)1, times}) {
                if (!has(std::string(name) + "/traversal/" + layout)) continue;
                for (const char* kind : {"no noise", "noise", "dropout"})
                    whole(name, layout, kind, most, copies);
                // large ones are slow in an emulator
                std::vector<const char*> kinds = {"noise", "far out"};
                if (copies == 1)
                    kinds = {"noise", "no noise", "unscaled", "dropout",
                             "no transform"};
                for (const char* kind : kinds) {
                    halved(name, layout, kind, most, copies);
                    // units that can lie in several processes, and the two
                    // others with one run each
                    if (std::strcmp(name, "layer")
                        && std::strcmp(name, "group"))
                        stages(name, layout, kind, most, copies);
                }
            }
    for (const char* name : {"given", "given matrix", "far", "not finite"})
        for (const char* layout : {"contiguous", "channels last", "one image"})
            for (i64 times : {1, 60}) given(name, layout, times, most);
    ties();
    values(tables);
    normals();
    proxies(most);
    grouped(most);
    refused();
    for (const auto& [rule, w] : by_rule)
        std::printf(
            "%-18s %4d arrays, worst %.2g of the tolerance (error %.3g) in "
            "%s\n",
            rule.c_str(), w.arrays, w.share, w.error, w.name.c_str());
    std::printf(
        "%d arrays compared, by up to %d threads: %d wrong; worst %.2g of its "
        "tolerance in %s\n",
        arrays, (int)most, failures, worst, worst_name.c_str());
    return failures ? 1 : 0;
}
