// Runs the kernel (normalnorm/layers/engines/native.cpp, linked to this) on
// recorded inputs and compares with recorded outputs; see record.py. Needs
// neither Python nor PyTorch, so that it runs under an emulator and under
// sanitizers.
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
#include <string>
#include <vector>

typedef int64_t i64;
typedef std::vector<float> Floats;

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
// 0: done, 1: no memory, 2: an address that is null or of freed memory
extern "C" {
int normalnorm_path();
int normalnorm_kept();
int normalnorm_forward(const Job*);
int normalnorm_backward(const Job*);
int normalnorm_given_backward(const Job*);
int normalnorm_normals(uint64_t start, i64 count, uint64_t key, float* z);
int normalnorm_proxy_forward(const ProxyJob*);
int normalnorm_proxy_backward(const ProxyJob*);
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
               const std::vector<Floats>& first) {
    arrays++;
    for (size_t k = 0; k < found.size(); k++) {
        if (found[k].size() == first[k].size()
            && (found[k].empty()
                || !std::memcmp(found[k].data(), first[k].data(),
                                4 * found[k].size())))
            continue;
        failures++;
        std::printf("WRONG %s: result %zu depends on the number of threads\n",
                    name.c_str(), k);
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

// ---- what is compared ----

const i64 KEPT = normalnorm_kept();     // numbers of a unit

// Output, statistics and gradients of units with statistics of their own, by 1
// … `most` threads. `times`: as many copies of the tensor, one after the other,
// so that there is work for several threads. They are more units, or longer
// ones with the same statistics; only their noise is another.
void whole(const std::string& name, const std::string& layout,
           const std::string& kind, i64 most, i64 times) {
    std::vector<i64> plan = at(name + "/plan/" + layout).q;
    const i64 images = plan.at(11) * times, channels = plan[12],
              length = plan[13];
    enum { UNITS, PERIOD, OUTER, INNER, SEGMENTS, LENGTH, STRIDE, COLUMNS };
    const bool longer = plan[COLUMNS] || plan[SEGMENTS] > 1;
    const i64 units = plan[UNITS];
    plan[plan[COLUMNS] ? LENGTH : longer ? SEGMENTS : UNITS] *= times;
    if (plan[PERIOD] == units) plan[PERIOD] = plan[UNITS];
    const size_t size = floats(name + "/u").size();
    const bool known = times == 1 || kind == "no noise";
    auto last_copy = [&](const Floats& x) {
        return Floats(x.end() - (long)size, x.end());
    };
    auto laid = [&](const Floats& x) {
        return images
                   ? channels_last(repeated(x, times), images, channels, length)
                   : repeated(x, times);
    };
    auto back = [&](const Floats& x) {
        return images ? channels_last(x, images, channels, length, true) : x;
    };
    const bool affine = has(name + "/weight");
    const Floats u = laid(floats(name + "/u")),
                 grad = laid(floats(name + "/grad"));
    const Floats weight = affine ? floats(name + "/weight") : Floats(),
                 bias = affine ? floats(name + "/bias") : Floats();
    std::vector<Floats> first;
    for (i64 threads = 1; threads <= most; threads *= 2) {
        Job job{};
        std::memcpy(&job.units, plan.data(), 11 * sizeof(i64));
        const i64 rows = job.weights < 0 ? 1 : job.units / job.weight_period;
        Floats out(u.size()), of_u(u.size()),
            numbers((size_t)(job.units * KEPT)),
            of_weight(weight.size() * (size_t)rows),
            of_bias(bias.size() * (size_t)rows);
        Floats running[3] = {Floats((size_t)job.units, 0.0f),
                             Floats((size_t)job.units, 1.0f),
                             Floats((size_t)job.units, 1.0f)};
        job.u = u.data(), job.out = out.data(), job.weight = data(weight),
        job.bias = data(bias);
        job.mean = numbers.data(), job.var = job.mean + job.units,
        job.lmbda = job.var + job.units, job.beside = job.lmbda + job.units;
        job.running_mean = running[0].data(),
        job.running_var = running[1].data(),
        job.running_lambda = running[2].data(), job.momentum = 0.25;
        job.transform = 1, job.eps = 1e-5, job.alpha = 1, job.threads = threads;
        job.kind = kind == "noise"     ? 1
                   : kind == "dropout" ? 3
                                       : 0,
        job.noise = kind == "noise"     ? 0.4
                    : kind == "dropout" ? 0.3
                                        : 0;
        job.seed = (uint64_t)at("noise").q[0],
        job.offset = (uint64_t)at("noise").q[1];
        done(normalnorm_forward(&job), "normalnorm_forward");
        Job later = job;
        later.out = of_u.data(), later.grad = grad.data(), later.bias = nullptr,
        later.weight_grad = data(of_weight), later.bias_grad = data(of_bias);
        later.running_mean = later.running_var = later.running_lambda = nullptr;
        done(normalnorm_backward(&later), "normalnorm_backward");
        const std::vector<Floats> found = {out,        numbers,   of_u,
                                           of_weight,  of_bias,   running[0],
                                           running[1], running[2]};
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
        compare(here + "/out", "train", every(last_copy(back(out)), step),
                floats(expected + "/out"));
        compare(here + "/of u", "train", every(last_copy(back(of_u)), step),
                floats(expected + "/of u"));
        const float n = (float)(job.segments * job.length);
        for (int k = 0; k < 3; k++) {
            const char* names[] = {"mean", "var", "lmbda"};
            const Floats exact =
                repeated(floats(name + "/" + names[k]), longer ? 1 : times);
            compare(here + "/" + names[k], "train",
                    Floats(numbers.begin() + k * job.units,
                           numbers.begin() + (k + 1) * job.units),
                    exact);
            Floats average;
            for (float x : exact)
                average.push_back((k ? 0.75f : 0)
                                  + 0.25f * (k == 1 ? x * (n / (n - 1)) : x));
            compare(here + "/running " + names[k], "train", running[k],
                    average);
        }
        // the sets of units that share their weights
        for (int k = 0; affine && k < 2; k++) {
            const Floats& parts = k ? of_bias : of_weight;
            const size_t count = parts.size() / (size_t)rows;
            Floats sum;
            for (size_t i = 0; i < count; i++) {
                double s = 0;
                for (i64 row = 0; row < rows; row++)
                    s += parts[(size_t)row * count + i];
                sum.push_back((float)(s / (double)times));
            }
            compare(here + (k ? "/of bias" : "/of weight"), "train", sum,
                    floats(expected + (k ? "/of bias" : "/of weight")));
        }
    }
}

// Output and gradients for given statistics. `times`: as many copies of the
// images, of which the sums are as many times as large
void given(const std::string& name, bool last, i64 times, i64 most) {
    const std::vector<i64>& shape = at(name + "/shape").q;
    const i64 images = shape.at(0) * times, channels = shape[1],
              length = shape[2];
    const bool far = name == "far", backward = has(name + "/of u");
    auto laid = [&](const Floats& x) {
        return last
                   ? channels_last(repeated(x, times), images, channels, length)
                   : repeated(x, times);
    };
    const Floats u = laid(floats(name + "/u")),
                 grad = laid(floats(name + "/grad")),
                 out_expected = laid(floats(name + "/out"));
    Floats mean = floats(name + "/mean"), var = floats(name + "/var"),
           lmbda = floats(name + "/lmbda");
    const Floats &weight = floats(name + "/weight"),
                 &bias = floats(name + "/bias");
    std::vector<Floats> first;
    for (i64 threads = 1; threads <= most; threads *= 2) {
        Floats out(u.size()), of_u(u.size()), of_weight((size_t)channels),
            of_bias((size_t)channels);
        Job job{};
        job.u = u.data(), job.out = out.data(), job.weight = weight.data(),
        job.bias = bias.data(), job.mean = mean.data(), job.var = var.data(),
        job.lmbda = lmbda.data();
        job.units = images * (last ? length : channels),
        job.length = last ? 1 : length, job.columns = last ? channels : 0,
        job.weight_period = channels;
        job.period = job.segments = job.run = 1, job.given = job.transform = 1,
        job.eps = at(name + "/eps").d[0], job.alpha = 1, job.threads = threads;
        done(normalnorm_forward(&job), "normalnorm_forward");
        if (backward) {
            job.grad = grad.data(), job.out = of_u.data(), job.bias = nullptr,
            job.weight_grad = of_weight.data(), job.bias_grad = of_bias.data();
            done(normalnorm_given_backward(&job), "normalnorm_given_backward");
        }
        const std::vector<Floats> found = {out, of_u, of_weight, of_bias};
        const std::string here =
            name + (last ? "/channels last" : "/contiguous")
            + (times > 1 ? "/" + std::to_string(times) + " times" : "");
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
            for (const char* kind : {"no noise", "noise", "dropout"})
                for (i64 copies : {(i64)1, times})
                    if (has(std::string(name) + "/plan/" + layout))
                        whole(name, layout, kind, most, copies);
    for (const char* name : {"given", "given matrix", "far", "not finite"})
        for (bool last : {false, true})
            for (i64 times : {1, 60}) given(name, last, times, most);
    values(tables);
    normals();
    proxies(most);
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
