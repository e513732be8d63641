# Two commands on a fresh machine: `make demo` and `make test`. Each creates the virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Without cached bytecode each of the many processes that tests start would compile all that it imports, torch included.
unexport PYTHONDONTWRITEBYTECODE
# Of PyTorch, uv takes the builds for CPUs: 2 GB instead of 7.
CPU ?=
BACKEND := $(if $(CPU),--torch-backend cpu)
NEEDED_GB := $(if $(CPU),3,8)
FREE_GB = $$(df -Pk $(dir $(abspath $(VENV))) | awk 'NR == 2 {print int($$4 / 1000000)}')

.PHONY: help demo test test-slow lint install lock clean

help:
	@echo "make demo       pack, train, evaluate, print the table, draw the plots (about two minutes on two cores)"
	@echo "make test       run the default test suite (make test-slow: the slow tests)"
	@echo "make lint       run ruff and mypy"
	@echo "make install    create the environment in $(VENV), nothing else; CPU=1 with any of these: without CUDA"
	@echo "make lock       resolve pyproject.toml again and rewrite constraints.txt"

demo: $(STAMP)
	$(BIN)/procap demo

test: $(STAMP)
	$(BIN)/python -m pytest

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not gpu"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

install: $(STAMP)

# By path, so that a folder called `shards` in the working directory does not replace the package.
# uv installs in a third of pip's time. Where it is not available or cannot reach the package index, pip does the same.
# The stamp is written last, so that an interrupted installation is repeated.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else 0'
	@mkdir -p $(dir $(abspath $(VENV)))
	@test -x $(BIN)/python || test $(FREE_GB) -ge $(NEEDED_GB) || \
		{ echo "$(VENV) needs $(NEEDED_GB) GB, $(FREE_GB) are free there; make room, or try: make VENV=/elsewhere/venv ..."; exit 1; }
	@test -x $(BIN)/python || echo "Creating $(VENV) and installing (one minute with uv, four with pip; $(if $(CPU),2,7) GB)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --constraint constraints.txt uv 2>/dev/null || echo "uv cannot be installed; using pip"
	@$(BIN)/uv pip install --quiet $(BACKEND) --python $(BIN)/python --constraint constraints.txt --config-setting editable_mode=compat --editable '.[dev]' || \
		{ test -z "$(CPU)" || { echo "CPU=1 needs uv and the index of PyTorch's CPU builds; try: make demo"; exit 1; }; \
		$(PIP) --constraint constraints.txt --config-settings editable_mode=compat --editable '.[dev]'; }
	@touch $@

lock:
	@rm -rf $(VENV)-lock && $(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check '.[dev]'
	@( sed -n '/^#/p' constraints.txt; $(VENV)-lock/bin/python -m pip freeze --exclude procap-bench ) > constraints.new
	@mv constraints.new constraints.txt && rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) demo build *.egg-info
