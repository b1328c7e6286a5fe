"""bench/python/vllm_run.py over a stand-in of vLLM: minutes of a GPU must not find its errors."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from vmmgraph._histogram import Shape
from vmmgraph.plugins.capture_queue import Queue

FOLDER = Path(__file__).parents[2] / "bench" / "python"
CONFIG = {
    "hidden_size": 64,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
}


class Tensor:
    def normal_(self, *_: Any, **__: Any) -> Tensor:
        return self

    bfloat16 = normal_


class Runner:
    """A model runner with captures behind the traffic: each step asks for one graph."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(named_parameters=list)
        self.kv_caches: list[Any] = []
        self._vmmgraph_behind = SimpleNamespace(queue=Queue([("full 4", Shape("full", 1, (4, 4, 0, 0), 0))]), unit=self.unit)

    def unit(self, unused: bool) -> float | None:
        queue = self._vmmgraph_behind.queue
        one = queue.next(unused)
        queue.ready.add(one)
        return 1.5 if one else None

    def step(self) -> None:
        self._vmmgraph_behind.unit(unused=False)
        self._vmmgraph_behind.queue.choose("full 4", True, list)

    def load_model(self) -> None:
        pass

    def capture_model(self) -> int:
        return 0


class Worker:
    def __init__(self) -> None:
        self.model_runner = Runner()

    def load_model(self) -> None:
        self.model_runner.load_model()

    def compile_or_warm_up_model(self) -> None:
        self.model_runner.capture_model()


class Wrapper:
    """The object that vLLM's executor passes to functions."""

    def __init__(self) -> None:
        self.worker = Worker()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)


class Engine:
    """vLLM's engine. A request needs a step for every 32 tokens."""

    def __init__(self, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        self.left: dict[str, int] = {}
        cache = SimpleNamespace(kv_cache_size_tokens=1000, num_gpu_blocks=100)
        self.vllm_config = SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(max_model_len=4096))
        scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(usage=0.2))
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler, step_fn=wrapper.model_runner.step))

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert 0 < len(prompt["prompt_token_ids"]) < 4096
        self.left[name] = params.max_tokens

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.left[name]

    def step(self) -> list[Any]:
        self.left = {name: left - 32 for name, left in self.left.items()}
        ended = [name for name, left in self.left.items() if left <= 0]
        for name in ended:
            del self.left[name]
        return [
            SimpleNamespace(finished=True, request_id=name, outputs=[SimpleNamespace(finish_reason="length")]) for name in ended
        ]


class Llm:
    #: Of one test.
    made: ClassVar[list[Llm]] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.adapters = options, [] if options.get("enable_lora") else None
        self.wrapper = Wrapper()
        self.wrapper.worker.load_model()
        self.wrapper.worker.compile_or_warm_up_model()
        self.llm_engine = Engine(self.wrapper)
        Llm.made.append(self)

    def generate(self, prompts: Any, sampling: Any, use_tqdm: bool, lora_request: Any = None) -> list[Any]:
        several = prompts if isinstance(prompts, list) else [prompts]
        params = sampling if isinstance(sampling, list) else [sampling] * len(several)
        if lora_request is not None:
            assert len(lora_request) == len(several)
            self.adapters = sorted({one.number for one in lora_request if one})
        self.llm_engine.engine_core.engine_core.step_fn()
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * one.max_tokens)]) for one in params]

    def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        return [method(self.wrapper, *args)]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script, with stand-ins of vLLM and torch, and a clock which each look moves on."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("PYTHONPATH", "VMMGRAPH", "VLLM_RUN_STARTED"):
        monkeypatch.setenv(name, "")
    runners = {name: type("GPUModelRunner", (Runner,), {}) for name in ("gpu_model_runner", "gpu.model_runner")}
    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: True,
            synchronize=lambda: None,
            empty_cache=lambda: None,
            mem_get_info=lambda: (1 << 30, 1 << 32),
            memory_snapshot=list,
            memory_reserved=lambda: 0,
            max_memory_reserved=lambda: 0,
        ),
        Generator=lambda **_: SimpleNamespace(manual_seed=lambda _: None),
        empty=lambda *_, **__: Tensor(),
        int8=None,
    )

    def save_file(tensors: dict[str, Any], path: Path) -> None:
        path.write_text(" ".join(tensors))

    modules = {
        "torch": torch,
        "safetensors.torch": SimpleNamespace(save_file=save_file),
        "vllm": SimpleNamespace(LLM=Llm, SamplingParams=lambda **values: SimpleNamespace(**values)),
        "vllm.compilation.cuda_graph": SimpleNamespace(CUDAGraphWrapper=SimpleNamespace(_all_instances=[])),
        "vllm.lora.request": SimpleNamespace(
            LoRARequest=lambda name, number, path: SimpleNamespace(name=name, number=number, path=path)
        ),
        "vllm.v1.worker.gpu_worker": SimpleNamespace(Worker=Worker),
        **{f"vllm.v1.worker.{name}": SimpleNamespace(GPUModelRunner=runner) for name, runner in runners.items()},
    }
    for name, values in modules.items():
        module = types.ModuleType(name)
        vars(module).update(vars(values))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "vllm_run", raising=False)
    found = importlib.import_module("vllm_run")
    monkeypatch.delattr(Worker, "seconds", raising=False)
    for name in ("load_model", "compile_or_warm_up_model"):
        monkeypatch.setattr(Worker, name, vars(Worker)[name])
    monkeypatch.setattr(found, "install_entry_points", lambda *_: None)
    monkeypatch.setattr(found, "widen", lambda _: None)
    monkeypatch.setattr(found.tempfile, "gettempdir", lambda: str(tmp_path))
    now = [0.0]

    def clock() -> float:
        now[0] += 0.05
        return now[0]

    monkeypatch.setattr(found, "time", SimpleNamespace(time=clock, perf_counter=clock, sleep=lambda _: None, monotonic=clock))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    Llm.made = []
    return found


def run(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Llm:
    monkeypatch.setattr(sys, "argv", ["vllm_run.py", str(tmp_path), "--requests", "20", "--rounds", "2", *arguments])
    assert script.main() == 0
    return Llm.made[-1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--kv", "--behind"], ["captures_s", "ready_after_weights_s", "units_ms", "by_graphs_after_10_s", "last_hash"]),
        (["--kv", "--lora"], ["tokens", "capture_mib", "captures_s", "kv_tokens"]),
        (["--ngram", "--length", "32768"], ["tokens", "ms_a_token_64"]),
        (["--size", "moe", "--timed", "0", "--then", "recapture"], ["tokens", "free_after_mib", "then_recapture"]),
        (["--kv", "--then", "mixed", "--seconds", "20"], ["mixed", "then_mixed"]),
        (["--kv", "--attention", "FLASH_ATTN"], ["tokens", "kv_tokens"]),
    ],
    ids=["behind", "lora", "ngram", "moe", "mixed", "attention"],
)
def test_every_way_to_run_prints_its_rows(
    script: Any,
    arguments: list[str],
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    llm = run(script, tmp_path, monkeypatch, *arguments)
    said = capsys.readouterr().out
    names = [line.split()[2] for line in said.splitlines() if line.startswith("RESULT")]
    assert set(expected) <= set(names), said
    expected_backend = "FLASH_ATTN" if "--attention" in arguments else "TRITON_ATTN"
    assert llm.options["attention_config"] == {"backend": expected_backend}
    if "--lora" in arguments:
        assert llm.adapters == list(range(1, 9)) and llm.options["max_loras"] == 8
    if "--ngram" in arguments:
        assert llm.options["speculative_config"]["method"] == "ngram" and llm.options["max_model_len"] == 32768
    if "moe" in arguments:
        assert json.loads((Path(llm.options["model"]) / "config.json").read_text())["num_experts"] == 32
    if "mixed" in arguments:
        assert "mixed failed nothing" in said and " 960 MiB taken" in said


def test_a_failed_step_of_mixed_traffic_ends_the_run(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "step", lambda self: (_ for _ in ()).throw(RuntimeError("CUDA out of memory")))
    with pytest.raises(SystemExit, match="a step failed: RuntimeError: CUDA out of memory"):
        run(script, tmp_path, monkeypatch, "--kv", "--then", "mixed")
    assert "mixed failed a step failed" in capsys.readouterr().out
