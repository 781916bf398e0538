"""The interactive figures: self-contained, the same bytes at each build, and
what a browser shows is what torch and scipy compute.
"""

import json
import os
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import scipy.stats
import torch

from normalnorm import plots
from normalnorm.analysis.attenuation import expected_attenuation
from normalnorm.analysis.gaussianity import qq_r2
from normalnorm.analysis.robustness import fgsm, robust_accuracy
from normalnorm.analysis.stream import derf, layer_norm, stream
from normalnorm.claims import ledger
from normalnorm.experiments import data
from normalnorm.experiments.statistics import detection_power
from normalnorm.layers.core import normality_norm
from normalnorm.layers.proxy import proxy_statistics
from normalnorm.theory.correlation_map import correlation_map, slope
from normalnorm.theory.information import (
    bimodal,
    mixture,
    mutual_information,
    normal,
)
from normalnorm.theory.newton import newton_lambda
from normalnorm.theory.power_transform import (
    yeo_johnson,
    yeo_johnson_nll,
)
from normalnorm.theory.scale_invariance import (
    equilibrium_angle,
    equilibrium_norm,
)
from normalnorm.theory.whitening import whitening_matrix
from tests.book.test_figures import outputs
from tools import run
from tools.browser import chromium, expression, visit
from tools.chapters import chapter
from tools.files import load, python, save

SCRIPTS = Path(__file__).parents[1] / "browser"
browser = pytest.mark.skipif(
    not chromium(),
    reason="no Chromium found: what the interactive "
    "figures show is not checked",
)
# the chapters that have a figure to drag
DRAGGED = (
    "010_in_ten_minutes",
    "011_proxy_norm_in_five_minutes",
    "012_centring_in_five_minutes",
    "013_one_map_in_five_minutes",
    "020_how_to_read",
    "112_theory.game",
    "140_analysis.gaussianity",
    "210_theory.power_transform",
    "220_theory.newton",
    "228_layers.noise",
    "246_epsilon_in_practice",
    "250_theory.whitening",
    "262_theory.lambert",
    "320_theory.geometry",
    "330_normalizers_at_a_glance",
    "350_theory.correlation_map",
    "354_analysis.stream",
    "365_scale_in_training",
    "410_layers.proxy",
    "502_analysis.attenuation",
    "504_analysis.robustness",
    "510_experiments.recipes.first",
    "720_plots",
    "755_experiments.statistics",
)


def fragments(name):
    "The widgets in the executed chapter."
    shown = outputs(run.ensure(chapter(name)), "text/html")
    found = [text for text in shown if 'class="live"' in text]
    assert found
    return found


def fragment(name="210_theory.power_transform"):
    (found,) = fragments(name)
    return found


def page_of(body, folder, name, script, *arguments):
    """The address of a page with this body, whose `report` is what the function
    of `browser/SCRIPT.js` returns.
    """
    call = expression(SCRIPTS / f"{script}.js")
    report = (
        "<script>function report() { return "
        f"({call})(...{json.dumps(arguments)}); }}"
        "const before = Object.keys(window);</script>"
    )
    page = folder / f"{name}.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><body>{report}{body}",
        encoding="utf-8",
    )
    return page.as_uri()


def reports(addresses):
    "Of each page, by one browser."
    seen = visit(addresses, "ask", "w => w.report()", (1280,))
    return [seen[address] for address in addresses]


def answers(first, *others):
    "No script may fail; the first page says nothing on the console."
    assert first["problems"] == []
    for report in others:  # of a wrong formula: of numbers that are none
        assert not any("Uncaught" in p for p in report["problems"])
    return [report["answer"] for report in (first, *others)]


def open_pages(bodies, script, folder, *arguments):
    "What the function returns on a page with each of these bodies."
    addresses = [
        page_of(body, folder, f"page{i}", script, *arguments)
        for i, body in enumerate(bodies)
    ]
    return answers(*reports(addresses))


def drag(texts, steps, folder):
    """What each figure shows after each step, sliders by name or the selector
    of a button: outputs by name, sliders, the paths of each panel.
    """
    return open_pages(texts, "drag", folder, steps)


def numbers(text):
    return [
        float(n) for n in re.findall(r"[-−]?\d+\.\d+", text.replace("−", "-"))
    ]


def points(d, left, right, low, high):
    "Those of an SVG path, as two rows, between the ends of its panel's axes."
    pairs = d.lstrip("M").replace("h0", "").replace("M", "L").split("L")
    x, y = np.array([pair.split() for pair in pairs], float).T
    return np.stack(
        [left + (right - left) * x / 258, high - (high - low) * y / 150]
    )


def test_chapters_figures_hold_no_address_and_no_random_id():
    for text in (text for name in DRAGGED for text in fragments(name)):
        assert not re.search(
            r"https?:|@import|\b(?:src|srcset)=|fetch\(|"
            r"XMLHttpRequest|import\(",
            text,
        )
        assert set(re.findall(r"\bid=\"(\w+?)-", text)) <= {
            re.search(r'class="(w[0-9a-f]{10})"', text)[1]
        }
        assert (
            plots.INK not in text
            and "@media print" in text
            and re.search(
                r'<svg [^>]*role="img" aria-label="[^"]{20,}"',
                text.split('class="still"')[1],
            )
        )


def test_two_processes_write_the_same_bytes():
    program = """
import matplotlib
matplotlib.use("agg")
from normalnorm import plots
fig, ax = plots.subplots()
plots.qq_plot(ax, range(50))
print(plots.widget("<p>x</p>", "root.title = data.a", {"a": 1.5, "b": [1, "λ"]},
                   fig).data)"""
    first, second = (
        python(
            *("-c", program),
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONUTF8": "1"},
        ).stdout
        for seed in "12"
    )
    assert first == second and '<div class="w' in first


@pytest.mark.parametrize(
    "markup, script, numbers",
    [
        ("<img src='//example.org/x.png'>", "", {}),
        ("", "fetch('https://example.org')", {}),
        ("", "", {"a": "http://example.org"}),
        ("", "x = '</script>'", {}),
        ("", "x = '<!--'", {}),
        ("", "", {"a": float("nan")}),
    ],
)
def test_what_is_not_self_contained_is_refused(markup, script, numbers):
    fig, _ = plt.subplots()
    with pytest.raises(ValueError):
        plots.widget(markup, script, numbers, fig)
    plt.close(fig)


def test_data_cannot_close_the_script():
    fig, _ = plt.subplots()
    assert (
        "</script><b>"
        not in plots.widget("", "", {"a": "</script><b>"}, fig).data
    )
    assert not plt.fignum_exists(fig.number)


@browser
def test_copies_on_a_page_do_not_meet_and_leave_no_global_name(tmp_path):
    text = fragment() + fragment() + fragment("720_plots")
    (answer,) = open_pages([text], "copies", tmp_path)
    assert answer == {"copies": 3, "first": "0.50", "same": True, "added": []}


@browser
def test_without_a_script_the_still_figure_is_shown_and_nothing_scrolls(
    tmp_path,
):
    narrow = lambda text: f"<div style='width:348px'>{text}</div>"
    bare = re.sub(r"<script>.*?</script>", "", fragment(), flags=re.S)
    printed = fragment().replace("@media print", "@media screen")
    texts = fragment() + fragment("720_plots"), bare, printed
    still = {"live": False, "still": True, "size": True, "fits": True}
    assert open_pages(map(narrow, texts), "still", tmp_path) == [
        {"live": True, "still": False, "size": False, "fits": True},
        still,
        still,
    ]


@browser
def test_slider_and_buttons_are_labelled_and_reached_by_keyboard(tmp_path):
    (answer,) = open_pages([fragment()], "keyboard", tmp_path)
    likely = scipy.stats.yeojohnson_normmax(sample().numpy())
    assert answer == {
        "label": "λ",
        "type": "range",
        "buttons": ["λ = 1: unchanged", f"most likely: λ̂ = {likely:.3f}"],
        "focus": True,
        "named": True,
    }


@browser
def test_a_table_is_searched_chosen_from_and_sorted(tmp_path):
    "Numbers before words; a heading goes with the last of its lines."
    rows = [
        "first",
        ["<b>b</b>", ("10 m", 10), ("x", "u")],
        ["a", ("9 m", 9), "✗"],
        "second",
        ["c", "none", "v"],
    ]
    heads, only = ["name", "length", "kind"], ("marked", "✗")
    table = plots.sortable(heads, rows, choices=["kind"], only=only)
    assert open_pages([table.data], "table", tmp_path) == [
        [
            "first b a second c",
            "first b: 1 of 3",
            "second c: 1 of 3",
            "first a: 1 of 3",
            "a b c",
            "c b a",
        ]
    ]
    fig, _ = plt.subplots()
    drawn = plots.sortable(heads, rows, fallback=fig).data
    assert 'class="still"' in drawn and 'class="still"' not in table.data


# ---- what each figure shows against the library and scipy -------------------

FIGURES = {}


def figure(chapter, sliders, cases, wrong, number=0, button=None):
    """The function below it accepts what a figure shows: what is on the page,
    its numbers under "data", then the values of its `sliders`, in each of the
    `cases`. With a `button`, what a click on it shows is under "answer". It
    refuses what the figure shows by each `wrong` formula: a pair of what its
    script says, once, and what stands instead.
    """

    def register(accepts):
        names = sliders.split() or [""]

        steps = []
        for case in cases:
            steps.append(dict(zip(names, case, strict=True)))
            steps += [button] * bool(button)

        def texts():
            text = fragments(chapter)[number]
            return [text, *(text.replace(*pair) for pair in wrong)]

        def check(text, by_formula, *by_others):
            known = re.search(r"const data = (\{.*?\});", text)

            def accept(shown):
                pages = iter(shown)
                for case in cases:
                    page = next(pages)
                    page["data"] = json.loads(known[1]) if known else {}
                    page["answer"] = next(pages) if button else None
                    accepts(page, *case)

            for right, _ in wrong:
                assert text.count(right) == 1, right
            accept(by_formula)
            for shown in by_others:
                with pytest.raises((AssertionError, IndexError)):
                    accept(shown)

        FIGURES[accepts.__name__] = texts, steps, check
        return accepts

    return register


def close(page, width, **expected):
    "The first number of each of these outputs is what is expected."
    for name, value in expected.items():
        assert abs(numbers(page[name])[0] - value) <= width, (
            name,
            page[name],
            value,
        )


def sample():
    "The sample of the chapter, from the data and not from the page."
    images, labels = data.load("fashion", "train")
    ink = images.double().mean((1, 2, 3))
    x = ink[labels == data.info("fashion").classes.index("trouser")]
    return ((x - x.mean()) / x.std(correction=0)).sort().values


FORMULA = "s * (eta === 0 ? ell : Math.expm1(eta * ell) / eta)"


@figure(
    "210_theory.power_transform",
    "",
    [(v,) for v in (-1.0, -0.35, 0.0, 0.01, 0.58, 1.0, 1.5, 1.99, 2.0)],
    [
        (FORMULA, FORMULA.replace(right, other))
        for right, other in (
            ("s * (eta", "(eta"),
            ("eta * ell", "lmbda * ell"),
            ("? ell", "? 1"),
            ("expm1", "exp"),
        )
    ],
    button="button[data-to=best]",
)
def bent(page, lmbda):
    """Likelihood, straightness, ends and panels, to the digits shown: half a
    unit, and a tenth for the five digits that the page holds.
    """
    h = sample()
    x = scipy.stats.yeojohnson(h.numpy(), lmbda)
    z = scipy.stats.zscore(x)
    close(page, 6e-4, lmbda=lmbda)
    close(
        page,
        6e-5,
        nll=yeo_johnson_nll(h, lmbda).item(),
        r2=qq_r2(torch.tensor(x)).item(),
    )
    for name, i in (("low", 0), ("high", -1)):
        before, after = numbers(page[name])
        assert abs(before - h[i]) <= 6e-3 and abs(after - x[i]) <= 6e-4
    best = scipy.stats.yeojohnson_normmax(h.numpy())
    close(page["answer"], 6e-4, lmbda=best)
    close(page["answer"], 6e-5, nll=yeo_johnson_nll(h, best).item())
    np.testing.assert_allclose(
        points(page["paths"]["density"][0], -4, 4, 0, 0.62)[1, 1:-1:2],
        np.histogram(z, np.linspace(-4, 4, 33))[0] / len(z) / 0.25,
        atol=5e-4,
    )
    drawn = points(page["paths"]["qq"][0], -3.2, 3.2, -4.5, 6.2)
    line = scipy.stats.probplot(z)[0][0]
    np.testing.assert_allclose(drawn, [line, z], atol=5e-3)
    assert page["nll"] in page["text"] and page["drawn"] > 5000


def quantiles(n):
    "Those of the normal law, as the pages hold them."
    return scipy.stats.norm.ppf((np.arange(n) + 0.5) / n).round(5)


@figure(
    "010_in_ten_minutes",
    "amount noise",
    [(-1, 0), (-0.3, 0), (0, 0.4), (0.6, 0), (0.6, 0.4), (1, 1)],
    [("1 - first / second", "1 + first / second")],
)
def tour(page, amount, noise):
    "Estimate and skewness."
    h = scipy.stats.zscore(np.sinh(np.arcsinh(quantiles(400)) + amount))
    lmbda = newton_lambda(torch.tensor(h), -1).item()
    x = scipy.stats.yeojohnson(h, lmbda)
    close(page, 6e-4, lmbda=lmbda)
    close(page, 6e-3, before=scipy.stats.skew(h), after=scipy.stats.skew(x))
    assert page["lmbda"] in page["text"]


@browser
def test_noise_is_seen_in_the_tour(tmp_path):
    steps = [{"amount": 0.6, "noise": noise} for noise in (0, 0.4)]
    text = fragment("010_in_ten_minutes")
    ((calm, noisy),) = drag([text], steps, tmp_path)
    assert calm["paths"]["after"] != noisy["paths"]["after"]


def walked(c, layers, *norm, **deviations):
    "A correlation after some layers with ReLU, by the library's map."
    for _ in range(layers):
        c = correlation_map(c, "relu", *norm, **deviations)
    return c


@figure(
    "011_proxy_norm_in_five_minutes",
    "beta start depth",
    [(0.2, 0.2, 30), (0, 0.2, 12), (0.5, 0, 3), (0.3, 0.9, 1), (0.1, 0.6, 5)],
    [
        ("kappa(Math.min(1, (c + square) / (1 + square)))", "kappa(c)"),
        ("sum * c + v, 0) +", "sum * c * c + v, 0) +"),
        ("beta * beta, p", "beta, p"),
    ],
)
def shared(page, beta, start, depth):
    "What images share in the end, with layer norm and with a proxy."
    for name in ("layer", "proxy"):
        expected = walked(start, depth, name, beta_std=beta)
        close(page, 6e-3, **{name: expected})
    grey, layer, proxy = page["paths"]["shared"]
    for drawn, end in ((layer, "layer"), (proxy, "proxy")):
        at, values = points(drawn, 0, 50, 0, 1.02)
        np.testing.assert_allclose(at, range(depth + 1), atol=0.02)
        assert abs(values[0] - start) < 0.01
        assert abs(values[-1] - float(page[end])) < 0.01
    kept = (1 - start) / (1 + beta**2) ** depth
    assert abs(points(grey, 0, 50, 0, 1.02)[1, -1] - (1 - kept)) < 0.01


@figure(
    "012_centring_in_five_minutes",
    "share rest",
    [(0.32, 0), (0, 0.5), (0.9, -0.9), (0.5, 0.9), (0.2, -0.5)],
    [
        ('name === "layer" ? Math.sqrt(share)', 'name === "layer" ? share'),
        ("Math.sqrt(1 - rest * rest)", "(1 - rest)"),
        ("Math.PI - Math.acos(c)", "Math.acos(c)"),
    ],
)
def centring(page, share, rest):
    "Cosines before and behind the weights; the dots have them, too."
    before = share + (1 - share) * rest
    close(page, 6e-3, before=before, layer=before, pre=rest)
    for name, c in (("layer", before), ("pre", rest)):
        after = correlation_map(c, "relu", "layer")
        close(page, 6e-3, **{f"{name}relu": after})
        x, y = points(page["dots"][name][0], -3.5, 3.5, -3.5, 3.5)
        assert len(x) == 200 and abs(np.corrcoef(x, y)[0, 1] - c) < 6e-3


@figure(
    "013_one_map_in_five_minutes",
    "start beta",
    [(0.6, 0.2), (0, 0), (0.95, 0.8), (0.3, 0.7), (0.9, 0)],
    [
        ("(c + power - 1) / power", "c / power"),
        ("(layer(c) - common) / (1 - common)", "layer(c) - common"),
        ("? 1 - common : 1", "? 1 + common : 1"),
    ],
)
def one_map(page, start, beta):
    "Where twenty steps end, the slopes at 1, and the curves."
    for name, norm in (("layer", "layer"), ("pre", "pre-layer")):
        end = walked(start, 20, norm, beta_std=beta)
        steep = slope("relu", norm, beta_std=beta)
        close(page, 6e-4, **{name: end})
        close(page, 6e-3, **{f"{name}slope": steep})
        _, steps, curve = page["paths"][name]
        assert points(steps, 0, 1, 0, 1).shape == (2, 41)
        c, drawn = points(curve, 0, 1, 0, 1)
        grid = torch.linspace(0, 1, 101, dtype=torch.float64)
        expected = correlation_map(grid, "relu", norm, beta_std=beta)
        np.testing.assert_allclose(c, grid, atol=1e-3)
        np.testing.assert_allclose(drawn, expected, atol=1e-3)


@figure(
    "220_theory.newton",
    "amount far",
    [(-1, 0), (0.5, 0), (0, 3), (0, 40), (1, 12)],
    [("- hd ** 2)", "+ hd ** 2)")],
)
def newtons_step(page, amount, far):
    "Estimate, MLE and likelihoods."
    u = np.sinh(np.arcsinh(quantiles(200)) + amount)
    u[:13] -= far
    u[-1] += 0.6 * far
    h = torch.tensor(scipy.stats.zscore(u))
    estimate = newton_lambda(h, -1).item()
    mle = scipy.stats.yeojohnson_normmax(h.numpy())
    close(page, 6e-4, newton=estimate)
    close(page, 1e-3, mle=mle)
    for found, lmbda in zip(numbers(page["nll"]), (1.0, estimate, mle)):
        assert abs(found - yeo_johnson_nll(h, lmbda).item()) <= 6e-4


def by_derivatives(h):
    """Algorithm 1's step, by differentiating the transform: the likelihood's
    derivatives at 1 for a variance that is taken to be 1.
    """
    h = torch.tensor(h)
    lmbda = torch.ones((), dtype=torch.float64, requires_grad=True)
    spread = yeo_johnson(h, lmbda).var(correction=0)
    (first,) = torch.autograd.grad(spread, lmbda, create_graph=True)
    (second,) = torch.autograd.grad(first, lmbda)
    slope = first / 2 - (h.sign() * h.abs().log1p()).mean()
    return (1 - slope / (second / 2 - first.square() / 2)).item()


@figure(
    "246_epsilon_in_practice",
    "size amount",
    [
        (0.5, 0.6),
        (0, -1),
        (-2.5, 0.6),
        (-2.5, 0),
        (-3.3, 0.6),
        (-3.5, -0.4),
        (-4, 0.3),
        (-4, 1),
    ],
    [
        ("sigma ** 2 + data.eps", "sigma ** 2"),
        ("- hd ** 2)", "+ hd ** 2)"),
        ("psi(v, wild)", "psi(v, calm)"),
    ],
)
def epsilon(page, size, amount):
    "Both estimates and the skewness that they leave."
    k = scipy.stats.zscore(np.sinh(np.arcsinh(quantiles(200)) + amount))
    x, statistics = normality_norm(torch.tensor(10.0**size * k), (0,))
    h = 10.0**size * k / np.sqrt(10.0 ** (2 * size) + 1e-5)
    printed = by_derivatives(h)
    bent = yeo_johnson(torch.tensor(h), printed)
    close(page, 6e-4, rho=h.std())
    close(
        page,
        6e-3,
        before=scipy.stats.skew(k),
        ours=statistics.lmbda.item(),
        kept=scipy.stats.skew(x),
        bent=scipy.stats.skew(bent),
    )
    close(page, 6e-3 + 1e-5 * abs(printed), printed=printed)
    for d, name in zip(page["paths"]["trap"][-2:], ("printed", "ours")):
        ((at,), (value,)) = points(d, -4, 0.5, -8, 10)
        assert abs(at - size) < 2e-3
        assert abs(value - numbers(page[name])[0]) < 0.02


@figure(
    "410_layers.proxy",
    "shift stretch",
    [(0, 0), (-0.45, -0.15), (1, -0.6), (-1.5, 1), (0.7, 0.5)],
    [
        ("shift + deviation * t", "shift - deviation * t * t"),
        ("data.bias, 0)", "data.bias, -0.2)"),
        (
            "(v - center) / Math.sqrt(square + data.eps)",
            "(v - center) / Math.sqrt(square)",
        ),
        ("deviation = 1 + stretch", "deviation = stretch"),
    ],
)
def proxy(page, shift, stretch):
    """The proxy's statistics against the library's, by quantiles and in closed
    form; the channel's, and what is left of it, against numpy.
    """
    held = page["data"]
    given = [
        torch.tensor([v], dtype=torch.float64)
        for v in (held["weight"], held["bias"], shift, stretch)
    ]
    channel = np.maximum(
        held["weight"] * np.array(held["values"]) + held["bias"], 0
    )
    mean, var = (v.item() for v in proxy_statistics(*given, samples=200))
    exact = proxy_statistics(*given, samples=None)
    assert abs(var / exact[1].item() - 1) < 0.03
    z = (channel - mean) / np.sqrt(var + 0.03)
    close(
        page,
        2e-3,
        mean=mean,
        variance=var,
        truemean=channel.mean(),
        truevariance=channel.var(),
        left=z.mean(),
        spread=z.var(),
    )
    x, y = points(page["paths"]["before"][-1], -4, 4, 0, 0.85)
    np.testing.assert_allclose(
        y,
        scipy.stats.norm.pdf(x, shift, 1 + stretch),
        atol=4e-3 / (1 + stretch) ** 2,
    )
    # the share of zeros, where the proxy's curve leaves 0
    left, height = points(page["paths"]["after"][1], 0, 258, 0, 1.05)
    at_zero = height[np.isclose(left, 36.9, atol=0.06)]
    share = scipy.stats.norm.cdf(
        -held["bias"] / held["weight"], shift, 1 + stretch
    )
    assert abs(at_zero.max() - share) < 0.01


@figure(
    "410_layers.proxy",
    "m s n",
    [(0.3, 1, 10), (0.3, 1, 200), (-1, 0.5, 2), (2, 2, 6), (-0.4, 1.5, 400)],
    [
        ("(i + 0.5) / n)", "(i + 1) / (n + 1))"),
        ("+ m * s * density", "- m * s * density"),
        ("x * x / (2 * k + 1)", "x * x / (2 * k)"),
        ("Math.max(m + s * t, 0)", "Math.abs(m + s * t)"),
    ],
    number=1,
)
def rule_of_quantiles(page, m, s, n):
    """Mean and variance by the rule and exactly, and the error for each n; the
    nodes.
    """
    channel = [torch.tensor([v], dtype=torch.float64) for v in (s, m, 0, 0)]
    exact, *rules = (
        [v.item() for v in proxy_statistics(*channel, samples=k)]
        for k in (None, n, *page["data"]["sizes"])
    )
    off = [100 * (var / exact[1] - 1) for _, var in rules]
    nodes = scipy.stats.norm.ppf((np.arange(n) + 0.5) / n)
    close(
        page,
        6e-5,
        mean=rules[0][0],
        variance=rules[0][1],
        truemean=exact[0],
        truevariance=exact[1],
    )
    close(page, 6e-3, off=off[0])
    close(page, 6e-4, last=nodes[-1])
    assert page["n"] == str(n)
    drawn = points(page["paths"]["nodes"][-1], -6, 6, 0, 1)[0]
    np.testing.assert_allclose(drawn, m + s * nodes, atol=3e-3)
    _, curve, dot = (points(d, 0.3, 3, -40, 10) for d in page["paths"]["error"])
    np.testing.assert_allclose(curve[1], off[1:], atol=0.02)
    np.testing.assert_allclose(dot[:, 0], [np.log10(n), off[0]], atol=0.02)


@browser
def test_the_mutant_to_drag_is_rejected_where_the_statement_fails(tmp_path):
    "By the derivatives at 0: c − ½ must be 0 for both bounds to hold there."
    steps = [{"c": c} for c in (0.3, 0.49, 0.5, 0.51, 0.7)]
    (shown,) = drag([fragment("020_how_to_read")], steps, tmp_path)
    low, below, formula, above, high = (found["verdict"] for found in shown)
    assert formula == "holds"
    assert low == below == "rejected, the difference is negative"
    assert above == high == "rejected, the difference exceeds a³/3"


@figure(
    "502_analysis.attenuation",
    "size",
    [(-2,), (-1,), (-0.5,), (0,), (0.5,)],
    [
        ("(Math.PI - Math.acos(c)) * c", "Math.acos(c) * c"),
        ("nu = 2 - 2 * cosine", "nu = 1 - cosine"),
        ("nu /= left", "nu *= 1"),
        ("ratio - 2 * root / Math.PI + 1 / Math.PI", "ratio - 1 / Math.PI"),
        ("} else alike = kappa(alike);", "}"),
    ],
)
def noise(page, size):
    "Lines and factors of the three networks."
    for i, kind in enumerate(("none", "layer norm", "batch norm")):
        expected = expected_attenuation(10**size, 10, kind, 0.5)
        for side, values in enumerate(expected):
            lines = page["paths"][("whole", "apart")[side]]
            np.testing.assert_allclose(
                points(lines[2 * i], 0.5, 10.5, -1.6, 2.2),
                [range(1, 11), np.log10(values) - 2 * size],
                atol=5e-3,
            )
            factor = numbers(page[f"k{i}"])[side]
            assert abs(factor - values[-1] / 100**size) < 6e-3


@figure(
    "504_analysis.robustness",
    "eps turn",
    [(0.3, 21), (0, 21), (0.8, 0), (0.5, -40), (1.2, 75)],
    [
        ("Math.abs(w[0]) + Math.abs(w[1])", "Math.hypot(w[0], w[1])"),
        ("share(e * across(c))", "share(e)"),
        ("v - eps * sides[k]", "v + eps * sides[k]"),
        ("m > loss ? 1 : 0", "m > -loss ? 1 : 0"),
    ],
)
def attack(page, eps, turn):
    "Accuracies and moved points against the library's attack, and corners."
    x = torch.tensor(page["data"]["cloud"], dtype=torch.float64).flatten(0, 1)
    y = torch.arange(2).repeat_interleave(len(x) // 2)
    w = torch.tensor([np.cos(np.radians(turn)), np.sin(np.radians(turn))])
    model = torch.nn.Linear(2, 2, bias=False).double()
    model.weight.data = torch.stack([-w, w])
    found = robust_accuracy(model, x, y, (0.0, eps), "fgsm")
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 2).double()
    right = (2 * y - 1) * ((x + eps * corners[:, None]) @ w) > 0
    random = 100 * right.double().mean().item()
    close(page, 0.06, clean=found[0.0], worst=found[eps], random=random)
    close(page, 6e-4, nearer=eps * w.abs().sum().item())
    ends = [
        points(d, -2.58, 2.58, -1.5, 1.5)[:, 0]
        for d in page["paths"]["plane"][1:-2:2]
    ]
    np.testing.assert_allclose(ends, fgsm(model, x, y, eps), atol=3e-3)


def shaped(shape):
    "The law that a slider stands for, in the library's terms."
    if shape < 0:
        return bimodal(0.95 * (-shape) ** 0.25)
    k = 0.9 * shape**0.5
    return mixture([0.8, 0.2], [normal(0, 1 - k), normal(0, 1 + 4 * k)])


@figure(
    "112_theory.game",
    "signal noise",
    [(0, 0), (-1, 0), (0, 0.7), (0.4, -0.6), (-0.3, 1)],
    [
        ("now = payoff[i][j]", "now = payoff[j][i]"),
        ("sign * (v - values[found])", "v - values[found]"),
        ("0.95 * Math.abs(shape) ** 0.25", "0.95 * Math.abs(shape)"),
        ("1 + 4 * b", "1 + b"),
    ],
    button="button[name=signal]",
)
def game(page, signal, noise):
    """Pay-offs and best answers against the integrator with error bounds, the
    drawn densities against scipy's.
    """
    passed = lambda x, z: (
        mutual_information(shaped(x), shaped(z), 2e-5, 8e-3).value
    )
    value = passed(signal, noise)
    close(page, 8e-5, payoff=value, change=value - 0.5 * np.log(2))
    reply, gets = numbers(page["reply"])
    counter, leaves = numbers(page["counter"])
    assert abs(gets - passed(reply, noise)) <= 8e-5
    assert abs(leaves - passed(signal, counter)) <= 8e-5
    for near in (-0.1, 0.1):
        if abs(reply + near) <= 1:
            assert passed(reply + near, noise) < gets + 8e-5
        if abs(counter + near) <= 1:
            assert passed(signal, counter + near) > leaves - 8e-5
    assert page["answer"]["sliders"] == pytest.approx([reply, noise])
    assert numbers(page["answer"]["payoff"])[0] == gets
    v = np.linspace(-4, 4, 161)
    for law, d in zip((signal, noise), page["paths"]["laws"]):
        np.testing.assert_allclose(
            points(d, -4, 4, 0, 1.1)[1], shaped(law).pdf(v), atol=2e-3
        )


@figure(
    "140_analysis.gaussianity",
    "lean tails",
    [(0, 0), (0.5, 0), (-1, 0), (0, 1), (0, -1), (0.7, -0.4)],
    [
        ("slope = r / data.spread", "slope = r"),
        ("(r * r).toFixed(4)", "r.toFixed(4)"),
        ("2 - 2 * r)", "1 - r)"),
        ("2 ** tails * Math.asinh(q)", "3 ** tails * Math.asinh(q)"),
    ],
)
def straightness(page, lean, tails):
    "R², distance, moments and line."
    q = scipy.stats.probplot(np.arange(200), fit=False)[0]
    x = scipy.stats.zscore(np.sinh(2.0**tails * np.arcsinh(q) + lean))
    slope, _, r = scipy.stats.probplot(x)[1]
    apart = np.sqrt(np.mean((x - scipy.stats.zscore(q)) ** 2))
    close(page, 6e-5, r2=r**2)
    close(page, 2e-3, distance=apart)
    close(
        page,
        6e-3,
        skewness=scipy.stats.skew(x),
        kurtosis=scipy.stats.kurtosis(x),
    )
    _, (low, high) = points(page["paths"]["qq"][-1], 0, 1, 0, 11)
    assert abs(high - low - 6.4 * slope) < 0.02


@figure(
    "250_theory.whitening",
    "rho first second",
    [(0, 1, 1), (0.8, 1.5, 0.6), (-0.95, 0.3, 2), (0.5, 2, 0.3)],
    [
        ("[-b / t, (a + s) / t]", "[b / t, (a + s) / t]"),
        ("[[(c + s) / t", "[[(a + s) / t"),
        ("0], [0, 1 / Math.sqrt(c)", "0], [0, 1 / c"),
    ],
)
def whitening(page, rho, first, second):
    """W, the correlations and the three clouds against torch's batch norm and
    the library's whitening of the same samples.
    """
    z = np.random.default_rng(0).standard_normal((2, 120))
    z -= z.mean(1, keepdims=True)
    values, vectors = np.linalg.eigh(z @ z.T / 120)
    z = vectors / np.sqrt(values) @ vectors.T @ z
    x = torch.tensor(
        np.array([[first, 0], [second * rho, second * (1 - rho**2) ** 0.5]]) @ z
    )
    matrix = whitening_matrix(x.cov(correction=0), 0.0)
    normed = torch.nn.functional.batch_norm(
        x.T, None, None, training=True, eps=1e-12
    ).T
    np.testing.assert_allclose(
        numbers(page["matrix"]), matrix.flatten(), atol=6e-3
    )
    close(page, 6e-3, normed=rho)
    assert page["white"] == "0.00"
    for panel, cloud in zip(
        ("given", "batch", "whitened"), (x, normed, matrix @ x)
    ):
        drawn = points(page["paths"][panel][0], -6.88, 6.88, -4, 4)
        np.testing.assert_allclose(drawn, cloud, atol=4e-3)


@figure(
    "320_theory.geometry",
    "turn sigma mu eps way",
    [
        (40, 1.5, 1, 0, 0),
        (40, 1.5, 1, 0, 1),
        (40, 1.5, 1, 0, 2),
        (200, 0.2, -1.2, 0.3, 0),
        (305, 0.8, 0.4, 0.7, 1),
        (95, 0.4, 0, 0.2, 2),
    ],
    [
        ("way === 1 ? 0 : mean(u)", "mean(u)"),
        ("Math.sqrt(dot(c, c) / 3 + eps)", "(dot(c, c) / 3 + eps)"),
        ("derivatives(standard(u))", "derivatives(h)"),
        ("mu + sigma * v", "sigma * v"),
    ],
)
def geometry(page, turn, sigma, mu, eps, way):
    """The unit, its answer by torch and the library, length, sum and cosine;
    both points in the plane.
    """
    face = np.array([[1, -1, 0], [1, 1, -2]]) / np.sqrt([[2], [6]])
    angle = np.deg2rad(turn)
    u = torch.tensor(
        mu + sigma * 3**0.5 * (np.array([np.cos(angle), np.sin(angle)]) @ face)
    )
    y = (
        torch.nn.functional.layer_norm(u, (3,), eps=eps)
        if way == 0
        else torch.nn.functional.rms_norm(u, (3,), eps=eps)
        if way == 1
        else normality_norm(u, (0,), eps=eps)[0]
    )
    np.testing.assert_allclose(numbers(page["given"]), u, atol=6e-3)
    np.testing.assert_allclose(numbers(page["made"]), y, atol=6e-3)
    cosine = u @ y / u.norm() / y.norm()
    close(page, 6e-4, length=y.norm(), sum=y.sum(), cosine=cosine)
    for d, point in zip(page["dots"]["plane"], (u, y), strict=True):
        (drawn,) = points(d, -5.16, 5.16, -3, 3).T
        np.testing.assert_allclose(drawn, face @ point.numpy(), atol=6e-3)


@figure(
    "350_theory.correlation_map",
    "phi gamma beta start depth",
    [
        (0, 0.2, 0.2, 0.1, 20),
        (1, 0.2, 0.2, 0.5, 5),
        (2, 0, 0, 0.9, 7),
        (0, 0, 0, 0.9, 50),
        (2, 0.4, 0.4, 0.2, 3),
        (0, 0.4, 0, 0.3, 4),
    ],
    [
        ("sum * c + p", "sum * c - p"),
        ("s.rest * Math.pow", "0 * Math.pow"),
        ("found.layer.p[0]", "found.proxy.p[0]"),
        ("Math.round(gamma / 0.2)", "Math.round(beta / 0.2)"),
    ],
)
def correlation(page, phi, gamma, beta, start, depth):
    "The correlations after some layers, and the curves of the map."
    activation = ("relu", "gelu", "tanh")[phi]
    assert page["name"] == activation and int(page["layers"]) == depth
    for norm, curve in zip(
        ("layer", "pre-layer", "proxy", "batch"),
        page["paths"]["map"][1:],
        strict=True,
    ):
        mapped = lambda c: correlation_map(c, activation, norm, gamma, beta)
        c = start
        for _ in range(depth):
            c = mapped(c)
        assert abs(float(page[norm]) - c) < 3e-3, (norm, page[norm], c)
        x, y = points(curve, 0, 1, 0, 1)[:, 30]  # the middle one of 61
        assert abs(y - mapped(x)) < 2e-3


@figure(
    "354_analysis.stream",
    "place depth xi alpha",
    [
        (0, 10, 0, 0.5),
        (1, 48, 0.7, 1.5),
        (2, 30, 0.4, 0.1),
        (3, 20, 1, 0.8),
        (4, 5, 0, 0.5),
        (4, 48, 1, 0.5),
    ],
    [
        ("scaled: 1 / l", "scaled: 1"),
        ("peri: 1 / of.power(q)", "peri: 1"),
        ("s = apart ? 1", "s = apart ? 0"),
        ("G *= of.slope(q)", "G *= 1"),
        ("2 / Math.PI * xi * xi", "2 / Math.PI * xi"),
        ("Math.sqrt(1 + 2 * a * q)", "Math.sqrt(1 + a * q)"),
        ("a * k / (1 + a * q)", "a * k / (1 + q)"),
    ],
)
def placed(page, place, depth, xi, alpha):
    "Gradient and cosine at the end by the chapter's recursions; the curves."
    name = ("none", "pre", "scaled", "peri", "post")[place]
    for curve, (kind, normalizer) in enumerate(
        (("layer", layer_norm(xi)), ("derf", derf(alpha)))
    ):
        if name == "post" and kind == "derf":
            assert page[kind] == page["derf-cosine"] == "–"
            assert len(page["paths"]["gradient"]) == 1
            continue
        found = stream(name, normalizer, depth)
        close(page, 6e-4, **{f"{kind}-cosine": found.cosine[-1]})
        G = float(page[kind].replace("−", "-"))
        assert abs(G / found.gradient[-1] - 1) < 6e-3
        for panel, low, high, of in (
            ("gradient", -1, 4, np.log10(found.gradient)),
            ("cosine", 0, 1, found.cosine),
        ):
            x, y = points(page["paths"][panel][curve], 0, 48, low, high)
            kept = [v for v in of if low <= v <= high]
            np.testing.assert_allclose(x, range(len(kept)), atol=0.2)
            np.testing.assert_allclose(y, kept, atol=0.02)


@figure(
    "365_scale_in_training",
    "lr decay g start m",
    [
        (-1.3, -2.3, 0, 0.5, 0.9),
        (-1.3, -2.3, 0.5, 0.5, 0.9),
        (-0.5, -2, -0.5, -0.5, 0.0),
        (-1, -3, 0, 1, 0.5),
    ],
    [
        (
            "p = m * m * p + 2 * m * decay * q",
            "p = m * m * p - 2 * m * decay * q",
        ),
        (
            "s += lr ** 2 * p - 2 * lr * along",
            "s += lr ** 2 * p + 2 * lr * along",
        ),
        ("q = along - lr * p", "q = along"),
        ("(1 - m) * (2 - x)", "(2 - x)"),
        ("Math.sqrt(x / 2)", "Math.sqrt(x)"),
        ("g ** 2 / s;", "g ** 2;"),
    ],
)
def growth(page, *logs):
    """The equilibrium by the claim of the chapter and, without momentum, by the
    library; both paths by vectors with gradients at right angles.
    """
    law = next(
        c.formula for c in ledger() if c.id == "scale-momentum-equilibrium"
    )
    value = lambda text: float(text.rstrip("°").replace("−", "-"))
    *logs, m = logs
    lr, decay, g, start = (10**v for v in logs)
    factor, cosine = law(lr, decay, m)
    length, turn = (factor * g**2) ** 0.25, np.degrees(np.arccos(cosine))
    if m == 0:
        assert abs(length - equilibrium_norm(g, lr, decay)) < 1e-9
        assert abs(turn - np.degrees(equilibrium_angle(lr, decay))) < 1e-6
    time = (1 - m) / (4 * lr * decay)
    expected = {
        "length": length,
        "turn": turn,
        "time": time,
        "rate": lr,
        "slope": g,
    }
    if time < 1e4:  # there long before the end
        expected |= {"last": length, "turned": turn}
    for name, wanted in expected.items():
        assert abs(value(page[name]) / wanted - 1) < 6e-3, (name, page)
    w, v, found = np.array([start, 0, 0, 0]), np.zeros(4), []
    for step in range(1, 101):
        basis, _ = np.linalg.qr(np.stack([w, v, *np.eye(4)[1:3]], 1))
        v = m * v + basis[:, 3] * g / np.linalg.norm(w) + decay * w
        before, w = w, w - lr * v
        across = w - (w @ before) / (before @ before) * before
        along = w @ before / np.linalg.norm(before)
        angle = np.degrees(np.arctan2(np.linalg.norm(across), along))
        found.append((step, np.linalg.norm(w), angle))
    steps, *found = np.log10(found).T
    for panel, low, high, path_of, limit in (
        ("length", -1.2, 2.4, found[0], length),
        ("turn", -4.5, 2.0, found[1], turn),
    ):
        line, path = page["paths"][panel]
        x, y = points(path, 0, 5, low, high)
        at = x <= 2
        assert at.sum() > 30
        np.testing.assert_allclose(
            y[at], np.interp(x[at], steps, path_of), atol=0.01
        )
        height = points(line, 0, 5, low, high)[1, 0]
        assert abs(height - np.log10(limit)) < 0.01


@browser
def test_buttons_of_the_growth_figure(tmp_path):
    text = fragment("365_scale_in_training")
    steps = ["button.here", "button.same"]
    ((here, same),) = drag([text], steps, tmp_path)
    assert here["turn"] == same["turn"] and here["length"] != same["length"]


@figure(
    "262_theory.lambert",
    "nu delta",
    [(3, 0), (3, 0.43), (3, 1.5), (3, -0.05), (5, 0.2), (15, 0.05)],
    [
        ("-lambert(delta * z * z) / 2", "-lambert(delta * z)"),
        ("x * Math.exp(-w)) / (1 + w)", "x) / (1 + w)"),
        ("-delta * z * z / 2 :", "delta * z * z / 2 :"),
        ("v => v ** 4", "v => v ** 2"),
    ],
    button="button",
)
def tails(page, nu, delta):
    """Kurtosis and straightness against scipy, with scipy's W; the curve too,
    and that the button makes the kurtosis 3.
    """
    bent = lambda z: (
        z
        * np.exp(
            -delta * z * z / 2
            if delta < 0
            else -scipy.special.lambertw(delta * z * z).real / 2
        )
    )
    z = scipy.stats.zscore(scipy.stats.t.ppf((np.arange(200) + 0.5) / 200, nu))
    kurtosis = lambda x: scipy.stats.kurtosis(x, fisher=False)
    straight = lambda x: qq_r2(torch.tensor(x)).item()
    close(page, 6e-3, before=kurtosis(z), after=kurtosis(bent(z)))
    close(page, 6e-5, crooked=straight(z), straight=straight(bent(z)))
    x, y = points(page["paths"]["bend"][-1], -5, 5, -5, 5)
    np.testing.assert_allclose(y, bent(x), atol=1.5e-2)
    close(page["answer"], 0.02, after=3)


@figure(
    "755_experiments.statistics",
    "n ratio",
    [
        (2, 1),
        (2, 3),
        (3, 0),
        (3, 1),
        (5, 0.5),
        (5, 1),
        (10, 1),
        (30, 0),
        (30, 0.55),
        (30, 3),
    ],
    [
        ("s ** (df - 1)", "s ** df"),
        ("Math.sqrt(n) * ratio", "n * ratio"),
        ("t * s / Math.sqrt(n)", "1.96 * s / Math.sqrt(n)"),
    ],
)
def seeds(page, n, ratio):
    "Half-width, counts and power."
    draws = np.array(page["data"]["draws"])
    assert draws.shape == (40, 30)
    assert (page["n"], float(page["ratio"])) == (str(n), ratio)
    close(page, 6e-3, half=scipy.stats.t.ppf(0.975, n - 1) / n**0.5)
    test = scipy.stats.ttest_1samp(draws[:, :n] + ratio, 0, axis=1)
    low, high = test.confidence_interval()
    assert int(page["seen"]) == (test.pvalue < 0.05).sum()
    assert int(page["hold"]) == ((low <= ratio) & (ratio <= high)).sum()
    power = detection_power(n, ratio)
    assert abs(float(page["power"]) / 100 - power) <= 1.1e-3
    (drawn,) = points(page["dots"]["power"][0], 0, 3, 0, 1.02).T
    np.testing.assert_allclose(drawn, [ratio, power], rtol=0, atol=2e-3)


@pytest.fixture(scope="session")
def shown(once):
    """Figure → what its pages report after its steps, by its formula and by
    each wrong one: one browser opens them for both workers.
    """

    def make(folder):
        addresses = {
            name: [
                page_of(text, folder, f"{name}{i}", "drag", steps)
                for i, text in enumerate(texts())
            ]
            for name, (texts, steps, _) in FIGURES.items()
        }
        seen = iter(reports(sum(addresses.values(), [])))
        save(
            folder / "shown.json",
            {name: [next(seen) for _ in of] for name, of in addresses.items()},
        )

    return load(once("figures to drag", make) / "shown.json")


@browser
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_what_is_computed(name, shown):
    texts, _, check = FIGURES[name]
    check(texts()[0], *answers(*shown[name]))
