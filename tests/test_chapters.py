"Every chapter runs. The executed copies are those of the book: what is fresh is not run again."
import pytest

pytestmark = pytest.mark.book
tools = pytest.importorskip("tools.run", reason="the book's tools are not installed")
chapters = pytest.importorskip("tools.chapters", reason="the book's tools are not installed")


@pytest.mark.parametrize("name", [c.name for c in chapters.chapters()])
def test_chapter(name):
    try:
        run = tools.ensure(chapters.chapter(name))
    except tools.ChapterFailed as error:
        pytest.fail(str(error), pytrace=False)
    assert run.stale() == ""
    assert run.record()["seconds"] <= 4 * tools.BUDGET, f"{name} takes {run.record()['seconds']} s; a chapter may take {tools.BUDGET} s on a quiet machine"
