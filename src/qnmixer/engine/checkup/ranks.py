"""Watch the ranks of a checkup, and name those that fail or hang."""

import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qnmixer.engine.processes.launch import launch
from qnmixer.errors import RankFailed


def run_ranks(job: Mapping[str, Any], folder: Path, n: int, patience: float) -> None:
    """Run `qnmixer.engine.checkup.rank` on n ranks.

    Raises RankFailed, which names the rank, if a rank fails. The same if no rank makes progress for `patience` seconds:
    then the ranks that are furthest behind hang. All ranks are killed.
    """
    path, ended = folder / "job.json", threading.Event()
    path.write_text(json.dumps({**job, "folder": str(folder), "patience": patience}))
    stuck: list[str] = []

    def watch() -> None:
        last, since = _progress(folder, n), time.monotonic()
        while not ended.wait(0.5):
            now = _progress(folder, n)
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > patience:
                least = min(count for count, _, _ in now)
                behind = [rank for rank, (count, _, _) in enumerate(now) if count == least]
                stuck.append(f"{named_ranks(behind)}: no progress for {patience:.0f} s in {now[behind[0]][1]}")
                known = [pid for _, _, pid in now if pid]
                for pid in known:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                if not known:
                    os.kill(os.getpid(), signal.SIGINT)  # makes `launch` stop its processes
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        launch(["-m", "qnmixer.engine.checkup.rank", str(path)], n)
    except (RankFailed, KeyboardInterrupt) as error:
        if stuck:
            raise RankFailed(stuck[0]) from error
        raise
    finally:
        ended.set()
        watcher.join()


def _progress(folder: Path, n: int) -> list[tuple[int, str, int]]:
    """For each rank: the number of phases that it has started, the last phase, and its process."""
    found = []
    for rank in range(n):
        path = folder / f"progress_{rank}.json"
        count, doing, pid = json.loads(path.read_text()) if path.exists() else (0, "starting Python", 0)
        found.append((count, doing, pid))
    return found


def named_ranks(numbers: Sequence[int]) -> str:
    """A text such as "ranks 0, 2"."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
