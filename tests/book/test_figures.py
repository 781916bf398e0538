"""The figures of the chapters: the same bytes whenever they are drawn, vector
graphics, and only colours of the palette.
"""

import io
import re
import shutil

import matplotlib.pyplot as plt
import pytest

from normalnorm import plots
from tools import run
from tools.chapters import ROOT, Chapter, chapter, chapters
from tools.files import load

GREY = "#808080"  # grids and reference lines
COLOUR = re.compile(
    r"#[0-9a-fA-F]{6}\b|\brgba?\([^)]*\)|(?<=: "
    r")(?:red|green|blue|black|white|gr[ae]y|orange|purple)\b"
)


def outputs(executed, kind):
    "All outputs of this kind in an executed notebook."
    cells = load(executed.notebook)["cells"]
    return [
        "".join(o["data"][kind])
        for cell in cells
        for o in cell.get("outputs", [])
        if kind in o.get("data", {})
    ]


def stray_colours(svg):
    return sorted(
        {c.lower() for c in COLOUR.findall(svg)}
        - {plots.INK, GREY, *plots.PALETTE}
    )


def test_a_fresh_process_draws_the_same_bytes(tmp_path):
    """A chapter with dots, legends, clip paths, in another folder and another
    kernel, as the book runs it.
    """
    name = "720_plots"
    known = outputs(run.ensure(chapter(name)), "image/svg+xml")
    (tmp_path / "nbs").mkdir()
    shutil.copy(chapter(name).path, tmp_path / "nbs")
    for file in ("settings.ini", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "normalnorm").symlink_to(ROOT / "normalnorm")
    again = outputs(run.execute(Chapter(name, tmp_path)), "image/svg+xml")
    assert known and again == known


def test_figures_are_vector_graphics_in_the_colours_of_the_palette():
    seen = 0
    for c in chapters():
        executed = run.Run(c)
        if not executed.notebook.exists():
            continue
        assert outputs(executed, "image/png") == [], (
            f"{c.name}: draw with plots.subplots"
        )
        stray = [
            colours
            for svg in outputs(executed, "image/svg+xml")
            if (colours := stray_colours(svg))
        ]
        seen += len(outputs(executed, "image/svg+xml"))
        # the chapter on colours shows in one figure which ones do not do
        assert len(stray) == (c.name == "720_plots"), (c.name, stray)
    if not seen:
        pytest.skip("no chapter has been run")


def test_another_colour_and_a_random_id_are_noticed():
    def draw(colour, **settings):
        with plt.rc_context({**plots.STYLE, **settings}):
            fig, ax = plt.subplots(figsize=(1, 1))
            ax.plot([0, 1], [0, 1], "o-", color=colour)
            buffer = io.BytesIO()
            fig.savefig(buffer, format="svg", metadata=plots.METADATA)
            plt.close(fig)
        return buffer.getvalue().decode()

    assert stray_colours(draw(plots.PALETTE[0])) == [] and stray_colours(
        draw("#ff0000")
    ) == ["#ff0000"]
    assert draw("C0") == draw("C0") and draw(
        "C0", **{"svg.hashsalt": None}
    ) != draw("C0", **{"svg.hashsalt": None})


def test_axes_have_the_books_style():
    with plt.rc_context():
        plt.rcdefaults()
        fig, axes = plots.subplots(1, 2, figsize=(3, 2))
    assert [ax.spines["top"].get_visible() for ax in axes] == [False, False]
    plt.close(fig)


def test_boxes_of_a_diagram():
    fig, boxes = plots.flow(["then", "at last"], ["first", "", "third"])
    assert [[t.get_text() for t in ax.texts] for ax in boxes] == [
        ["first"],
        [],
        ["third"],
    ]
    assert [ax.spines["top"].get_visible() for ax in boxes] == [
        True,
        plt.rcParams["axes.spines.top"],
        True,
    ]
    with pytest.raises(ValueError, match="2 arrows join 3 stages: given 2"):
        plots.flow(["a", "b"], ["one", "two"])
    plt.close(fig)
