"Records that are made in parts: resumed, refused."

import json

import pytest
import torch

parts = pytest.importorskip(
    "tools.parts", reason="the book's tools are not installed"
)
pytestmark = pytest.mark.book


@pytest.fixture
def record(tmp_path):
    threads = torch.get_num_threads()
    yield tmp_path / "record.json"
    torch.set_num_threads(threads)


def made(record, done, arguments=(), by="this", fails=""):
    "Runs a tool of three parts, which notes in `done` what it measures."

    def measure(name):
        def part():
            if name == fails:
                raise KeyboardInterrupt
            done.append(name)
            return {"of": name}

        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "code", lambda *of: by)
        return parts.run(
            "About this.\n\npython -m toy  more",
            record,
            [
                (tuple(name.split("/")), measure(name))
                for name in ("a/1", "a/2", "b")
            ],
            {"size": 3},
            list(arguments),
        )


def test_an_interrupted_record_goes_on(record):
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        made(record, done, fails="b")
    assert done == ["a/1", "a/2"]
    assert set(json.loads(record.read_text())["parts"]["a"]) == {"1", "2"}
    assert made(record, done) == 0 and done == ["a/1", "a/2", "b"]
    kept = json.loads(record.read_text())
    assert kept["size"] == 3 and len(kept["source"]) == 12
    assert kept["parts"]["a"]["2"]["found"] == {"of": "a/2"}
    before = record.read_bytes()
    made(record, done)
    assert record.read_bytes() == before and len(done) == 3


def test_what_is_asked_for(record, capsys):
    done: list[str] = []
    made(record, done, ["--only", "a"])
    assert done == ["a/1", "a/2"]
    made(record, done, ["--only", "a/2", "--again"])
    assert done[2:] == ["a/2"]
    with pytest.raises(SystemExit) as stop:
        made(record, done, ["--only", "a/3"])
    assert stop.value.code == 2
    assert "no part a/3: expected a, b" in capsys.readouterr().err


def test_two_kinds_of_code_are_not_mixed(record, capsys):
    done: list[str] = []
    made(record, done, ["--only", "a/1"])
    before = record.read_bytes()
    with pytest.raises(SystemExit):
        made(record, done, by="other")
    assert "a/1 was measured by other code" in capsys.readouterr().err
    assert record.read_bytes() == before
    made(record, done, ["--again"], by="other")
    assert {
        p["code"] for p in json.loads(record.read_text())["parts"]["a"].values()
    } == {"other"}
