"""Tells a leak from the ups and downs of a healthy run."""

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from qnmixer.memory.footprint import MIB


@dataclass(frozen=True)
class Leak:
    """Growth of what is held at the end of a step."""

    steps: int  # how many it has been watched growing for; it may have begun before
    first_bytes: int
    last_bytes: int

    @property
    def bytes_per_step(self) -> float:
        """Growth of one step."""
        return (self.last_bytes - self.first_bytes) / self.steps


class LeakWatch:
    """Tells a leak from the ups and downs of a healthy run, by what is held at the end of each step.

    Of each window of steps the least counts. A leak adds as much to every window; a jump (the first validation, a
    picture) to one, with noise after it that also rises now and then. So the last `n_windows` must all have risen, none
    by less than `evenness` of their mean, to `floor` above where they began and above everything before. Garbage in
    cycles grows like that too until Python collects it: it is collected then, and a leak is what rises once more.

    Args:
        warm_up: steps to leave out, in which buffers, caches and the optimizer's state come to be.
        window: steps in a window.
        n_windows: how many must rise, one after another.
        floor: bytes; over 4 windows of 20 it is 0.1 MiB a step. Healthy runs on the CPU, garbage apart, rose evenly
            over 4 windows by 0.5 MiB at most (measured), unevenly by 19.
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
        self._highest = 0  # of the windows before those
        self._step = 0
        self._suspected = False
        self._reported = False

    def update(self, bytes_held: int) -> Leak | None:
        """Take in what is held at the end of a step; returns a leak when it is found, and never another."""
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
