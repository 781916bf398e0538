"""One set of instructions for both sides: our kernel, PyTorch's own kernels and
the libraries below them, and what torch.compile writes.
"""

import os
from pathlib import Path

from tools import processors

# as an option is called; "own": what a processor has that has neither
SETS = {"avx512": "AVX-512", "avx2": "AVX2", "own": None}
# Large results in fresh pages cost more than computing them. Both sides of a
# pair get memory that has been touched: glibc keeps what is freed.
KEEP_PAGES = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def lacking(name: str) -> str:
    "Why this processor does not have the set; empty where it does."
    return "" if SETS[name] is None else processors.lacking(SETS[name])


def here() -> list[str]:
    "The sets that are measured where none is named."
    return [name for name in ("avx512", "avx2") if not lacking(name)] or ["own"]


def environment(name: str, threads: int, folder: Path) -> dict[str, str]:
    "For a process held to the set; compiled code is kept in `folder`."
    switches = {key for s in processors.SETS.values() for key, _ in s.torch}
    usual = {
        key: value
        for key, value in os.environ.items()
        if key not in switches | {"MKL_NUM_THREADS"}
    }
    folder = folder / name
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        "NORMALNORM_CACHE": str(folder / "kernel"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    if name == "avx2":
        wanted |= dict(processors.SETS["AVX2"].torch) | {
            "CXX": processors.compiling(
                folder,
                os.environ.get("CXX") or "g++",
                processors.SETS["AVX2"].march,
            )
        }
    return usual | KEEP_PAGES | wanted
