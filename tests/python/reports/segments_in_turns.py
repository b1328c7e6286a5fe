"""Two sizes of a segmented prefill replay in turns (sgl-project/sglang#37606, #37448).

`examples/shared_pool/segments.py` is the program: captured segments with eager work between, each
handed tensor held by Python. Under stock torch `mib` is the memory of private pools, the only right
way; the detail also has one pool's memory and wrong tokens. Under vmmgraph one pool must give 0
wrong tokens.
"""

from __future__ import annotations

from typing import Any

import kit

kit.use_examples("shared_pool")
import segments


def body() -> dict[str, Any]:
    return kit.one_pool_and_private(segments.measure)


if __name__ == "__main__":
    kit.run("segments_in_turns", body)
