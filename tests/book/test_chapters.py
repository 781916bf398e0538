"""Every chapter runs.

The executed copies are those of the book: what is fresh is not run again.
"""

import os
import warnings

import pytest

from tools import chapters
from tools import run as tools


@pytest.mark.parametrize("name", [c.name for c in chapters.chapters()])
def test_chapter(name):
    try:
        run = tools.ensure(chapters.chapter(name))
    except tools.ChapterFailed as error:
        pytest.fail(str(error), pytrace=False)
    assert run.stale() == ""
    seconds, cpu = run.record()["seconds"], run.record()["cpu"]
    # a busy machine is no fault of the chapter; what it computes is
    if seconds > tools.BUDGET:
        warnings.warn(
            f"chapter {name} took {seconds:.0f} s; its budget is "
            f"{tools.BUDGET:.0f} s",
            stacklevel=1,
        )
    # held to fewer instructions than the processor has, all takes longer
    budget = tools.BUDGET * (1.5 if "ATEN_CPU_CAPABILITY" in os.environ else 1)
    assert cpu <= budget, (
        f"chapter {name} took {cpu:.0f} s of processor time; its budget is "
        f"{budget:.0f} s"
    )
