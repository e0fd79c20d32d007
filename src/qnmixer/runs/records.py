"""What a run leaves in its folder: results.json, sweep.json, and the reader of metrics.csv. No torch import.

results.json has the status of a run, its results, what they depend on (overrides, commit, versions), and a sign. The
sign says that this user has started the run with these overrides, and nobody else: it is a digest by a key that only
this user can read.

A run folder may come from anybody. So sizes are bounded, and what no run writes so is one DataError.
"""

import csv
import hashlib
import hmac
import io
import json
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict, cast, get_type_hints

from filelock import FileLock

from qnmixer.errors import ConfigError, DataError
from qnmixer.files import atomic_file, make_own_folder, private_files, write_text
from qnmixer.settings.validation import validated

# results.json

_KINDS_OF_RESULTS = {
    "status": str, "error": str, "overrides": list[str], "modules": list[str], "started": str, "best": dict[str, float],
    "steps": int, "seconds": float, "memory": dict[str, float | None],
    "git_commit": str | None, "device": str, "versions": dict[str, str], "evaluated": dict[str, Any],
    "resumed": list[dict[str, Any]], "settings": str, "code": dict[str, str],
}  # fmt: skip
"""What readers take for granted. Other entries are for people."""


def read_results(folder: Path) -> dict[str, Any]:
    """Read results.json of a run folder; {} if there is none. Raises DataError if it is damaged."""
    path = folder / "results.json"
    return read_json(path, _KINDS_OF_RESULTS) if path.is_file() else {}


def write_results(folder: Path, record: dict[str, Any]) -> None:
    """Write results.json of a run folder."""
    write_text(folder / "results.json", json.dumps(record, indent=2, default=str) + "\n")


def best_of(record: dict[str, Any]) -> tuple[str, float | None]:
    """The monitored metric of a run and its best value; None if there is none."""
    return next(iter(record.get("best", {}).items()), ("best", None))


def amend(folder: Path, overrides: list[str], *, status: str, error: str | None) -> None:
    """Set the state of a run in its results.json, where `results` has not begun, or has died."""
    record = read_results(folder) or signed(overrides) | {"started": timestamp()}
    record |= {"status": status, "error": error}
    write_results(folder, {key: value for key, value in record.items() if value is not None})


def timestamp() -> str:
    """The time, as results.json has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def duration(seconds: float) -> str:
    """A duration as text: "4 min 05 s"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


# sweep.json: the overrides of a sweep and of each of its jobs

SWEEP = "sweep.json"  # the file that marks the folder of a sweep


class Sweep(TypedDict):
    """The content of sweep.json, which exists before the first job starts."""

    overrides: list[str]  # of the command line
    varying: list[str]  # keys that differ between jobs
    jobs: dict[str, list[str]] | None  # overrides of its jobs so far, by folder; None: not recorded by the launcher


def sweep_of(folder: Path) -> tuple[Path, Sweep] | None:
    """The folder and the content of the sweep that a run folder belongs to; None if there is no sweep."""
    for parent in folder.absolute().parents:
        if (parent / SWEEP).is_file():
            return parent, read_sweep(parent)
    return None


def name_of_job(sweep: Sweep, overrides: list[str]) -> str:
    """The overrides that make a job differ from the others, such as "optimizer.lr=0.001, strategy=ddp"."""
    pairs = [override.lstrip("+").partition("=") for override in overrides]
    return ", ".join(f"{key}={readable(value)}" for key, _, value in pairs if key in sweep["varying"])


def read_sweep(folder: Path) -> Sweep:
    """Read sweep.json of a folder. Raises DataError if it is damaged, or if it names a job outside of the folder."""
    record, fix = read_json(folder / SWEEP, get_type_hints(Sweep)), "start the sweep again in a new folder"
    if missing := sorted(Sweep.__required_keys__ - record.keys()):
        raise damaged(folder / SWEEP, f"it has no {missing[0]}", fix)
    for name in record["jobs"] or ():
        place = os.path.join(os.path.realpath(folder), name)
        if "/" in name or "\0" in name or os.path.realpath(place) != place:  # a link may lead anywhere
            raise damaged(folder / SWEEP, f"its job {name:.200} is no folder in that of the sweep", fix)
    return cast(Sweep, record)


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Write sweep.json of a folder."""
    write_text(folder / SWEEP, json.dumps(sweep, indent=2) + "\n")


def readable(value: str) -> str:
    """A value, rounded to four digits if it is long: the numbers that a search draws have many digits."""
    number = as_number(value)
    return value if number is None or len(value) <= 8 else f"{number:.4g}"


def as_number(text: str) -> float | None:
    """The value as a finite number; None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# metrics.csv

_MOST_BYTES_OF_METRICS = 2**28  # bytes of a metrics.csv. That of a long run has a tenth of them


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The rows of a metrics.csv, each with all columns, without an incomplete last line; [] if there is no file.

    Raises DataError for a row with other columns, without a step, or with a text for a number.
    """
    fix = "remove that line, or the file: only curves are lost"
    text = read_text(path, _MOST_BYTES_OF_METRICS, fix) if path.is_file() else ""
    # A kill in the middle of a write leaves half a line.
    reader, rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]), restval="?"), []
    try:
        for row in reader:
            for cell in row.values():
                float(cell or 0)
            if not 0 <= int(row["step"]) < 2**62:
                raise ValueError("step")
            rows.append(row)
    except (csv.Error, ValueError, TypeError, KeyError) as error:  # a row that is too long has a list of cells
        raise damaged(path, f"line {reader.line_num}", fix) from error
    return rows


# A record that may come from anybody

_MOST_BYTES = 2**23  # bytes of any other record
_FIX = "give another folder, or write it again"


def damaged(path: Path, why: str, fix: str = _FIX) -> DataError:
    """The error for a record that no run wrote so."""
    return DataError(f"{path} is damaged, or another program wrote it ({why}): {fix}")


def read_text(path: Path, limit: int = _MOST_BYTES, fix: str = _FIX) -> str:
    """The text of a record. Raises DataError if it has more bytes than `limit`, NUL bytes, or is not UTF-8."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:  # a pipe would never end
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise damaged(path, f"more than {limit >> 20} MiB", fix)
    if b"\0" in content:
        raise damaged(path, "it has NUL bytes", fix)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise damaged(path, "it is not UTF-8", fix) from error


def read_json(path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object. Raises DataError if it is none, or if one of its keys has another type.

    kinds: types by key. A key may be missing.
    """
    try:
        record = json.loads(read_text(path))
    except (ValueError, RecursionError):  # the latter: 200,000 brackets
        record = None
    if not isinstance(record, dict):
        raise damaged(path, "it is no JSON object")
    for key in kinds.keys() & record.keys():
        try:
            record[key] = validated(kinds[key], record[key], key)
        except ConfigError as error:  # its message has the value, which may be anything
            raise damaged(path, f"its entry {key}") from error
    return record


# The sign of the user

_KEY_BYTES = 32
_OF_MODULES = "modules"
"""The first word of what is signed for modules. So nobody can present overrides as modules: they have a =."""


def signed(overrides: list[str]) -> dict[str, Any]:
    """The entries of results.json for overrides that the user has given or accepted."""
    return {"overrides": overrides, "signature": _signature(overrides)}


def is_signed(record: dict[str, Any]) -> bool:
    """Whether this user has given the overrides of a results.json."""
    if "overrides" not in record:  # others could take them from another file
        return False
    signature = _signature(record["overrides"])
    return signature is not None and record.get("signature") == signature


def signed_modules(modules: Collection[str]) -> dict[str, Any]:
    """The entries of results.json for the user's own modules, which a run of this user imports."""
    return {"modules": [*modules], "signature_of_modules": _signature([_OF_MODULES, *modules])}


def own_modules(folder: Path) -> list[str]:
    """The modules outside qnmixer that a run of this user has imported; [] for a run of somebody else.

    So a command may import them again for this run. Code of a stranger's run still needs the word `trust`.
    """
    record = read_results(folder)
    modules = record.get("modules", [])
    signature = _signature([_OF_MODULES, *modules]) if modules else None
    return modules if signature is not None and record.get("signature_of_modules") == signature else []


def _signature(overrides: list[str]) -> str | None:
    """The digest; None if there is no place for a key."""
    try:
        home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"  # a cache may be deleted
        path = Path(home) / "qnmixer" / "key"
        make_own_folder(path.parent)
        with private_files(), FileLock(path.with_name("key.lock")):  # the first two jobs may come here at once
            if not path.exists() or path.stat().st_size != _KEY_BYTES:
                with atomic_file(path) as stream:
                    stream.write(secrets.token_bytes(_KEY_BYTES))
        return hmac.digest(path.read_bytes(), json.dumps(overrides).encode(), "sha256").hex()
    except (OSError, RuntimeError):  # a disk that cannot be written, or no home
        return None


# The version of the code

PACKAGES = ("torch", "lightning", "hydra-core", "torchmetrics", "wandb", "qnmixer")


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change the numbers of a run."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


_CODE_SUFFIXES = (".py", ".yaml", ".yml")
_PRIVATE_NAME = re.compile(
    r"(^|/)\.|(^|[/_.-])(local|private|secrets?|credentials?|passwords?|tokens?|keys?)([/_.-]|$)", re.IGNORECASE
)


def git_commit(diff: str | None = None) -> str | None:
    """Commit of this code, with "+changes" and a digest if it was changed since; None outside a checkout.

    diff: `git_diff()`, if it is known.
    """
    try:
        head = _git(_checkout(_package()), "rev-parse", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    diff = git_diff() if diff is None else diff
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
            # The user's index knows which files are as they were: without a copy, git reads every file for each diff.
            with suppress(OSError):
                shutil.copy(root / _git(root, "rev-parse", "--git-path", "index").strip(), index["GIT_INDEX_FILE"])
            _git(root, "read-tree", "--reset", "HEAD", **index)
            names = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *parts, **index).split("\0")
            public_names = [name for name in names if not _PRIVATE_NAME.search(name)]
            # Without this, git diff leaves out files that were never added.
            if code := [name for name in public_names if Path(name).suffix in _CODE_SUFFIXES]:
                _git(root, "add", "--intent-to-add", "--", *code, **index)
            return _git(root, "diff", "--no-ext-diff", "--no-color", "HEAD", "--", *parts, **index)
    except (OSError, subprocess.CalledProcessError):
        return ""


def _package() -> Path:
    return Path(__file__).parents[1]


@cache
def _checkout(package: Path) -> Path:
    """The repository that contains this package. Raises CalledProcessError or OSError if there is none.

    A wheel may be installed inside somebody else's repository. Then git does not track this file.
    """
    _git(package, "ls-files", "--error-unmatch", "runs/records.py")
    return Path(_git(package, "rev-parse", "--show-toplevel").strip())


def _git(folder: Path | str, *arguments: str, **environment: str) -> str:
    command, environment = ["git", *arguments], os.environ | environment
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    return process.stdout.decode(errors="replace")
