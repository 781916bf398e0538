# make book · make test · make help. Both set up the environment in .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MINUTES ?= 9

.DEFAULT_GOAL := help
.PHONY: help book test test-quick export update lab serve pdf bench gpu cubins wheel cards homes mutants proofs records clean test-oldest test-newest test-sphinx test-processors test-avx2

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

$(VENV)/.ready: constraints.txt settings.ini setup.py pyproject.toml tools/venv.sh
	@sh tools/venv.sh $(PYTHON) $(VENV)
	@echo "installing the pinned tools into $(VENV) (about two minutes)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable ".[dev,plots,experiments,ray]"
	@$(BIN)/python -m ipykernel install --sys-prefix >/dev/null 2>&1
	@touch $@

book: $(VENV)/.ready  ## run the chapters that changed, render the book to _build/html
	@$(BIN)/python -m tools.build

test: $(VENV)/.ready  ## run the chapters that changed and every test
	@$(BIN)/python -m pytest -n 2 --dist worksteal tests

test-quick: $(VENV)/.ready  ## the tests that are quick, start no processes and no browser (about two minutes)
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not browser and not processes" tests

export: $(VENV)/.ready  ## write normalnorm/, README.md and _quarto.yml from the notebooks; clean the notebooks
	@$(BIN)/python -m tools.export

update: $(VENV)/.ready  ## carry what was changed in normalnorm/ back into the cells of nbs/
	@$(BIN)/python -m tools.export --update

lab: $(VENV)/.ready  ## open the chapters in JupyterLab
	@$(BIN)/jupyter lab nbs

serve: book  ## render, then serve the book on localhost:8000
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory _build/html 8000

pdf: book  ## print the book to _build/normalnorm.pdf (needs Chromium or Chrome)
	@$(BIN)/python -m tools.pdf

bench: $(VENV)/.ready  ## measure speed and memory of the layers, as ratios, for each instruction set and 1 thread or all, into results/benchmarks (half an hour on a quiet machine; goes on where it was interrupted)
	@$(BIN)/python -m benchmarks

gpu:  ## what this machine's GPU does with the layers, within MINUTES (9), into results/gpu; goes on where it stopped; takes the machine's own torch and Triton where there is no .venv
	@PYTHONPATH=. $$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -m benchmarks.gpu --minutes $(MINUTES)

cubins: $(VENV)/.ready  ## what the kernels for a GPU are compiled to, by two releases of Triton, into results/cubins.json (ten minutes; takes no GPU, 2 GB; not part of CI)
	@$(BIN)/python -m tools.cubins
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target .triton-3.6 triton==3.6.0
	@PYTHONPATH=.triton-3.6 $(BIN)/python -m tools.cubins
	@$(BIN)/python -m tools.records --made cubins

wheel: $(VENV)/.ready  ## what a release uploads, into dist: the sources, and a wheel for Linux on x86-64 with the compiled kernel in it (two minutes)
	@$(BIN)/python -m tools.wheel

cards: $(VENV)/.ready  ## report cards of the layers here, in PyTorch, timm and transformers, into results/cards.json (two minutes; not part of CI)
	@$(BIN)/python -m tools.cards

mutants: $(VENV)/.ready  ## wrong versions of the library, a few of every module, which the tests should notice; the outcome into results/mutation (some hours, goes on where it stopped; not part of CI)
	@$(BIN)/python -m tools.mutants --record

homes: $(VENV)/.ready  ## nearly seventy architectures of timm, transformers and torchvision converted, saved, loaded, frozen and back, into results/homes.json (six minutes; not part of CI)
	@$(BIN)/python -m tools.homes

proofs: $(VENV)/.ready  ## theorems of the book, and mutants of them, through Coq's kernel, into results/proofs (a minute; Debian's coq, libcoq-interval and libcoq-coquelicot, 0.7 GB; not part of CI)
	@command -v coqc >/dev/null || { command -v apt-get >/dev/null && test $$(id -u) = 0 && apt-get install -y -qq coq libcoq-interval libcoq-coquelicot >/dev/null || true; }
	@$(BIN)/python -m tools.proofs
	@$(BIN)/python -m tools.records --made proofs

records: $(VENV)/.ready  ## which measured results are older than their code; asks their witnesses, writes results/records.json
	@$(BIN)/python -m tools.records

clean:  ## remove what was built; the environment stays
	rm -rf _build _docs build dist *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

test-oldest:  ## the library's tests with the oldest supported torch, numpy, scipy (not part of CI)
	@sh tools/venv.sh $(PYTHON) .venv-oldest
	@.venv-oldest/bin/python -m tools.bounds oldest

test-newest:  ## book and tests with the newest torch, numpy, scipy, matplotlib; PYTHON=python3.13 for another Python (not part of CI)
	@sh tools/venv.sh $(PYTHON) .venv-newest
	@.venv-newest/bin/python -m tools.bounds newest

test-sphinx: book  ## the pages once more, under the newest Sphinx, without Jupyter Book, into results/pages-newest.json; PYTHON=python3.13 for a newer one (ten minutes; not part of CI)
	@sh tools/venv.sh $(PYTHON) .venv-sphinx
	@$(BIN)/python -m tools.newest .venv-sphinx/bin/python
	@$(BIN)/python -m tools.records --made "pages under the newest Sphinx"

test-processors: $(VENV)/.ready  ## the kernel for each instruction set of x86, for ARM by an emulator, under sanitizers (an hour; not part of CI)
	@command -v apt-get >/dev/null && test $$(id -u) = 0 && apt-get install -y -qq clang g++ g++-aarch64-linux-gnu git libomp-dev qemu-user-static >/dev/null || true
	@$(BIN)/python -m tools.processors

test-avx2: $(VENV)/.ready  ## of make test: the kernel's chapters and tests as on a processor that has nothing beyond AVX2 (a minute)
	@$(BIN)/python -m pytest tests/tools/test_processors.py -k tests_of_the_kernel
