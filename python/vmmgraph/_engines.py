"""Recorded runs of engines on a GPU: read by `vmmgraph doctor`, the engine plugins and
``scripts/compatibility.py``, which writes ``docs/compatibility.md``."""

from __future__ import annotations

import importlib.metadata
from typing import NamedTuple


class Run(NamedTuple):
    """One run with its record in ``docs/performance.md``. Only runs that took place are listed."""

    engine: str
    #: Version as recorded; shorter if its last parts were not recorded.
    version: str
    torch: str
    #: ISO date. `by` says that only the latest possible date was recorded.
    date: str
    command: str
    result: str
    #: Heading of the record.
    record: str
    device: str = "H200"
    who: str = "VmmGraph"


_VLLM = "bench/python/vllm_run.py --compare"
_SGLANG = "bench/python/sglang_run.py --compare"
_OTHER = "Other releases of torch"
RUNS = (
    Run(
        "vllm",
        "0.24.0",
        "2.11.0+cu130",
        "2026-11-28",
        f"{_VLLM} --modes full,default",
        "the same 12,258 tokens as stock",
        "vLLM 0.24.0, unmodified",
    ),
    Run(
        "vllm",
        "0.24.0",
        "2.11.0+cu130",
        "2026-11-28",
        f"{_VLLM} --kv --size 8b --modes default",
        "the same 26,239 tokens as stock",
        "vLLM 0.24.0: KV cache after its captures",
    ),
    Run(
        "vllm",
        "0.24.0",
        "2.11.0+cu130",
        "2026-11-29",
        "bench/python/vllm_run.py --kv --lora, and --kv --size 6b --behind",
        "the same 3,691 and 8,523 tokens as stock",
        "vLLM 0.24.0: LoRA, and captures behind the traffic",
    ),
    Run(
        "vllm",
        "0.24.0",
        "2.11.0+cu130",
        "2026-11-29",
        "bench/python/vllm_run.py --kv --mode full, with --size moe, --ngram and --length 32768",
        "the same 3,691 tokens as stock in each, 1.072 to 1.084 x the KV tokens",
        "vLLM 0.24.0: experts, n-gram drafts, 32k tokens, mixed traffic",
    ),
    Run(
        "vllm",
        "0.33.0",
        "2.14.0+cu130",
        "2026-11-29",
        f"{_VLLM} --modes full,breakable",
        "the same 12,258 tokens as stock",
        "vLLM 0.33.0",
    ),
    Run(
        "vllm",
        "0.33.0",
        "2.14.0+cu130",
        "2026-11-29",
        f"{_VLLM} --kv --size 8b --modes full",
        "the same 6,312 tokens as stock, 1.089 x the KV tokens",
        "vLLM 0.33.0",
    ),
    Run(
        "vllm",
        "0.33.0",
        "2.14.0+cu130",
        "2026-11-29",
        "VMMGRAPH_CAPTURE=behind bench/python/vllm_run.py --kv --mode full --behind",
        "the same 8,523 tokens as stock, ready 3.9 s earlier",
        "vLLM 0.33.0",
    ),
    Run(
        "sglang",
        "0.5.14",
        "2.11.0+cu130",
        "2026-11-28",
        f"{_SGLANG} --modes decode,breakable",
        "the same 3,711 tokens as stock",
        "SGLang 0.5.14",
    ),
    Run(
        "sglang",
        "0.5.14",
        "2.11.0+cu130",
        "2026-11-28",
        f"{_SGLANG} --kv --modes breakable",
        "the same 3,711 tokens as stock, 1.046 x the KV tokens",
        "SGLang 0.5.14",
    ),
    Run(
        "sglang",
        "0.5.14",
        "2.11.0+cu130",
        "2026-11-29",
        "bench/python/sglang_run.py --together --modes decode,piecewise,ngram,standalone,eagle --requests 64",
        "the same 1,673 tokens as stock in five modes",
        "SGLang 0.5.14",
    ),
    Run(
        "sglang",
        "0.5.23",
        "2.14.0+cu130",
        "2026-11-29",
        "bench/python/sglang_run.py --together --modes decode,breakable --requests 64",
        "the same 1,673 tokens as stock in two modes",
        "SGLang 0.5.23",
    ),
    Run(
        "transformers",
        "5",
        "2.11.0+cu130",
        "by 2026-11-23",
        "tests/python/test_gpu.py",
        "continuous batching, the same 2,304 tokens",
        "Other engines",
    ),
    Run(
        "torch",
        "2.11.0",
        "2.11.0+cu130",
        "2026-11-28",
        "scripts/gpu.sh run",
        "the suites listed in the record",
        "Latest test runs",
    ),
    Run("torch", "2.12.1", "2.12.1", "2026-11-28", "scripts/gpu_release.sh", "torch_test 49, test_gpu.py 48", _OTHER),
    Run("torch", "2.13.0", "2.13.0", "2026-11-27", "scripts/gpu_release.sh", "torch_test 49, 8 of test_gpu.py", _OTHER),
    Run("torch", "2.14.1", "2.14.1", "2026-11-27", "scripts/gpu_release.sh", "torch_test 49, test_gpu.py 48", _OTHER),
    Run("torch", "2.15.0", "2.15.0", "2026-11-27", "scripts/gpu_release.sh", "torch_test 49, test_gpu.py 48", _OTHER),
)
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers"}
#: Leading parts of a version that identify a release with equal internals.
PARTS = {"vllm": 2, "sglang": 3, "transformers": 1}
REMEDY = "compare the tokens of one run with and without VMMGRAPH=1 before you rely on it"


def _series(engine: str, version: str) -> str:
    return ".".join(version.split(".")[: PARTS[engine]])


def ran(engine: str) -> list[str]:
    """Returns the release series of an engine with a recorded run, such as ``0.24``."""
    return sorted({_series(engine, run.version) for run in RUNS if run.engine == engine})


def outside(engine: str, version: str) -> str | None:
    """Returns a sentence if no recorded run has this release of the engine; `None` if one has."""
    series = ran(engine)
    if _series(engine, version) in series:
        return None
    return f"{NAMES[engine]} {version} was never run with VmmGraph; releases with a recorded run: {', '.join(series) or 'none'}"


def installed(engine: str) -> str | None:
    """Returns the version of the installed engine, or `None`."""
    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return None
