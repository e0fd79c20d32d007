"""Detect a leak among the ups and downs of a healthy run."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass
class LeakWatch:
    """Detects a leak among the ups and downs of a healthy run, from the memory at the end of each step.

    It looks at the lowest value of each window of steps. A leak adds the same to every window. A jump (the first
    validation, a picture) adds to one window, and the noise after it can rise by chance. So the last windows must all
    rise above all earlier values, and evenly. Garbage in cycles grows like a leak until Python collects it. So a
    suspect makes it collect. If memory rises once more, it is a leak.
    """

    warm_up: int = 20  # first steps, left out: buffers, caches and the optimizer state are made in them
    window: int = 20  # steps
    n_windows: int = 4  # windows in a row that must rise
    floor: int = 8 * MIB  # their least rise together. On a CPU, healthy runs rose evenly by 0.5 MiB, unevenly by 19
    evenness: float = 0.5  # least rise of a window, as a share of the mean rise
    collect: Callable[[], Any] = gc.collect  # frees garbage that is in cycles

    _step: int = 0
    _held: list[int] = field(default_factory=list)  # in the steps of this window
    _minima: list[int] = field(default_factory=list)  # of all windows
    _suspected: bool = False
    _reported: bool = False

    def update(self, bytes_held: int) -> Leak | None:
        """Add the memory at the end of a step. Returns a leak once, when it is found."""
        self._step += 1
        if self._reported or self._step <= self.warm_up:
            return None
        self._held.append(bytes_held)
        if len(self._held) < self.window:
            return None
        self._minima.append(min(self._held))
        self._held.clear()
        if not self._rises_evenly():
            self._suspected = False
        elif not self._suspected:
            self._suspected = True
            self.collect()
        else:
            self._reported = True
            return Leak(self.window * self.n_windows, self._minima[-self.n_windows - 1], self._minima[-1])
        return None

    def _rises_evenly(self) -> bool:
        n, minima = self.n_windows, self._minima
        if len(minima) <= n:
            return False
        rises = [after - before for before, after in pairwise(minima[-n - 1 :])]
        growth = minima[-1] - max(minima[:-n])
        return growth >= self.floor and min(rises) >= self.evenness * sum(rises) / n
