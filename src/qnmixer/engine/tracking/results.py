"""results.json: the status of a run, its results, and what they depend on (overrides, commit, versions)."""

import hashlib
import json
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qnmixer.engine.tracking.records import read_json
from qnmixer.engine.tracking.signature import signed
from qnmixer.files import write_text

_CODE = (".py", ".yaml", ".yml")
_PRIVATE = re.compile(
    r"(^|/)\.|(^|[/_.-])(local|private|secrets?|credentials?|passwords?|tokens?|keys?)([/_.-]|$)", re.IGNORECASE
)
TIME = "%Y-%m-%dT%H:%M:%S%z"
_KINDS = {
    "status": str, "error": str, "overrides": list[str], "started": str, "tags": list[str], "best": dict[str, Any],
    "steps": int, "seconds": float, "memory": dict[str, float | None],
    "git_commit": str | None, "device": str, "versions": dict[str, str], "evaluated": dict[str, Any],
    "resumed": list[dict[str, Any]],
}  # fmt: skip
"""What readers take for granted. Other entries are for people."""
PACKAGES = ("torch", "lightning", "hydra-core", "torchmetrics", "wandb", "qnmixer")


@contextmanager
def results(folder: Path, overrides: list[str], before: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Write results.json: `status` is running while the block runs, then done, failed or interrupted.

    Yields a dict for metrics and paths. It is written at the end, also if the block fails. Its `seconds` include
    earlier parts of the run.

    Args:
        folder: where results.json is written.
        overrides: of a new run.
        before: the record of a run that resumes; None for a new run. Its overrides stay: a refused resume must not
            change what the run is. A run that is done stays done.
    """
    fresh = {"status": "running", "git_commit": git_commit(), "versions": versions()}
    record: dict[str, Any] = fresh | signed(overrides) | {"started": now()} | (before or {}) | fresh
    record.pop("error", None)  # of the part before the resume
    start = time.monotonic()
    write_results(folder, record)
    try:
        yield record
        record["status"] = "done"
    except KeyboardInterrupt:
        record["status"] = "interrupted"
        raise
    except BaseException as error:
        record |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        record["seconds"] = round(record.get("seconds", 0.0) + time.monotonic() - start, 1)
        if record["status"] != "done":
            if (since := read_results(folder)).get("status") == "failed":
                record |= {key: since[key] for key in ("status", "error")}  # another rank recorded the cause before
            if before and was_refused(before, record):
                record = before
        write_results(folder, record)


def was_refused(before: dict[str, Any], record: dict[str, Any]) -> bool:
    """Whether a run that was done before has not been continued since. Then it is still done, whatever was tried."""
    return before.get("status") == "done" and record.get("resumed") == before.get("resumed")


def read_results(folder: Path) -> dict[str, Any]:
    """Read results.json of a run folder; {} if there is none. Raises DataError if it is damaged."""
    path = folder / "results.json"
    return read_json(path, _KINDS) if path.is_file() else {}


def best_of(record: dict[str, Any]) -> tuple[str, float | None]:
    """The monitored metric of a run and its best value; None if there is none."""
    monitor, best = next(iter(record.get("best", {}).items()), ("best", None))
    if isinstance(best, int) and abs(best) < 2**63:  # JSON has whole numbers of any length
        best = float(best)
    return monitor, best if isinstance(best, float) else None


def amend(folder: Path, overrides: list[str], *, status: str, error: str | None) -> None:
    """Set the state of a run in its results.json, where `results` has not begun, or has died."""
    record = read_results(folder) or signed(overrides) | {"started": now()}
    record |= {"status": status, "error": error}
    write_results(folder, {key: value for key, value in record.items() if value is not None})


def duration(seconds: float) -> str:
    """A duration as text: "4 min 05 s"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change the numbers of a run."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def git_commit() -> str | None:
    """Commit of this code, with "+changes" and a digest if it was changed since; None outside a checkout."""
    try:
        head = _git(_checkout(_package()), "rev-parse", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    diff = git_diff()
    return f"{head}+changes.{hashlib.sha256(diff.encode()).hexdigest()[:8]}" if diff else head


def git_diff() -> str:
    """Changes of code and configs since the commit, for `git apply`; empty without changes or without git.

    Includes new files if they are code or configs. Hidden files and names such as *local* and *secret* stay out.
    """
    try:
        root = _checkout(_package())
        parts = [str(path) for path in (_package().parent, root / "conf") if path.exists()]
        with tempfile.TemporaryDirectory() as temporary:  # a temporary index, so that the user's own stays unchanged
            index = {"GIT_INDEX_FILE": str(Path(temporary) / "index")}
            _git(root, "read-tree", "HEAD", **index)
            new = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *parts).split("\0")
            # Without this, git diff leaves out files that were never added.
            if code := [name for name in new if Path(name).suffix in _CODE and not _PRIVATE.search(name)]:
                _git(root, "add", "--intent-to-add", "--", *code, **index)
            return _git(root, "diff", "--no-ext-diff", "--no-color", "HEAD", "--", *parts, **index)
    except (OSError, subprocess.CalledProcessError):
        return ""


def now() -> str:
    """The time, as results.json has it."""
    return time.strftime(TIME)


def _package() -> Path:
    return Path(__file__).parents[2]


@cache
def _checkout(package: Path) -> Path:
    """The repository that contains this package. Raises CalledProcessError or OSError if there is none.

    A wheel may be installed inside somebody else's repository. Then git does not track this file.
    """
    _git(package, "ls-files", "--error-unmatch", "engine/tracking/results.py")
    return Path(_git(package, "rev-parse", "--show-toplevel").strip())


def _git(folder: Path | str, *arguments: str, **environment: str) -> str:
    command, environment = ["git", *arguments], os.environ | environment
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    return done.stdout.decode(errors="replace")


def write_results(folder: Path, record: dict[str, Any]) -> None:
    """Write results.json of a run folder."""
    write_text(folder / "results.json", json.dumps(record, indent=2, default=str) + "\n")
