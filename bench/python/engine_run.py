"""Parts of vllm_run.py and sglang_run.py: plugins, weights, digests and times."""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

MIB = 1 << 20


def install_entry_points(group: str, plugins: Mapping[str, str]) -> None:
    """Writes the metadata of a pip installation to the path of this process and its workers."""
    from importlib.metadata import entry_points

    there = {point.name for point in entry_points(group=group)}
    folder = Path(tempfile.mkdtemp())
    for name, point in plugins.items():
        if name not in there:
            info = folder / f"{name}-0.1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
            (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {point}\n")
    for path in (str(folder), str(Path(__file__).resolve().parent)):
        sys.path.append(path)
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH"), path) if part)


def can_run(engine: str) -> bool:
    """Returns whether the engine and a GPU are there; prints SKIPPED otherwise."""
    # A process with an initialized driver could not fork its workers.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        import torch

        there = (engine in sys.modules or find_spec(engine) is not None) and torch.cuda.is_available()
    except ImportError:
        there = False
    if not there:
        print(f"SKIPPED: needs a GPU and {engine}")
    return there


def widen(model) -> None:
    """Sets random weights for which every token depends on the whole model.

    With load_format="dummy" (below 0.001), layers change no bit of the bf16 residual.
    """
    import torch

    generator = torch.Generator(device="cuda").manual_seed(5)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" in name:
                parameter.fill_(1.0)
            elif parameter.dim() >= 2 and parameter.is_floating_point():
                parameter.normal_(0.0, 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5, generator=generator)


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def ms_a_token(seconds: Callable[[int], float], rounds: int, tokens: int = 128) -> float:
    """Returns the milliseconds of a decode step; ``seconds`` generates a number of tokens.

    Median over rounds of the difference between a long and a short generation.
    """
    seconds(4)
    return statistics.median(1e3 * (seconds(tokens + 4) - seconds(4)) / tokens for _ in range(rounds))
