"""Queue of captures behind the traffic: order, budget, and choice of a graph.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from .._histogram import Shape

#: Most steps for which unused budget is saved up. A longer unit runs when so much is saved.
SAVED_STEPS = 20
#: Largest stand-in, in multiples of the tokens of the missing graph.
STAND_IN = 2


class Budget:
    """Milliseconds of captures a step, on average. Unused milliseconds are saved up."""

    def __init__(self, each: float) -> None:
        self.each = each
        self.saved = 0.0

    def step(self) -> None:
        self.saved = min(self.saved + self.each, SAVED_STEPS * self.each)

    def allows(self, expected: float) -> bool:
        """Returns whether a unit of ``expected`` milliseconds may begin."""
        return self.each > 0 and self.saved >= min(expected, SAVED_STEPS * self.each)

    def spend(self, milliseconds: float) -> None:
        self.saved -= milliseconds


class Queue:
    """Graphs of an engine: steps of each, and which exist. A graph is named by its descriptor."""

    def __init__(self, shapes: Sequence[tuple[Hashable, Shape]], histogram: Iterable[Shape] = ()) -> None:
        #: Descriptors in the order in which unused graphs are captured.
        self.shapes = dict(shapes)
        self.steps: dict[Hashable, int] = dict.fromkeys(self.shapes, 0)
        #: Of this run.
        self.by_graph = self.eager = 0
        self.ready: set[Hashable] = set()
        self.failed: set[Hashable] = set()
        #: False if no missing graph has steps: a search takes 85 us for 102 graphs, in every step.
        self.wanted = True
        known = {_name(shape): one for one, shape in self.shapes.items()}
        for shape in histogram:
            if (one := known.get(_name(shape))) is not None:
                self.steps[one] += shape.steps

    def missing(self) -> list[Hashable]:
        return [one for one in self.shapes if one not in self.ready and one not in self.failed]

    def next(self, unused: bool) -> Any:
        """Returns the missing graph with the most steps, or ``None``.

        Graphs without steps count only if ``unused``, after all others.
        """
        if not self.wanted and not unused:
            return None
        best = max(self.missing(), key=lambda one: self.steps[one], default=None)
        self.wanted = best is not None and self.steps[best] > 0
        return best if self.wanted or unused else None

    def choose(self, own: Hashable, count: bool, larger: Callable[[], Iterable[Hashable]]) -> Any:
        """Returns the graph for a step: its own, the first existing one of ``larger()``, or
        ``None``.

        ``count``: the step is no dummy run.
        """
        known = own in self.shapes
        if count and known:
            self.steps[own] += 1
        if own in self.ready or not known:
            chosen = own
        else:
            chosen = next((one for one in larger() if one in self.ready), None)
            self.wanted = self.wanted or count and own not in self.failed
        if count:
            self.by_graph += chosen is not None
            self.eager += chosen is None
        return chosen

    def histogram(self) -> list[Shape]:
        return [shape._replace(steps=self.steps[one]) for one, shape in self.shapes.items() if self.steps[one]]


def _name(shape: Shape) -> tuple[str, int, int]:
    return shape.mode, shape.variant, shape.extents[0]
