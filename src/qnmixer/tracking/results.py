"""results.json: how one run ended, and everything needed to tell what it was."""

import hashlib
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qnmixer.files import write_text

PACKAGES = ("torch", "lightning", "hydra-core", "torchmetrics", "wandb", "qnmixer")


@contextmanager
def results(folder: Path, overrides: list[str], goes_on: bool = False) -> Iterator[dict[str, Any]]:
    """Keep results.json of a run: `status` is running inside, then done, failed or interrupted.

    What is put into the yielded dict (metrics, paths) is written at the end, also when the run fails; `seconds` in it
    are those before. One that goes on in its folder keeps what it knew.
    """
    before = read_results(folder) if goes_on else {}
    record: dict[str, Any] = before | {
        "status": "running",
        "overrides": overrides,
        "git_commit": git_commit(),
        "versions": versions(),
        "started": before.get("started", _now()),
    }
    record.pop("error", None)
    path = folder / "results.json"
    start = time.monotonic()
    _write(path, record)
    try:
        yield record
    except KeyboardInterrupt:
        record["status"] = "interrupted"
        raise
    except BaseException as error:
        record["status"] = "failed"
        record["error"] = f"{type(error).__name__}: {error}"
        raise
    else:
        record["status"] = "done"
    finally:
        record["seconds"] = round(record.get("seconds", 0.0) + time.monotonic() - start, 1)
        if record["status"] != "done" and (before := read_results(folder)).get("status") == "failed":
            record |= {key: before[key] for key in ("status", "error")}  # another rank was first, and knows why
        _write(path, record)


def note(folder: Path, record: dict[str, Any], key: str, entry: dict[str, Any]) -> None:
    """Add an entry to a list of the record (`resumed`, `warnings`), and write it at once: the run may be killed."""
    record[key] = [*record.get(key, []), entry | {"at": _now()}]
    _write(folder / "results.json", record)


def read_results(folder: Path) -> dict[str, Any]:
    """What results.json of a run says so far; empty where there is none."""
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def amend(folder: Path, overrides: list[str], *, status: str, error: str | None) -> None:
    """Say in results.json how a run ended whose own process could not, or did not know."""
    record = (read_results(folder) or {"overrides": overrides}) | {"status": status, "error": error}
    _write(folder / "results.json", {key: value for key, value in record.items() if value is not None})


def duration(seconds: float) -> str:
    """For reading: "4 min 05 s"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def versions() -> dict[str, str]:
    """Versions of Python and of what a run's numbers depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def git_commit() -> str | None:
    """Commit of this code, with "+changes" and a digest of them where there are any; None outside a checkout."""
    try:
        head = _git(_package(), "rev-parse", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    diff = git_diff()
    return f"{head}+changes.{hashlib.sha256(diff.encode()).hexdigest()[:8]}" if diff else head


def git_diff() -> str:
    """What code and configs are beside their commit, new files too, for `git apply`; empty without changes or git."""
    here = _package()
    try:
        root = _git(here, "rev-parse", "--show-toplevel").strip()
        parts = [str(path) for path in (here.parent, Path(root) / "conf") if path.exists()]
        with tempfile.TemporaryDirectory() as temporary:  # the user's own index stays as it is
            index = {"GIT_INDEX_FILE": str(Path(temporary) / "index")}
            _git(root, "read-tree", "HEAD", **index)
            _git(root, "add", "--intent-to-add", "--", *parts, **index)
            return _git(root, "diff", "--no-ext-diff", "--no-color", "HEAD", "--", *parts, **index)
    except (OSError, subprocess.CalledProcessError):
        return ""


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _package() -> Path:
    return Path(__file__).parents[1]


def _git(folder: Path | str, *arguments: str, **environment: str) -> str:
    command, environment = ["git", *arguments], os.environ | environment
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    return done.stdout.decode(errors="replace")


def _write(path: Path, record: dict[str, Any]) -> None:
    write_text(path, json.dumps(record, indent=2, default=str) + "\n")
