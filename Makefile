# make demo and make test need the Rust toolchain and make; they install what else is missing (scripts/setup.sh).

.PHONY: demo test wheel torch-matrix header bench elastic format ci ci-full gpu-build clean

demo: ## the main job on the driver at hand: a GPU if there is one, else this machine's memory
	@scripts/setup.sh demo
	cargo build --locked --release --quiet -p vmmgraph-demo
	@# Not by cargo run, whose library path may show the tests' stand-in for libcuda.
	target/release/vmmgraph-demo --json build/demo.json

test: ## every test that needs no GPU: Rust, C, C++, the installed package
	@scripts/setup.sh test
	scripts/test.sh

wheel: ## a Python wheel in build/wheels, with a library for each torch release; RELEASES="2.10 2.11-cu13" names some
	@scripts/setup.sh test
	scripts/wheel.sh $(RELEASES)

torch-matrix: ## compiles cpp/torch against every torch release that is supported, and the newest one
	@scripts/setup.sh test
	tests/torch/matrix.sh

header: ## writes include/vmmgraph/vmmgraph.h anew after a change in src/capi
	UPDATE_EXPECT=1 cargo test --locked -p vmmgraph-header

bench: ## host costs of spaces and blocks, with their limits
	cargo bench --locked -p vmmgraph-benches

elastic: ## elastic memory's policies under simulated traffic: docs/elastic.md
	@mkdir -p build
	cargo run --locked --release -p vmmgraph-elastic-sim -- --seconds 120 --svg docs/elastic.svg --table build/elastic.md --json build/elastic.json

format: ## rustfmt, clang-format (all but the generated header) and ruff
	@scripts/setup.sh test
	cargo fmt --all
	git ls-files -z '*.cpp' '*.hpp' '*.h' '*.c' ':!include/vmmgraph/vmmgraph.h' | xargs -0 .venv/bin/clang-format -i
	git ls-files -z '*.py' | xargs -0 .venv/bin/ruff format --quiet

ci: ## what CI runs
	.ci/run

ci-full: ## what a person runs before a release, behind ci: every torch release, sanitizers, other platforms, long fuzzing
	.ci/full

gpu-build: ## collects what scripts/gpu.sh runs on a GPU machine
	@scripts/setup.sh test
	scripts/gpu.sh build

clean:
	rm -rf build target
