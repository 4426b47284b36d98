# Every target sets itself up: a .venv with the versions of constraints.txt, renewed when they change.
# torch comes from wherever pip is told to look; for the small CPU build on a machine without a GPU:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ZOO_READY := $(VENV)/.ready-zoo
ZOO_VENV := .venv-zoo
ZOO_VENV_READY := $(ZOO_VENV)/.ready
KERNELS_READY := $(VENV)/.ready-kernels
OPACUS := $(VENV)/opacus
OPACUS_READY := $(OPACUS)/.ready
UNCERTAINTY := $(VENV)/uncertainty
UNCERTAINTY_READY := $(UNCERTAINTY)/.ready
FLOWER := $(VENV)/flower
FLOWER_READY := $(FLOWER)/.ready
FRAMEWORKS_READY := $(VENV)/.ready-frameworks
DOCS_READY := $(VENV)/.ready-docs
OLDEST_VENV := .venv-oldest
OLDEST_READY := $(OLDEST_VENV)/.ready
RAY_VENV := .venv-ray
RAY_READY := $(RAY_VENV)/.ready

# -qq hides pip's notes and warnings and still shows its errors.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal
# The files with tests of a kind: reading all others takes each worker 16 seconds.
FILES = $$(grep -rlE 'mark\.$(1)\b' tests --include='*.py')
# pytest exits with 5 when nothing carries the marker, which is no failure.
NONE_IS_FINE := || [ $$? -eq 5 ]

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow fuzz test-zoo zoo zoo-findings test-kernels test-opacus test-uncertainty test-flower test-frameworks test-ray test-oldest test-gpu test-browser test-wheel docs check format format-check lint types house bench clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

demo: $(READY) ## batch norm, group norm and the analytic normalization by batch size, in about a minute
	@$(BIN)/varprop demo

test: $(READY) ## all tests but the slow and the zoo ones
	@$(PYTEST)

test-slow: $(READY) ## the slow tests
	@$(PYTEST) -m "slow and not zoo" $(NONE_IS_FINE)

fuzz: $(READY) ## the tests that draw their examples, with new ones each time; a failure prints how to repeat it
	@HYPOTHESIS_PROFILE=fuzz FUZZ_EXAMPLES=1000 $(PYTEST) --timeout 3600 -m "hypothesis and not kernels"

test-zoo: $(ZOO_READY) ## the tests on public models (installs torchvision, timm and transformers)
	@HF_HUB_OFFLINE=1 $(PYTEST) -m zoo $(call FILES,zoo)

zoo: $(ZOO_VENV_READY) ## 254 public models propagated, normalized, folded, trained, for docs/zoo.md (2 GB, some hours; resumes)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=src $(ZOO_VENV)/bin/python -m benchmarks.zoo sweep
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=src $(ZOO_VENV)/bin/python -m benchmarks.zoo normalize --memory 14
	@PYTHONPATH=src $(ZOO_VENV)/bin/python -m benchmarks.zoo table

zoo-findings: $(ZOO_VENV_READY) ## what vp.inspect says of the same models, sound and damaged, for docs/inspector.md (resumes)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=src $(ZOO_VENV)/bin/python -m benchmarks.zoo alarms
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=src $(ZOO_VENV)/bin/python -m benchmarks.zoo damage
	@PYTHONPATH=src $(ZOO_VENV)/bin/python -m benchmarks.zoo findings

test-kernels: $(KERNELS_READY) ## the Triton kernels in its interpreter on the CPU (installs triton, 1 GB)
	@TRITON_INTERPRET=1 $(PYTEST) -m kernels tests/norm/backends/triton

test-opacus: $(OPACUS_READY) ## private training with Opacus (installs it)
	@PYTHONPATH=$(OPACUS) $(PYTEST) -m opacus $(call FILES,opacus)

test-uncertainty: $(UNCERTAINTY_READY) ## error bars from posteriors of laplace-torch, IVON and bayesian-torch (installs them)
	@PYTHONPATH=$(UNCERTAINTY) $(PYTEST) -m uncertainty $(call FILES,uncertainty)

test-flower: $(FLOWER_READY) ## federated averaging by Flower (installs it into a folder of its own: it pins other versions)
	@PYTHONPATH=$(FLOWER) $(PYTEST) -m flower $(call FILES,flower)

test-frameworks: $(FRAMEWORKS_READY) ## training by Lightning, transformers and accelerate (installs them)
	@HF_HUB_OFFLINE=1 $(PYTEST) -m frameworks $(call FILES,frameworks)

test-ray: $(RAY_READY) ## sweeps on Ray, with workers and drivers that are killed (.venv-ray, with torch and ray)
	@OMP_NUM_THREADS=1 $(RAY_VENV)/bin/python -m pytest -q -m ray $(call FILES,ray)

test-oldest: $(OLDEST_READY) ## all tests but the slow ones on the oldest torch that is supported (5 GB in .venv-oldest)
	@OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest -q -n 2 --dist worksteal

test-gpu: ## the kernels and the normalization on CUDA, with the Python that runs make (PYTHON=...)
	@PYTHONPATH=src:. $(PYTHON) -m pytest -q -m "kernels or gpu" tests/norm/backends/triton tests/gpu
	@PYTHONPATH=src:. $(PYTHON) tests/smoke_device.py cuda

test-browser: $(READY) ## the HTML report in headless Chromium (installed by apt where there is none)
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null \
		|| { apt-get install -qq -y chromium > /dev/null 2>&1 || sudo -n apt-get install -qq -y chromium > /dev/null 2>&1; } \
		|| echo "No Chromium, and none could be installed: the browser tests will be skipped." >&2
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m browser $(call FILES,browser)  # one at a time: some measure times

test-wheel: ## build wheel and sdist, check them, install the wheel where nothing else is, and use it there (1 GB in a temporary folder)
	@$(PYTHON) tools/check_wheel.py

docs: $(DOCS_READY) $(OPACUS_READY) ## the site, strictly, into docs/_build/html; executes the tutorials (installs Sphinx, ONNX Runtime, Opacus)
	@OMP_NUM_THREADS=1 PYTHONPATH=$(abspath src):$(abspath $(OPACUS)) $(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@$(BIN)/python tools/check_site.py docs/_build/html
	@echo "docs/_build/html/index.html"

check: format-check lint types test ## what has to pass before a change goes in

format: $(READY) ## rewrite the sources in the common format
	@$(BIN)/ruff check -q --fix-only . && $(BIN)/ruff format -q .

format-check: $(READY)
	@$(BIN)/ruff format --check .

lint: $(READY)
	@$(BIN)/ruff check .

types: $(READY)
	@$(BIN)/mypy

house: $(READY) ## lines, files, vague names, and how many files one normalize and one forward pass run through
	@$(BIN)/python tools/house.py

bench: $(READY) ## every benchmarks/bench_*.py in turn
	@set -e; for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

clean: ## remove the .venv, caches and build outputs
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build
	@find src tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "varprop needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time, torch is large)"
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(KERNELS_READY): $(READY)
	@$(PIP) install -c constraints.txt triton
	@touch $@

# In a folder of its own: its wheel has packages called benchmarks and examples, which would stand before ours. Without
# dependencies: those that matter are there, and none can replace the torch already chosen.
$(OPACUS_READY): $(READY)
	@$(PIP) install -c constraints.txt --no-deps --upgrade --target $(OPACUS) opacus opt_einsum
	@touch $@

# In a folder of its own and without dependencies: laplace-torch asks for torchvision, which it does not need here.
$(UNCERTAINTY_READY): $(READY)
	@$(PIP) install -c constraints.txt --no-deps --upgrade --target $(UNCERTAINTY) laplace-torch==0.3 ivon-opt==0.1.3 \
		bayesian-torch==0.5.0 curvlinops-for-pytorch==3.0.1 backpack-for-pytorch asdfghjkl==0.1a4 einops einconv unfoldNd linear_operator jaxtyping wadler_lindig \
		opt_einsum torchmetrics lightning-utilities tqdm
	@touch $@

$(FLOWER_READY): $(READY)
	@$(PIP) install --upgrade --target $(FLOWER) flwr==1.41.0 $$(grep -E "^numpy==" constraints.txt)
	@touch $@

$(FRAMEWORKS_READY): $(READY)
	@$(PIP) install -c constraints.txt lightning transformers accelerate
	@touch $@

$(DOCS_READY): $(READY)
	@$(PIP) install -c constraints.txt sphinx furo myst-nb ipykernel onnxruntime
	@touch $@

# Ray has a venv of its own: it is large, and nothing else may come to depend on it.
$(RAY_READY): pyproject.toml constraints.txt
	@$(RAY_VENV)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(RAY_VENV)
	@$(RAY_VENV)/bin/python -m pip -qq --disable-pip-version-check install -c constraints.txt \
		-e '.[ray]' hypothesis numpy pytest pytest-timeout scipy
	@touch $@

# The versions of constraints.txt but for torch and what comes with it; torch 2.11 has no small build on PyPI.
$(OLDEST_READY): pyproject.toml constraints.txt
	@$(OLDEST_VENV)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(OLDEST_VENV)
	@grep -vE "^(torch|triton|setuptools|sympy|networkx|fsspec)==" constraints.txt > $(OLDEST_VENV)/constraints.txt
	@$(OLDEST_VENV)/bin/python -m pip -qq --disable-pip-version-check install -c $(OLDEST_VENV)/constraints.txt \
		torch==2.11.0 -e '.[dev]'
	@touch $@

# torchvision comes first and without its dependencies, so that it can never replace the torch already chosen.
$(ZOO_READY): $(READY) constraints-zoo.txt
	@$(PIP) install -c constraints.txt --no-deps torchvision pillow numpy
	@$(PIP) install -c constraints.txt -c constraints-zoo.txt timm transformers
	@touch $@

# torch by name and version, so that no collection can bring another.
$(ZOO_VENV_READY): constraints.txt constraints-zoo.txt
	@$(ZOO_VENV)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(ZOO_VENV)
	@$(ZOO_VENV)/bin/python -m pip -qq --disable-pip-version-check install -c constraints.txt -c constraints-zoo.txt \
		torch==2.13.0 numpy scipy torchvision timm transformers segmentation-models-pytorch monai einops \
		diffusers torch-geometric
	@touch $@
