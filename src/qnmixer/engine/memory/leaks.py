"""Detect a leak among the ups and downs of a healthy run."""

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from qnmixer.engine.memory.footprint import MIB


@dataclass(frozen=True)
class Leak:
    """Growth of the memory at the end of a step."""

    steps: int  # steps of growth that were seen; it may have started before
    first_bytes: int
    last_bytes: int

    @property
    def bytes_per_step(self) -> float:
        """Growth of one step."""
        return (self.last_bytes - self.first_bytes) / self.steps


class LeakWatch:
    """Detects a leak among the ups and downs of a healthy run, from the memory at the end of each step.

    It looks at the lowest value of each window of steps. A leak adds the same to every window. A jump (the first
    validation, a picture) adds to one window, and the noise after it can rise by chance. So the last `n_windows` must
    all rise above all earlier values. Each must rise by at least `evenness` of their mean, and together they must rise
    by `floor`. Garbage in cycles grows like a leak until Python collects it. So a suspect makes it collect. If memory
    rises once more, it is a leak.

    Args:
        warm_up: first steps, which are left out: buffers, caches and the optimizer state are made in them.
        window: steps in a window.
        n_windows: number of windows in a row that must rise.
        floor: bytes; over 4 windows of 20 it is 0.1 MiB a step. Measured over 4 windows on the CPU without garbage,
            healthy runs rose evenly by 0.5 MiB at most, and unevenly by 19.
        evenness: least rise of a window, as a share of the mean rise.
        collect: frees garbage that is in cycles.
    """

    def __init__(
        self,
        *,
        warm_up: int = 20,
        window: int = 20,
        n_windows: int = 4,
        floor: int = 8 * MIB,
        evenness: float = 0.5,
        collect: Callable[[], Any] = gc.collect,
    ) -> None:
        self.warm_up, self.window, self.floor = warm_up, window, floor
        self._evenness, self._collect = evenness, collect
        self._minima: deque[int] = deque(maxlen=n_windows + 1)
        self._held: list[int] = []
        self._highest = 0  # of the minima before those
        self._step = 0
        self._suspected = False
        self._reported = False

    def update(self, bytes_held: int) -> Leak | None:
        """Add the memory at the end of a step. Returns a leak once, when it is found."""
        self._step += 1
        if self._reported or self._step <= self.warm_up:
            return None
        self._held.append(bytes_held)
        if len(self._held) < self.window:
            return None
        if len(self._minima) == self._minima.maxlen:
            self._highest = max(self._highest, self._minima[0])
        self._minima.append(min(self._held))
        self._held.clear()
        if not self._rises_evenly():
            self._suspected = False
            return None
        if not self._suspected:
            self._suspected = True
            self._collect()
            return None
        self._reported = True
        return Leak(self.window * (len(self._minima) - 1), self._minima[0], self._minima[-1])

    def _rises_evenly(self) -> bool:
        if len(self._minima) != self._minima.maxlen:
            return False
        rises = [after - before for before, after in pairwise(self._minima)]
        growth = self._minima[-1] - max(self._minima[0], self._highest)
        return growth >= self.floor and min(rises) >= self._evenness * sum(rises) / len(rises)
