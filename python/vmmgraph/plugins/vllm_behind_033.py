"""Options of vLLM 0.33 with which vLLM captures before it serves (`vllm_behind`)."""

from __future__ import annotations

from typing import Any


def declined(runner: Any) -> str:
    """Returns a reason of this release why vLLM captures before it serves; empty: none."""
    from vllm import envs

    config = runner.vllm_config
    parallel = config.parallel_config
    if envs.VLLM_ENABLE_STARTUP_PLAN:
        return "the startup plan would lack the memory of later graphs"
    if envs.VLLM_GPU_SYNC_CHECK:
        return "captures wait for the device, and VLLM_GPU_SYNC_CHECK is set"
    if config.observability_config.jit_monitor_mode == "error":
        return "captures may compile kernels, and jit_monitor_mode is error"
    if parallel.enable_eplb:
        return "a dummy run would count as load of experts"
    if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        return "dummy runs of context parallel ranks read blocks of requests"
    if config.attention_config.hisparse_config is not None:
        return "HiSparse has KV blocks on the host"
    if config.aux_output_config.enabled:
        return "a dummy run would write outputs of requests"
    if config.model_config.is_mm_prefix_lm:
        return "attention depends on the images of requests"
    state = getattr(runner, "model_state", None)
    if state is not None:
        from vllm.v1.worker.gpu.model_states.interface import ModelState

        if type(state).capture_inner_cudagraphs is not ModelState.capture_inner_cudagraphs:
            return "the model has graphs of its own inside its forward function"
    return ""
