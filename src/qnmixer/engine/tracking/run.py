"""A training run: its folder, run lock, overrides and record, and the run that it resumes. No torch import."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from qnmixer.engine.processes.ranks import rank
from qnmixer.engine.tracking.results import amend, now, read_results, results, was_refused, write_results
from qnmixer.engine.tracking.resume import recorded_overrides, resumes_in_place
from qnmixer.engine.tracking.run_folder import HYDRA, NEXT_HYDRA, clean, run_lock
from qnmixer.files import remove, replace


class Run:
    """One training run. Each of its processes has one; only rank 0 takes the lock, prints and writes the record.

    Args:
        folder: the run folder. All files of the run go into it.
        overrides: of the command line, or of a job in a sweep.
        resume: `resume` of the config: a run folder, a checkpoint, or None.

    Attributes:
        console: prints lines for the user.
        record: results.json, for metrics and paths; written at the end of `recording`.
        resumed_at: optimizer steps of the checkpoint, if the run resumes in its folder.
    """

    def __init__(self, folder: Path, overrides: Sequence[str] = (), resume: str | None = None) -> None:
        self.folder, self.resume = folder, resume
        self._given = list(overrides)
        self.console = Console(quiet=rank() != 0, markup=False)
        self.record: dict[str, Any] = {}
        self.resumed_at: int | None = None
        self._before = read_results(folder) if self.resumes_in_place else {}

    @cached_property
    def overrides(self) -> list[str]:
        """The overrides for results.json."""
        return recorded_overrides(self.folder, self._given)

    @cached_property
    def resumes_in_place(self) -> bool:
        """Whether the run continues its own logs and best value. A run that starts from another run does not."""
        return resumes_in_place(self.folder, self.resume)

    @property
    def threads(self) -> int | None:
        """The CPU threads of the single process that this run continues; None for a new run, and after several."""
        before = read_results(self.folder) if self.resumes_in_place else {}
        # Each of several processes had its share of the cores: one alone would keep the others idle.
        threads = before.get("threads") if before.get("processes") == 1 else None
        return threads if isinstance(threads, int) and threads > 0 else None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run lock while the block runs. Raises ConfigError if another process writes to the folder."""
        if rank() != 0:
            yield
            return
        with run_lock(self.folder):
            clean(self.folder)
            try:
                yield
            finally:
                remove(self.folder / NEXT_HYDRA)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write results.json while the block runs: running, then done, failed or interrupted."""
        if rank() != 0:
            yield
            return
        with results(self.folder, self.overrides, self.resumes_in_place) as self.record:
            yield

    def note(self, key: str, entry: dict[str, Any]) -> None:
        """Add an entry with its time to a list of the record. It is written at once, because the run may be killed."""
        self.record[key] = [*self.record.get(key, []), entry | {"at": now()}]
        if rank() == 0:
            write_results(self.folder, self.record)

    def record_resume(self, step: int) -> None:
        """Record that the run resumes in its folder from a checkpoint of this optimizer step, with its overrides."""
        self.resumed_at = step
        self.record["overrides"] = self.overrides
        self.note("resumed", {"step": step})
        if rank() == 0 and (accepted := self.folder / NEXT_HYDRA).is_dir():
            replace(accepted, self.folder / HYDRA)

    def record_end(self, status: str, error: BaseException | None = None) -> None:
        """Set the end of the run in results.json, if `recording` could not. A refused resume leaves a done run done."""
        if was_refused(self._before, read_results(self.folder)):
            return
        line = None if error is None else f"{type(error).__name__}: {error}"
        amend(self.folder, self.overrides, status=status, error=line)
