"""Two workers share two cores: one thread each, or as many as
NORMALNORM_TEST_THREADS says.

The checkout's root is importable, for the tests of tools. Random examples are
the same in every run; `pytest --hypothesis-profile=default` takes new ones.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

# read when torch is loaded, here and in the processes that tests start: threads
# that wait do not spin on a core that another worker needs
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(int(os.environ.get("NORMALNORM_TEST_THREADS", "1")))
# no line of the kernel's compilation among the results
os.environ["NORMALNORM_QUIET"] = "1"
os.environ["NORMALNORM_WAIT"] = "1"  # for the kernel
settings.register_profile("same", derandomize=True)
settings.load_profile("same")
if "PYTEST_XDIST_WORKER" not in os.environ and find_spec("yaml"):
    from tools.export import write_checks

    write_checks()

release = tuple(map(int, torch.__version__.split(".")[:2]))
if release < (2, 7):  # its Triton is too old for the kernels of a GPU
    name = "normalnorm.layers.kernels"
    sys.modules[name] = ModuleType(name)
if release < (2, 8):
    # PyTorch joins gloo's threads under Python's lock, for which one of them
    # may wait (its #154976): a group is kept until this process ends
    import torch.distributed as dist

    kept, destroy = [], dist.destroy_process_group

    def keep(group=None):
        kept.append(group or dist.group.WORLD)
        destroy(group)

    dist.destroy_process_group = keep

# test_ files that `make test-quick` leaves out
LEFT_OUT = {
    "slow": "accepted analysis appendices benchmarks chapters claims collapse "
    "compiler conversion correlation_map curvature dependence deployment "
    "early_training examples figures gpu gpu_kernels growth hardness harness "
    "hessian hessian_rows hostile information ledger left_alone "
    "models modules mutants native one_factor operators peers "
    "power_training proxy proxy_conversion proxy_paper proxy_recipe pruning "
    "real_folders recipes records results robustness same_bits state "
    "traced train types unique_recipe",
    "browser": "pages widget",
    "processes": "cli engines failures fsdp lab new_rows packaging "
    "private_names processors regnorm_parallel spread sync sync_decorrelated",
}


# files of the folders of the book and its tools that need none of these
WITHOUT = (
    "benchmarks claims defaults docstrings examples packaging peers processors"
)


def is_of_the_book(path: Path) -> bool:
    named = path.stem.removeprefix("test_") not in WITHOUT.split()
    return path.parent.name in ("book", "tools") and named


def marks(path: Path) -> list[str]:
    "Those of a file, for each of its tests."
    name = path.stem.removeprefix("test_")
    left_out = [m for m, files in LEFT_OUT.items() if name in files.split()]
    return [*left_out, *["book"] * is_of_the_book(path)]


def pytest_ignore_collect(collection_path, config):
    if is_of_the_book(collection_path) and not find_spec("nbclient"):
        return True  # the book's tools are not installed
    # what is deselected whole is not imported, which takes seconds a file
    refused = config.option.markexpr.split(" and ")
    if collection_path.is_file() and any(
        f"not {mark}" in refused for mark in marks(collection_path)
    ):
        return True


def pytest_collection_modifyitems(items):
    for item in items:
        for mark in marks(item.path):
            item.add_marker(mark)
    items[:] = long_ones_first(items)


def long_ones_first(items: list) -> list:
    """The files that `make test-quick` leaves out at the start of each worker's
    half, in turn: what is left to share at the end are quick tests.
    """
    is_long = lambda item: any(item.get_closest_marker(m) for m in LEFT_OUT)
    files = list(dict.fromkeys(i.path for i in filter(is_long, items)))
    first, second = (
        [item for item in items if item.path in files[start::2]]
        for start in (0, 1)
    )
    quick = [item for item in items if item.path not in files]
    of_first = max(0, len(items) // 2 - len(first))
    return [*first, *quick[:of_first], *second, *quick[of_first:]]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    # generated code of PyTorch 2.4 flushes small numbers to 0 once it is loaded
    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """What is made at the first call, in a folder of that name; who comes
    second, of all workers of this run, waits for it.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name: str, make) -> Path:
        fcntl = pytest.importorskip("fcntl")
        folder, making = shared / name, shared / f"{name} in the making"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                making.mkdir(exist_ok=True)
                make(making)
                making.rename(folder)
        return folder

    return made


@pytest.fixture(scope="session")
def plain_wheel(once):
    "The wheel that anybody makes."
    from tools import wheel as packing

    (wheel,) = once("plain wheel", packing.plain).glob("*.whl")
    return wheel
