# Two commands on a fresh machine: `make demo` and `make test`. Each builds its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FREE_GB = $$(df -Pk $(dir $(abspath $(VENV))) | awk 'NR == 2 {print int($$4 / 1000000)}')

.PHONY: help demo test test-slow lint install lock clean

help:
	@echo "make demo       the whole road in minutes: pack, train, evaluate, table, figures, MLflow runs"
	@echo "make test       the default test suite (make test-slow: the long tests)"
	@echo "make lint       ruff and mypy"
	@echo "make install    only the environment, in $(VENV)"
	@echo "make lock       renew constraints.txt from a fresh resolution of pyproject.toml"

demo: $(STAMP)
	$(BIN)/procap demo

test: $(STAMP)
	$(BIN)/python -m pytest

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

install: $(STAMP)

# The stamp is written last, so that an interrupted installation is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else 0'
	@mkdir -p $(dir $(abspath $(VENV)))
	@test -x $(BIN)/python || test $(FREE_GB) -ge 8 || \
		{ echo "$(VENV) takes 7 GB, $(FREE_GB) are free there; make room, or try: make VENV=/elsewhere/venv ..."; exit 1; }
	@test -x $(BIN)/python || echo "Creating $(VENV) and installing (two to four minutes, about 7 GB; 4 GB more on the way)"
	@$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

lock:
	@rm -rf $(VENV)-lock && $(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check '.[dev]'
	@( sed -n '/^#/p' constraints.txt; $(VENV)-lock/bin/python -m pip freeze --exclude procap-bench ) > constraints.new
	@mv constraints.new constraints.txt && rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) demo build *.egg-info
