# Every target gets what it needs by itself: see scripts/setup.

CARGO ?= cargo
FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 600
# More options for cargo-mutants: --list, --shard 1/8, --in-diff FILE …
MUTANTS ?=
# Options of `make mutants-all`: --files PART …, --again, --histories N (scripts/mutants says what they do).
MUTANTS_ALL ?=
# How many mutants `make mutants-sample` draws, and which: another seed draws others.
SAMPLE ?= 200
SAMPLE_SEED ?= 14

# Where the tests find what scripts/setup got. scripts/with-rabbitmq adds
# VRAMQ_TEST_AMQP_URL and VRAMQ_TEST_MANAGEMENT_URL.
export VRAMQ_TEST_MODEL := $(CURDIR)/models/all-MiniLM-L6-v2
export VRAMQ_TEST_NVRTC := $(CURDIR)/.cache/nvrtc/lib
export VRAMQ_TEST_CUDA_TOOLS := $(CURDIR)/.cache/cuda-tools
export VRAMQ_TEST_PYTHON := $(CURDIR)/.cache/python/bin/python
export VRAMQ_TEST_PACKAGE := $(CURDIR)/.cache/package/bin/python
export VRAMQ_TEST_PACKAGE_OLDEST := $(CURDIR)/.cache/package-oldest/bin/python
export VRAMQ_TEST_NODE := $(CURDIR)/.cache/node/bin/node
export VRAMQ_TEST_NODE_MODULES := $(CURDIR)/.cache/node/node_modules
export VRAMQ_TEST_NODE_PACKAGE := $(CURDIR)/.cache/node-package/node_modules
export VRAMQ_TEST_CHROMIUM ?= chromium
export VRAMQ_TEST_PROMETHEUS := $(CURDIR)/.cache/prometheus
export VRAMQ_TEST_PROGRAMS_PYTHON := $(CURDIR)/.cache/programs/bin/python
export VRAMQ_TEST_STORES := $(CURDIR)/.cache/stores
export VRAMQ_BENCH_PYTHON := $(CURDIR)/.cache/peers/bin/python

# Simulated hours, each with a thousand jobs and ten faults: docs/simulation.md.
export VRAMQ_TEST_HISTORIES := 1000

# What `make dist` builds for: x86_64 or aarch64. Another architecture than this machine's has a folder of its own.
ARCH ?= $(shell uname -m)
DIST := target/dist$(addprefix -,$(filter-out $(shell uname -m),$(ARCH)))

# What tests need of scripts/setup besides a broker.
TEST_NEEDS := rust cxx nvrtc python package package-oldest node node-package prometheus terminal model small-models
# Without them scripts/test says which tests did not run.
CUDA_TOOLS := scripts/setup cuda-tools || true
# --all-targets: `cargo test` alone leaves out Cargo's lists of the programs' sources, which the tests read.
BUILD := $(CARGO) build --workspace --all-targets --locked
# By the target's name, which only one package has. With -p the dependencies would have other features, and be built a second time.
TESTS := $(CARGO) test --workspace --locked

ifdef SEED
SIM_ARGS ?= --seed $(SEED)
endif
ifdef PLAN
SIM_ARGS ?= --plan $(PLAN)
endif
SIM_ARGS ?= --minutes $(or $(MINUTES),10) --processes $(shell nproc)

MODEL_SCRIPTS := $(CARGO) test --locked -p vramq-testkit --test broker_model -- --ignored --nocapture
define MODEL_ON_4
if scripts/setup rabbitmq4; then \
	VRAMQ_RABBITMQ=node4 scripts/with-rabbitmq $(MODEL_SCRIPTS) five_hundred_scripts; \
else \
	echo "the model of RabbitMQ was not checked on RabbitMQ 4, which cannot be installed here"; \
fi
endef

# RabbitMQ waits for the disk at each message that it confirms, queue and virtual host, which a disk makes the longest part of many tests.
# `make nightly` has the disk.
IN_MEMORY := VRAMQ_RABBITMQ_FOLDERS="$$(scripts/memory-folder)"

# Other versions of RabbitMQ need root and a Debian mirror, so where there is none this says so and is content.
define TEST_ON
if scripts/setup rabbitmq$(1); then \
	$(BUILD) && $(IN_MEMORY) VRAMQ_RABBITMQ=node$(1) scripts/with-rabbitmq scripts/test; \
else \
	echo "$@: skipped, because this RabbitMQ cannot be installed here"; \
fi
endef

# The task of docs/celery.md with Celery and PyTorch themselves.
CELERY_BEFORE := scripts/with-rabbitmq .cache/peers/bin/python tests/foreign/celery_before.py models

.PHONY: help demo test test-compose test-cluster test-upgrade test-page pictures sim test-rabbitmq4 test-rabbitmq43 test-model nightly test-published test-install test-pytorch test-programs test-stores soak lint portable bench fuzz mutants mutants-all mutants-sample site site-pictures man dist images test-dist test-deb test-systemd

help: ## Show this help
	@echo "usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-16s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Start RabbitMQ and two workers, embed a few thousand sentences, show neighbours
	@scripts/demo

test: ## Check format, lints, scripts and the site; run all tests against the real model and a private RabbitMQ
	@scripts/setup $(TEST_NEEDS) rabbitmq
	@$(CUDA_TOOLS)
	@scripts/lint quick
	@if scripts/setup mdbook; then $(MAKE) --no-print-directory site; fi
	@$(BUILD)
	@$(IN_MEMORY) scripts/with-rabbitmq scripts/test

sim: ## Simulate fleets of workers: MINUTES=10 of random histories; SEED=7 or PLAN=FILE with its trace
	@$(CARGO) run --quiet --locked -p vramq-testkit --bin vramq-sim -- $(SIM_ARGS)

test-rabbitmq4: ## Run all tests against RabbitMQ 4.0
	@scripts/setup $(TEST_NEEDS)
	@$(call TEST_ON,4)

test-rabbitmq43: ## Run all tests against RabbitMQ 4.3
	@scripts/setup $(TEST_NEEDS)
	@$(call TEST_ON,43)

test-model: ## Check the model of RabbitMQ by 500 random scripts on each type of queue; on RabbitMQ 4, too, where that can be installed
	@scripts/setup rust rabbitmq
	@scripts/with-rabbitmq $(MODEL_SCRIPTS)
	@$(MODEL_ON_4)

test-compose: ## Build the images of docker-compose.yml, use what it starts, run the README's commands in a container (Docker, or root to install it)
	@scripts/test-compose

test-cluster: ## Run deploy/kubernetes and the Helm chart on the cluster of kubectl's context: WORKER=IMAGE GATEWAY=IMAGE
	@scripts/setup model
	@scripts/test-cluster $(WORKER) $(GATEWAY)

test-upgrade: ## Build the version before this one; upgrade from it and back, with programs of both and a client that publishes all the time
	@scripts/setup rust python package rabbitmq
	@$(CARGO) build --workspace --locked --bins
	@$(IN_MEMORY) scripts/test-upgrade target/debug

test-page: ## Run the tests of the operators' page in Chromium
	@scripts/setup $(TEST_NEEDS) chromium rabbitmq
	@$(BUILD)
	@scripts/with-rabbitmq $(TESTS) --test http -- --ignored page::

pictures: ## Take the pictures in docs/images again: the operators' page, a terminal, a device's memory
	@VRAMQ_TEST_PICTURES=$(CURDIR)/docs/images $(MAKE) test-page
	@scripts/with-rabbitmq scripts/record target/debug
	@scripts/with-rabbitmq scripts/memory-picture target/debug

nightly: ## Run all tests at full length, those included that take minutes each or need PyTorch (several GB)
	@scripts/setup $(TEST_NEEDS) cuda-tools chromium programs stores peers rabbitmq
	@$(BUILD)
	@scripts/with-rabbitmq scripts/test nightly
	@$(CELERY_BEFORE)
	@$(MODEL_ON_4)
	@scripts/check-published
	@scripts/check-install --debug

test-published: ## Build the crates that are published without the patches of third-party/, and see that programs say so (crates.io)
	@scripts/check-published

test-install: ## Install the programs as docs/deploying.md says for somebody without a clone, by cargo and git (crates.io, half an hour)
	@scripts/check-install

test-pytorch: ## Run process models, and the task of docs/celery.md with Celery, on real PyTorch (several GB)
	@scripts/setup rust model peers rabbitmq
	@$(CELERY_BEFORE)
	@$(BUILD)
	@$(TESTS) --test process -- --ignored pytorch::
	@scripts/with-rabbitmq $(TESTS) --test jobs -- --ignored frameworks::pytorch

test-programs: ## Run process models on real ONNX Runtime, ImageMagick, PocketSphinx and Whisper
	@scripts/setup rust programs rabbitmq
	@$(BUILD)
	@$(TESTS) --test process -- --ignored programs::
	@scripts/with-rabbitmq $(TESTS) --test jobs -- --ignored frameworks::onnx speech:: whisper::

test-stores: ## Read and write objects by the protocols of Azure, with Azurite (some 400 MB), and of Google
	@scripts/setup rust node stores
	@$(CARGO) test --locked -p vramq-stores --test clouds -- --ignored

soak: ## Run the random tests of memory and of failures for SOAK_SECONDS (600) each, per kind of queue
	@scripts/setup rust python rabbitmq
	@$(BUILD)
	@VRAMQ_SOAK_SECONDS=$(SOAK_SECONDS) scripts/with-rabbitmq $(TESTS) \
		--test memory --test reliability -- --nocapture --test-threads 1 soak:: ledger::

lint: ## Check format, lints, dependencies, shell scripts, the compose file and the Kubernetes manifests
	@scripts/lint

portable: ## Check the encoder on AMX if it is here, and on other CPUs by QEMU: no AVX, AVX2 alone, aarch64
	@scripts/setup rust portable
	@scripts/portable

bench: ## Compare with named references in one run: a table, and JSON and plots in target/bench
	@scripts/setup rust python rabbitmq model peers
	@$(CARGO) build --release --locked --workspace
	@scripts/with-rabbitmq $(CARGO) run --release --locked -p vramq-bench
	@scripts/plots target/bench/bench.json target/bench

fuzz: ## Feed random bytes to the decoders for FUZZ_SECONDS (60)
	@scripts/fuzz $(FUZZ_SECONDS)

mutants: ## Change the decisions in worker/core one by one; list what no test notices in target/mutants.out
	@scripts/setup mutants
	@PATH="$(CURDIR)/.cache/mutants/bin:$$PATH" $(CARGO) mutants --package vramq-core --output target $(MUTANTS)

mutants-all: ## All mutants of worker/core: which do its own tests notice, and of the others the simulation? Tables in target/mutants
	@scripts/setup mutants
	@.cache/mutants/bin/python scripts/mutants $(MUTANTS_ALL)

mutants-sample: ## Which of SAMPLE (200) mutants of worker/core does the simulation notice, which its own tests? Tables in target/mutants
	@scripts/setup mutants
	@.cache/mutants/bin/python scripts/mutants --sample $(SAMPLE) --seed $(SAMPLE_SEED)

site: ## Build the documentation as a site in target/book, and check its links
	@scripts/setup mdbook
	@.cache/mdbook/bin/mdbook build
	@cp .cache/mdbook/mermaid.min.js target/book/
	@scripts/check-site target/book

site-pictures: site ## Take pictures of the site's pages in target/pictures (Chromium)
	@scripts/setup node chromium
	@.cache/node/bin/node scripts/site-pictures.mjs target/book target/pictures

man: ## Write manual pages and shell completions to target/share
	@scripts/setup rust
	@$(CARGO) build --release --locked --workspace --bins
	@scripts/man target/release target/share

dist: ## Build a release in target/dist: archive, Debian packages, wheel, npm package, checksums; ARCH=aarch64 builds one in target/dist-aarch64
	@scripts/setup rust zig python node
	@scripts/build-release $(ARCH)
	@scripts/dist $(ARCH) $(DIST)

test-dist: dist ## Build a release, and run jobs through the programs of the archive; those for another ARCH by QEMU
	@scripts/check-dist $(DIST)

images: ## Build the images of worker and gateway for REGISTRY; print their ids, and their digests once they are pushed (Docker)
	@scripts/images $(REGISTRY)

test-deb: dist ## Build a release, and install the Debian packages in a fresh Debian and use them there (root, a Debian mirror)
	@scripts/check-deb $(DIST)

test-systemd: dist ## Build a release, and have systemd run its services in a fresh Debian in a container (root, a Debian mirror)
	@scripts/setup rabbitmq
	@scripts/with-rabbitmq scripts/check-systemd $(DIST)
