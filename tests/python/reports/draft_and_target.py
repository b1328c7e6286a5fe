"""A draft model's and a target model's graphs share one pool (sgl-project/sglang#22930,
NVIDIA/TensorRT-LLM#17010).

`examples/shared_pool/speculation.py` is the program: the target's graph verifies drafted tokens by
the probabilities in tensors of the draft's graph. Under stock torch `mib` is the memory of private
pools, the only right way; the detail also has one pool's memory and wrong results. Under vmmgraph
one pool must give 0 wrong results.
"""

from __future__ import annotations

from typing import Any

import kit

kit.use_examples("shared_pool")
import speculation


def body() -> dict[str, Any]:
    return kit.one_pool_and_private(speculation.measure)


if __name__ == "__main__":
    kit.run("draft_and_target", body)
