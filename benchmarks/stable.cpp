// The least that a training step of a batch norm of rows needs, without a
// transform and without noise, as operators by PyTorch's stable interface.
#include <cmath>
#include <tuple>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

namespace {

float* values(const Tensor& x) { return static_cast<float*>(x.data_ptr()); }

std::tuple<Tensor, Tensor> forward(Tensor u, Tensor weight, Tensor bias,
                                   Tensor means, Tensor vars, Tensor seed,
                                   double momentum, double eps) {
    const int64_t n = u.size(0), c = u.size(1);
    const float part = 1.0f / n;
    Tensor out = torch::stable::empty_like(u),
           kept = torch::stable::new_empty(u, {2 * c});
    const float *x = values(u), *w = values(weight), *b = values(bias);
    float *y = values(out), *m = values(kept), *s = m + c;
    float *running = values(means), *variances = values(vars);
    for (int64_t j = 0; j < c; j++) m[j] = s[j] = 0;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < c; j++) m[j] += x[i * c + j] * part;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < c; j++) {
            const float d = x[i * c + j] - m[j];
            s[j] += d * d * part;
        }
    for (int64_t j = 0; j < c; j++) {
        running[j] += momentum * (m[j] - running[j]);
        variances[j] += momentum * (s[j] * n / (n - 1) - variances[j]);
        s[j] = 1 / std::sqrt(s[j] + static_cast<float>(eps));
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < c; j++)
            y[i * c + j] = (x[i * c + j] - m[j]) * s[j] * w[j] + b[j];
    return {out, kept};
}

std::tuple<Tensor, Tensor, Tensor>
backward(Tensor grad, Tensor u, Tensor weight, Tensor kept, Tensor seed) {
    const int64_t n = u.size(0), c = u.size(1);
    const float part = 1.0f / n;
    Tensor found = torch::stable::empty_like(u),
           of_weight = torch::stable::new_empty(u, {c}),
           of_bias = torch::stable::new_empty(u, {c});
    const float *g = values(grad), *x = values(u), *w = values(weight);
    const float *m = values(kept), *s = m + c;
    float *d = values(found), *dw = values(of_weight), *db = values(of_bias);
    for (int64_t j = 0; j < c; j++) dw[j] = db[j] = 0;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < c; j++) {
            db[j] += g[i * c + j];
            dw[j] += g[i * c + j] * (x[i * c + j] - m[j]) * s[j];
        }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < c; j++) {
            const float h = (x[i * c + j] - m[j]) * s[j];
            d[i * c + j] =
                w[j] * s[j] * (g[i * c + j] - (db[j] + h * dw[j]) * part);
        }
    return {found, of_weight, of_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY(stable_norm, m) {
    m.def(
        "forward(Tensor u, Tensor weight, Tensor bias, Tensor(a!) mean, "
        "Tensor(b!) var, Tensor seed, float momentum, float eps) -> "
        "(Tensor, Tensor)");
    m.def(
        "backward(Tensor grad, Tensor u, Tensor weight, Tensor kept, Tensor "
        "seed) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(stable_norm, CPU, m) {
    m.impl("forward", TORCH_BOX(&forward));
    m.impl("backward", TORCH_BOX(&backward));
}
