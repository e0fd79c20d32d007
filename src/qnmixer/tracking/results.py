"""results.json: how one run ended, and everything needed to tell what it was."""

import json
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qnmixer.files import write_text

PACKAGES = ("torch", "lightning", "hydra-core", "torchmetrics", "wandb", "qnmixer")


@contextmanager
def results(folder: Path, overrides: list[str]) -> Iterator[dict[str, Any]]:
    """Keep results.json of a run: `status` is running inside, then done, failed or interrupted.

    What is put into the yielded dict (metrics, paths) is written at the end, also when the run fails.
    """
    record: dict[str, Any] = {
        "status": "running",
        "overrides": overrides,
        "git_commit": git_commit(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
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
        record["seconds"] = round(time.monotonic() - start, 1)
        if record["status"] != "done" and (before := read_results(folder)).get("status") == "failed":
            record |= {key: before[key] for key in ("status", "error")}  # another rank was first, and knows why
        _write(path, record)


def read_results(folder: Path) -> dict[str, Any]:
    """What results.json of a run says so far; empty where there is none."""
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def amend(folder: Path, overrides: list[str], *, status: str, error: str | None) -> None:
    """Say in results.json how a run ended whose own process could not, or did not know."""
    record = (read_results(folder) or {"overrides": overrides}) | {"status": status, "error": error}
    _write(folder / "results.json", {key: value for key, value in record.items() if value is not None})


def git_commit() -> str | None:
    """Commit of this code, with "+changes" where the tree differs from it; None outside a checkout."""
    here = Path(__file__).parents[1]  # the whole package

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _write(path: Path, record: dict[str, Any]) -> None:
    write_text(path, json.dumps(record, indent=2, default=str) + "\n")
