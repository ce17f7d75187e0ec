# Everything here needs Python 3.11 or newer, make, and, for the audit, Java 17. `make help` lists the targets.
.DEFAULT_GOAL := help
.PHONY: help venv run stop demo test quick site lint types format bench bench-metaserver bench-failover bench-idle bench-scrape bench-neighbours bench-outbox bench-delay transcripts drawings console-pictures simulate mutants chaos audit-live clones delay-ledger history proto oldest lock clean
SHELL := /bin/bash

VENV ?= .venv
STAMP := $(VENV)/.installed
PY := $(VENV)/bin/python
QUICK := $(addprefix tests/unit/,log replication server broker delayserver metaserver) tests/golden tests/transcripts tests/property \
    tests/unit/test_architecture.py tests/unit/test_papers.py tests/unit/test_words.py tests/unit/test_states.py

AREA ?= qmq/log
TESTS ?= tests/unit/log tests/unit/replication tests/unit/broker tests/transcripts

PYTEST = $(PY) -m pytest -n $(or $(JOBS),4) --dist loadfile --no-loadscope-reorder

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:[^#]*## /\t/' | expand -t 12

venv: $(STAMP) ## set up .venv from requirements.lock, once

$(STAMP): requirements.lock pyproject.toml
	@deploy/venv.sh $(VENV)
	@touch $@

run: $(STAMP) ## a cluster on this machine, until Ctrl-C; its addresses are in .run/cluster.json
	@exec $(PY) -m qmq dev

stop: $(STAMP) ## stop what `make run` started
	@$(PY) -m qmq dev stop

demo: $(STAMP) ## produce, consume, lose a master, swap, audit; INPUT=file.csv or file.ndjson for your own rows
	@exec $(PY) -m qmq demo $(if $(INPUT),--input "$(INPUT)")

test: $(STAMP) ## all tests, JOBS (default 4) files at a time; ARGS="-k name" for some of them
	@deploy/test_packages.sh
	@$(PYTEST) $(or $(ARGS),--ignore tests/simulation)
	@$(if $(ARGS),,$(PYTEST) --dist load tests/simulation) # in processes without threads of other tests

quick: $(STAMP) ## cores, properties, formats and stories, with fewer random cases than `make test`: a minute and a half
	@QUICK=1 $(PY) -m pytest -q -n 2 --dist loadfile -m "not slow" $(QUICK) $(ARGS)

site: $(STAMP) ## the documentation as pages, in .run/site
	@docs/site/build.sh $(VENV)

lint: $(STAMP) ## ruff: rules and format
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check --quiet .

format: $(STAMP) ## put imports and blanks in order
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .

types: $(STAMP) ## mypy, strict
	@$(PY) -m mypy

bench: $(STAMP) ## speed: a table and .run/bench.json; ONLY=produce_1k,… QUICK=1 PEER=rabbitmq
	@exec $(PY) -m benchmarks $(if $(ONLY),--only "$(ONLY)") $(if $(QUICK),--quick) $(if $(PEER),--peer "$(PEER)")

bench-metaserver: $(STAMP) ## 100,000 subjects, 2,000 groups, 20,000 clients on one metaserver; .run/bench-metaserver.json QUICK=1
	@exec $(PY) -m benchmarks.metaserver $(if $(QUICK),--quick)

bench-delay: $(STAMP) ## a delay group: intake, lateness, memory, restart, loading; .run/bench-delay.json QUICK=1
	@exec $(PY) -m benchmarks.delay $(if $(QUICK),--quick)

bench-neighbours: $(STAMP) ## a quiet group's p99 beside each noisy neighbour; .run/bench-neighbours.json ONLY=retries,… QUICK=1
	@exec $(PY) -m benchmarks.neighbours $(if $(ONLY),--only "$(ONLY)") $(if $(QUICK),--quick)

bench-failover: $(STAMP) ## a master that is killed, or silent: time to the next delivery and acknowledgement; .run/bench-failover.json
	@exec $(PY) -m benchmarks.failover

bench-idle: $(STAMP) ## CPU time of each process of a cluster that has nothing to do, in a minute; .run/bench-idle.json
	@exec $(PY) -m benchmarks.idle

bench-scrape: $(STAMP) ## a page of metrics of a broker with 10,000 subjects, each with a consumer group; .run/bench-scrape.json
	@exec $(PY) -m benchmarks.scrape

bench-outbox: $(STAMP) ## ROWS (default 1000000) stuck in an outbox on MariaDB, beside an application; .run/bench-outbox.json
	@exec $(PY) -m benchmarks.outbox --rows "$(or $(ROWS),1000000)"

transcripts: $(STAMP) ## write tests/transcripts/*.txt anew after a change on purpose; review the diff
	@$(PY) -m tests.transcripts

drawings: $(STAMP) ## write the drawings of docs/states.md anew from the tables
	@$(PY) -m tests.drawings

console-pictures: $(STAMP) ## draw docs/console-*.png anew, of a real cluster on a bad night (Debian's Chromium)
	@exec $(PY) -m tests.integration.console_story docs

simulate: $(STAMP) ## everything that may go wrong, in virtual time, for SEEDS seeds (default 2000); SCENARIO=cores (default), clones, delay, metaserver or shells
	@$(PY) -m tests.simulation --scenario "$(or $(SCENARIO),cores)" --seeds "$(or $(SEEDS),2000)"

mutants: $(STAMP) ## nightly: small faults in AREA (default qmq/log), committed code, by cosmic-ray; those that TESTS miss are listed
	@git diff --quiet HEAD -- "$(AREA)" || { echo "$(AREA) has changes: commit first, the files are changed in place"; exit 1; }
	@mkdir -p .run && sed -e 's|AREA|$(AREA)|' -e 's|PYTHON|$(PY)|' -e 's|TESTS|$(TESTS)|' tests/mutants/cosmic-ray.toml > .run/cosmic-ray.toml
	@$(PY) -m cosmic_ray.cli init .run/cosmic-ray.toml .run/mutants.sqlite --force
	@$(PY) -m cosmic_ray.cli exec .run/cosmic-ray.toml .run/mutants.sqlite; git checkout -q -- "$(AREA)"
	@$(VENV)/bin/cr-report --surviving-only --show-diff .run/mutants.sqlite

chaos: $(STAMP) ## real processes killed, stopped and swapped for MINUTES minutes (default 10)
	@$(PY) -m qmq chaos --minutes "$(or $(MINUTES),10)"

audit-live: $(STAMP) ## RUNS (default 20) audits of a cluster that works, with swaps, failovers, seeding and restarts in the middle
	@$(PY) -m tests.chaos.audit_live --runs "$(or $(RUNS),20)"

clones: $(STAMP) ## copies of data directories run beside their brokers, ROUNDS times (default 50) in four groups
	@$(PY) -m tests.chaos.clones --rounds "$(or $(ROUNDS),50)"

delay-ledger: $(STAMP) ## MESSAGES (default 100000) come due while delay servers are killed 20 times and swapped 5 times
	@$(PY) -m tests.chaos.delay_trial --messages "$(or $(MESSAGES),100000)"

history: $(STAMP) ## MESSAGES (default 1000000), RATE a second (default 2500), through real processes and faults, and a judge of what consumers saw; COPIES=3: swaps and failovers
	@$(PY) -m qmq chaos --dir .run/history --keys 10000 --messages "$(or $(MESSAGES),1000000)" --rate "$(or $(RATE),2500)" --copies "$(or $(COPIES),2)" --seed "$(or $(SEED),1)"

proto: $(STAMP) ## regenerate qmq/proto from qmq.proto
	@$(PY) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. qmq/proto/qmq.proto
	@# What was generated runs on older versions, too: `make oldest` tries it. The generator refuses them.
	@sed -i '/import runtime_version/d; /^_runtime_version.Validate/,/^)/d' qmq/proto/qmq_pb2.py
	@sed -i "s/^GRPC_GENERATED_VERSION = .*/GRPC_GENERATED_VERSION = '1.66.0'/" qmq/proto/qmq_pb2_grpc.py

oldest: $(STAMP) ## the client's unit tests with the oldest grpcio and protobuf that pyproject.toml allows
	@$(PY) -m venv .run/oldest
	@# The oldest with a wheel for this Python.
	@.run/oldest/bin/pip install -q --only-binary=:all: protobuf==5.26.1 "grpcio==1.66.0; python_version < '3.13'" \
	    "grpcio==1.66.2; python_version == '3.13'" "grpcio==1.75.1; python_version > '3.13'"
	@$(PY) -c "import site; print('$(CURDIR)'); print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" > .run/oldest.pth
	@mv .run/oldest.pth .run/oldest/lib/python3.*/site-packages/
	@# Old grpcio also reports a harmless BlockingIOError of a second event loop in a process.
	@.run/oldest/bin/python -m pytest -q -p tests.support.old_grpcio -W ignore::pytest.PytestUnraisableExceptionWarning $(addprefix tests/unit/client/test_,producer.py listener.py route_watch.py puller.py tokens.py)

lock: ## write requirements.lock anew: the newest versions that pyproject.toml allows
	@deploy/lock.sh $(VENV)

clean: ## remove what can be made again; a stopped cluster's data in .run too
	@if [ -e $(PY) ]; then $(PY) -m qmq dev stop; fi
	@rm -rf $(VENV) .run build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse
