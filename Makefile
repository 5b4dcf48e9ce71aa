# `make demo` and `make test` work in a fresh clone; each sets up what it needs. Everything lives in .venv and build/.
PYTHON ?=
PY := .venv/bin/python
export PYTHON
# With it, each process would compile our modules, and each pytest rewrite all assertions, anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-light setup-engines native generate generate-protos check-generated lint check test test-full test-light demo demo-two-hosts bench bench-peers test-sanitizers test-fake-gpu test-gpu test-vllm test-workload test-autostart test-audits test-remote test-sglang test-security test-vllm-all test-vllm-suites test-deploy test-faults test-faults-short test-faults-long docs figures pictures locks wheels clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' Makefile

setup: ## make .venv: tools, the project (editable), vLLM for the CPU; a second run does nothing
	@tools/setup.sh full

setup-light: ## the same without vLLM
	@tools/setup.sh light

setup-engines: ## the same with vLLM and SGLang, both for the CPU
	@tools/setup.sh sglang

native: ## rebuild and reinstall the native module, incrementally
	@tools/setup.sh native

generate: setup-light ## regenerate the protobuf code and the native module's type stub
	@$(PY) tools/generate.py

generate-protos: ## the protobuf code only; needs no built module
	@tools/setup.sh tools && $(PY) tools/generate.py --protos-only

check-generated: setup-light ## fail if committed generated code is out of date
	@$(PY) tools/generate.py --check

lint: ## ruff, mypy --strict, import contracts; needs no built module
	@tools/setup.sh tools && $(PY) -m tools.check lint

check: setup-light ## lint, unit tests, a short simulation: two minutes, for every change while it grows
	@$(PY) -m tools.check check

test: setup-engines ## everything that must hold before a change is merged: 15 minutes on two cores
	@$(PY) -m tools.check test

test-full: setup-engines ## all of that, and the long form of what has one: before a release (an hour and a half, 12 GB)
	@$(PY) -m tools.check full

test-light: setup-light ## the tests that need no engine: on every Python from 3.11 to 3.13, and on aarch64
	@$(PY) -m tools.check light

demo: setup ## two engines, one cache: the story of the README, on this machine
	@$(PY) -m tools.demo

demo-two-hosts: setup ## what an engine of one host computed, one of another host gets back from what they share
	@$(PY) -m tools.demo_two_hosts

bench: setup-light ## the speed figures that need no GPU; the last line is JSON
	@$(PY) -m tests.benchmarks

bench-peers: setup ## kvtier beside LMCache, Mooncake and a memcpy, in one run of half an hour: a report with plots, in build/peers
	@$(PY) -m tests.benchmarks.peers $(PEERS_FLAGS)

test-sanitizers: setup-light ## the native core under address, undefined-behaviour and thread sanitizers
	@tests/sanitizers/run.sh

test-fake-gpu: setup ## the GPU data plane on a double of the CUDA driver, 200 kills and more; needs no GPU
	@$(PY) -m tools.check fake-gpu

test-gpu: ## on a machine with an NVIDIA GPU, no network needed: build, check every byte, measure (tests/gpu/README.md)
	@$(or $(PYTHON),$(if $(wildcard $(PY)),$(PY),python3)) tests/gpu/run.py $(GPU_FLAGS)

test-vllm: setup ## real vLLM engines and schedulers, of the version that CI has
	@$(PY) -m tools.check vllm

test-remote: ## hosts that share a store: a folder, a real S3 server and Mooncake Store, real engines, and everything that may fail there
	@tools/setup.sh remote && $(PY) -m tools.check remote

test-sglang: setup-engines ## a real SGLang stores, is killed and restores, with a daemon in trouble and several ranks (8 minutes)
	@$(PY) -m tools.check sglang

test-workload: setup ## more than 10,000 random requests on real engines in trouble, several models and seeds (12 minutes)
	@$(PY) -m tools.check workload

test-security: setup-light ## attacks by users of one host, hostile input, quotas, fuzzing; as root, or those with two users are left out
	@$(PY) -m tools.check security

test-audits: setup ## 3,000 audits of real engines of every family that runs here: no false alarm (15 minutes)
	@$(PY) -m tools.check audits

test-vllm-all: setup-light ## the connector under the scheduler of every vLLM that it supports, 0.29 to 0.33 (12 GB, half an hour)
	@$(PY) -m tools.vllm_versions

test-autostart: setup ## servers that started a daemon end in every way there is, and it goes on (ten minutes)
	@$(PY) -m tools.check autostart

test-vllm-suites: setup ## vLLM's own tests of connectors, fetched and pointed to ours
	@$(PY) -m tools.vllm_suites

test-deploy: setup-light ## as an operator would: systemd, containers, Kubernetes, Prometheus, packages; as root, on Debian
	@$(PY) -m tools.check deploy

test-faults: setup ## the fault suite at full length (an hour and more): counts, the last line is JSON
	@$(PY) -m tools.faults long

test-faults-short: setup ## the same tests, each campaign a few rounds, as in `make test`
	@$(PY) -m tools.faults short

test-faults-long: test-faults

docs: ## the documentation site, into build/site; fails on a link or an anchor that leads nowhere
	@tools/setup.sh tools && $(PY) -m tools.docs_site

figures: ## the plots in docs/figures, drawn anew from the numbers there
	@tools/setup.sh tools && .venv/bin/uv run --quiet --no-project --python $(PY) --with 'matplotlib>=3.10,<4' -m tools.draw_figures

pictures: setup ## the pictures of the dashboard in docs/: ten minutes of real engines, on Debian (its Prometheus)
	@$(PY) -m tests.deploy.picture --out docs

locks: ## the versions and hashes of what the image is made of, anew, from the package index
	@tools/setup.sh tools && $(PY) -m tools.locks

wheels: setup-light ## what a release consists of, into dist/: the sdist, and a manylinux wheel for each Python at hand
	@$(PY) -m tools.wheels

clean: ## remove builds and caches, keep .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
