"""The numbers of views at which a network falls below the other methods, searched without knowing where to look."""

from collections.abc import Callable
from dataclasses import dataclass

_STEPS = {"fewer": 4, "more": 2}
"""Counts that are tried on the way to each end, evenly in their logarithm, before the interval is halved."""


@dataclass(frozen=True)
class Edge:
    """How far from training a network holds, on one side."""

    side: str  # fewer or more views
    holds: int  # the farthest count that was tried and held, with all nearer ones that were tried
    falls: int | None  # the next count that was tried; None: it holds to the end of the search

    def __str__(self) -> str:
        if self.falls is None:
            return f"{self.side}: it holds to {self.holds}"
        return f"{self.side}: it holds to {self.holds} and falls at {self.falls}"


def search(falls: Callable[[int], bool], trained: int, ends: tuple[float, float]) -> list[Edge]:
    """Find the edges on both sides of the trained count, within a thirty-second of it.

    `falls`: whether the network has fallen at a count of views; at the trained one it is taken to hold. `ends`: of the
    search, times that count.
    """
    edges = []
    for (side, steps), end in zip(_STEPS.items(), ends, strict=True):
        holds, falling = trained, None
        for k in range(1, steps + 1):
            count = max(1, round(trained * end ** (k / steps)))
            if count == holds:
                continue
            if falls(count):
                falling = count
                break
            holds = count
        while falling is not None and abs(falling - holds) > max(1, trained // 32):
            middle = (falling + holds) // 2
            if falls(middle):
                falling = middle
            else:
                holds = middle
        edges.append(Edge(side, holds, falling))
    return edges
