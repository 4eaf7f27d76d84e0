# Every target gets what it needs by itself: see scripts/setup.

CARGO ?= cargo
FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 600

# Where the tests find what scripts/setup got. scripts/with-rabbitmq adds
# VRAMQ_TEST_AMQP_URL and VRAMQ_TEST_MANAGEMENT_URL.
export VRAMQ_TEST_MODEL := $(CURDIR)/models/all-MiniLM-L6-v2
export VRAMQ_TEST_NVRTC := $(CURDIR)/.cache/nvrtc/lib
export VRAMQ_TEST_PYTHON := $(CURDIR)/.cache/python/bin/python
export VRAMQ_TEST_NODE := $(CURDIR)/.cache/node/bin/node
export VRAMQ_TEST_NODE_MODULES := $(CURDIR)/.cache/node/node_modules
export VRAMQ_TEST_PROMETHEUS := $(CURDIR)/.cache/prometheus
export VRAMQ_BENCH_PYTHON := $(CURDIR)/.cache/peers/bin/python

ifdef SEED
SIM_ARGS ?= --seed $(SEED)
endif
SIM_ARGS ?= --minutes $(or $(MINUTES),10) --processes $(shell nproc)

.PHONY: help demo test sim test-rabbitmq4 soak lint portable bench fuzz man

help: ## Show this help
	@echo "usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-16s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Start RabbitMQ and two workers, embed a few thousand sentences, show neighbours
	@scripts/demo

test: ## Run all tests against the real model and a private RabbitMQ
	@scripts/setup rust cxx nvrtc python node rabbitmq prometheus terminal model
	@# --all-targets: `cargo test` alone leaves out Cargo's lists of the programs' sources.
	@$(CARGO) build --workspace --all-targets --locked
	@scripts/with-rabbitmq $(CARGO) test --workspace --locked --no-fail-fast

# RabbitMQ 4 needs root and a Debian mirror, so where there is none this says so and is content.
sim: ## Simulate fleets of workers: MINUTES=10 of random histories, or SEED=7 with its trace
	@$(CARGO) run --quiet --locked -p vramq-testkit --bin vramq-sim -- $(SIM_ARGS)

test-rabbitmq4: ## Run the end-to-end tests against RabbitMQ 4
	@scripts/setup rust cxx nvrtc python node prometheus terminal model
	@if scripts/setup rabbitmq4; then \
		$(CARGO) build --workspace --all-targets --locked && \
		VRAMQ_RABBITMQ=node4 scripts/with-rabbitmq $(CARGO) test --workspace --locked --no-fail-fast; \
	else \
		echo "test-rabbitmq4: skipped, because RabbitMQ 4 cannot be installed here"; \
	fi

soak: ## Run the random tests of memory and of failures for SOAK_SECONDS (600) each, per kind of queue
	@scripts/setup rust python rabbitmq
	@$(CARGO) build --workspace --all-targets --locked
	@VRAMQ_SOAK_SECONDS=$(SOAK_SECONDS) scripts/with-rabbitmq \
		$(CARGO) test --workspace --locked --test soak --test ledger -- --nocapture --test-threads 1

lint: ## Check format, lints, dependencies, shell scripts, the compose file and the Kubernetes manifests
	@scripts/lint

portable: ## Check the encoder on CPUs that this machine is not, by QEMU: no AVX, AVX2 alone, aarch64
	@scripts/setup rust portable
	@scripts/portable

bench: ## Compare with named references in one run: a table, and JSON in target/bench
	@scripts/setup rust python rabbitmq model peers
	@$(CARGO) build --release --locked --workspace
	@scripts/with-rabbitmq $(CARGO) run --release --locked -p vramq-bench

fuzz: ## Feed random bytes to the decoders for FUZZ_SECONDS (60)
	@scripts/fuzz $(FUZZ_SECONDS)

man: ## Write manual pages and shell completions to target/share
	@scripts/setup rust
	@$(CARGO) build --release --locked --workspace --bins
	@scripts/man target/release target/share
