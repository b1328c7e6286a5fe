"""Fails if a private name added to torch's graph class collides with a name of torch, or if a name
of torch that the package reads is missing.

names.py GRAPHS_PY: torch/cuda/graphs.py of a release. Parses both, runs neither.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python/vmmgraph"
OURS = [PACKAGE / name for name in ("_graph.py", "_mempool.py")]
#: Replaced on purpose.
REPLACED = {"_has_graph_exec"}
#: Read to find executable hooks of torch, in releases that end a capture in two steps.
READ = {"_post_instantiate_hooks", "_capture_graph_id"}
GLOBAL = "_global_instantiate_hooks"


def names(source: str, classes: set[str]) -> set[str]:
    found = set()
    for owner in ast.walk(ast.parse(source)):
        if not isinstance(owner, ast.ClassDef) or owner.name not in classes:
            continue
        for node in ast.walk(owner):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node in targets(owner):
                found.add(node.id)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def targets(owner: ast.ClassDef) -> list[ast.expr]:
    found: list[ast.expr] = []
    for node in owner.body:
        if isinstance(node, ast.Assign):
            found += node.targets
        elif isinstance(node, ast.AnnAssign):
            found.append(node.target)
    return found


def main(path: str) -> int:
    each = [names(file.read_text(), {"Captured", "CUDAGraph"}) for file in OURS]
    ours = set().union(*each)
    source = Path(path).read_text()
    torchs = names(source, {"CUDAGraph"})
    if len(each[0]) < 15 or len(each[1]) < 5:
        print(f"{OURS}: {[len(names) for names in each]} names, the check reads them wrongly")
        return 1
    both = (ours & torchs) - REPLACED
    for name in sorted(both):
        print(f"{name} is torch's, and ours")
    gone = READ - torchs | ({GLOBAL} if GLOBAL not in source else set()) if "def capture_end_pre" in source else set()
    for name in sorted(gone):
        print(f"{name} is torch's no more, and read")
    return 1 if both or gone else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
