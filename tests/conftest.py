"""Fixtures that every room's tests share."""

from __future__ import annotations

import csv
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# To look for garbage takes a tenth of the time: none is looked for until all tests are collected.
gc.disable()
# One thread a test process, set before torch is loaded: several of them on few cores would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What tests keep on disk goes with the session; pytest's own workers, and all that tests start, inherit the name.
if "QNMIXER_TESTS" not in os.environ:
    _kept = tempfile.TemporaryDirectory(prefix="qnmixer-tests-")
    os.environ["QNMIXER_TESTS"] = _kept.name
    if "XDG_CACHE_HOME" not in os.environ:
        os.environ["XDG_CACHE_HOME"] = _kept.name
        os.environ["XDG_CONFIG_HOME"] = f"{_kept.name}/config"

import pytest
import yaml

from .schemas import EXTRAS
from .warm import FORK_RANKS, GARBAGE, Warm, collapse_pages, list_packages_once, name_methods_at_once

# The process that only hands out tests (make test: -n 3) starts the others seconds earlier without large libraries.
if TYPE_CHECKING or "PYTEST_XDIST_WORKER" in os.environ or "-n 3" not in " ".join(sys.argv):
    import lightning as L
    import torch

    from qnmixer.module import ReconstructionModule
    from qnmixer.module.build import build_module
    from qnmixer.runs.run import run_lock
    from qnmixer.settings.compose import compose
    from qnmixer.settings.run import Config, parse

    from .composing import compose_faster
    from .typed import typed  # noqa: F401 - a fixture

    compose_faster()
    name_methods_at_once()

# A config is dozens of YAML files, and most tests compose some. libyaml reads them as Python's own loader does, but
# several times as fast; what it says of bad files differs. Processes that tests start have Python's.
PYTHONS_LOADER = yaml.SafeLoader
yaml.SafeLoader = yaml.CSafeLoader

# A shell ignores Ctrl-C for what it starts in the background, and nohup SIGHUP; so would all that a test stops.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

TINY = [
    "data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24", "geometry.detector_pitch=40",
    "model.n_iterations=2", "model.channels=4", "model.n_mixer_layers=1", "data.num_workers=0", "data.batch_size=2",
    "trainer.max_steps=4", "trainer.val_every_n_steps=2", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu",
    "logger=csv", "callbacks=none", "evaluation.n_pictures=1", "test_after_training=false",
]  # fmt: skip
PHANTOMS = ["data.n_train=8", "data.n_val=2", "data.n_test=2"]
# For a module in this process, which is evaluated too.
TINY_RUN = [*TINY[:-1], "data.n_train=8", "data.n_val=3", "data.n_test=4"]

# What of the surroundings of a test would change a command.
OUTER = ("HYDRA", "SLURM", "TORCHELASTIC", "WANDB", "GIT_")


def every_third(cases: Iterable[Any]) -> list[Any]:
    """Cases of a long table for parametrize: every third is in make test; the others, alike, are long."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=[pytest.mark.long] if n % 3 else []) for n, row in enumerate(rows)]


def few_conditions(**kept: str) -> list[str]:
    """Words for `robustness`, which leave out all conditions but some."""
    axes = "noises photons arc patient_size detector_offset source_distance tube_kv scatter smooth_scatter crosstalk"
    return [f"{axis}={kept.get(axis, '[]')}" for axis in f"{axes} motion truncation metal views".split()]


def environment(**variables: str) -> dict[str, str]:
    """That of this process, for a command that takes nothing from it."""
    inherited_variables = {name: value for name, value in os.environ.items() if not name.startswith(OUTER)}
    return inherited_variables | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | variables


def python(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python WORDS` in a folder: a process of its own, from the start of Python on."""
    command, variables = [sys.executable, *words], environment(**variables)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=variables, timeout=600)


def last_checkpoint(run: Path) -> dict[str, Any]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)


def assert_equal(content: Any, expected: Any) -> None:
    """Of checkpoints, or parts of them: every tensor to the last bit."""
    if isinstance(content, torch.Tensor):
        assert torch.equal(content, expected)
    elif isinstance(content, dict):
        assert content.keys() == expected.keys()
        for key, value in content.items():
            assert_equal(value, expected[key])
    elif isinstance(content, list | tuple):
        assert len(content) == len(expected)
        for a, b in zip(content, expected, strict=True):
            assert_equal(a, b)
    else:
        assert content == expected


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def rows_without_times(folder: Path) -> list[dict[str, str]]:
    """metrics.csv, but for columns that differ between equal runs."""
    times = re.compile("second|^memory/")
    return [{k: v for k, v in row.items() if not times.search(k)} for row in csv_rows(folder / "metrics.csv")]


def metrics(folder: Path) -> dict[str, list[float]]:
    """metrics.csv by column, without the empty cells."""
    lines = csv_rows(folder / "metrics.csv")
    return {key: [float(line[key]) for line in lines if line[key]] for key in lines[0]}


def config_of(*overrides: str) -> Config:
    """A checked config of these words alone."""
    return parse(compose("train", [*overrides]))


_parsed = cache(config_of)
"""Hydra takes a tenth of a second, and many tests ask for the same."""


def tiny_config(*overrides: str) -> Config:
    """A checked config of the smallest network."""
    return deepcopy(_parsed(*TINY_RUN, *overrides))


def other_config(*overrides: str) -> Config:
    """The same for another network, with no word of QN-Mixer's mixer."""
    words = [word for word in TINY_RUN if not word.startswith("model.n_mixer")]
    return deepcopy(_parsed(*words, *overrides))


def tiny_module(*overrides: Any) -> ReconstructionModule:
    """The module of tiny_config, with the same weights every time."""
    L.seed_everything(0, verbose=False)
    return build_module(tiny_config(*overrides))


@pytest.fixture(scope="session")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    """Runs commands that need no large library but torch."""
    return server("cold", tmp_path_factory, "qnmixer.models")


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    """Runs commands that need torch, Lightning or W&B."""
    rooms = ["training.worker", "reconstruction.reconstruct", "memory.report", "commands.checkup.checks", "lightning"]
    rooms += ["runs.processes.launch"]
    modules = ["qnmixer.fit", *["qnmixer.extras.export.export"] * EXTRAS, *(f"qnmixer.{room}" for room in rooms)]
    modules += ["wandb", "wandb.sdk.launch.inputs.internal", "rich.status"]  # W&B loads its launcher when a run starts
    modules += [f"opentelemetry.exporter.otlp.proto.http.{of}_exporter" for of in ("_log", "metric")]  # and these
    return server("warm", tmp_path_factory, *modules)


def server(name: str, factory: pytest.TempPathFactory, *modules: str) -> Warm:
    """One for all workers of pytest-xdist, since each takes 10 s of a core to load: it ends with their controller."""
    shared = "PYTEST_XDIST_WORKER" in os.environ
    folder = (factory.getbasetemp().parent if shared else factory.getbasetemp()) / name
    folder.mkdir(exist_ok=True)
    return Warm(folder, *modules, owner=os.getppid() if shared else os.getpid())


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one line of a command that failed."""
        assert self.code == 1, self.stderr
        (line,) = [line for line in self.stderr.splitlines() if line.strip()]
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    @property
    def text(self) -> str:
        """Standard output, however it was broken into lines."""
        return " ".join(self.stdout.split())


@pytest.fixture(scope="session")
def command(warm: Warm) -> Callable[..., Outcome]:
    """command(folder, name, *words, **variables): `python -m qnmixer.NAME WORDS` in a folder.

    A process of its own, whose libraries are loaded before.
    """

    def run(folder: Path, name: str, *words: str, **variables: str) -> Outcome:
        variables = environment(**FORK_RANKS, **variables)
        process = warm.run("-m", f"qnmixer.{name}", *words, cwd=folder, env=variables)
        return Outcome(process.returncode, process.stdout, process.stderr)

    return run


@pytest.fixture
def no_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No settings of W&B, another home, and no run that stays open."""
    for name in [name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_SERVICE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    list_packages_once()
    yield
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()


def pytest_collection_finish() -> None:
    """A config is many small objects: for each, garbage collections would look at all of torch too."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE)
    gc.enable()
    collapse_pages()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked cuda on a machine without a GPU, and what is marked extras in a copy without them."""
    reasons = {} if torch.cuda.is_available() else {"cuda": "torch sees no CUDA device here"}
    if not EXTRAS:
        reasons["extras"] = "this copy has no qnmixer.extras or no qnmixer_studies"
    for mark, reason in reasons.items():
        for item in items:
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests share the cores with each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_ct() -> Path:
    """Folder of real CT files to try things on, which are too large for this repository."""
    folder = os.environ.get("QNMIXER_TEST_CT")
    if folder is None:
        pytest.skip("no real CT files here (set QNMIXER_TEST_CT to a folder of them)")
    return Path(folder)


@contextmanager
def lock_of_another(folder: Path) -> Iterator[int]:
    """Another process holds the lock of a run folder, and has forked a child, as for data; gives its number."""
    listen, say = os.pipe()
    wait, release = os.pipe()
    if (holder := os.fork()) == 0:
        os.close(release)
        with run_lock(folder):
            if os.fork():
                os.write(say, b"x")
            os.read(wait, 1)  # until the block ends
        os._exit(0)
    os.read(listen, 1)
    yield holder
    os.close(release)
    with suppress(ChildProcessError):  # the test has killed it
        os.waitpid(holder, 0)


@dataclass
class Command:
    """A training of a tiny network, and all processes that came of it, which have its mark in their environment."""

    process: subprocess.Popen[str]
    mark: str
    folder: Path
    stdout: str = ""  # once it has ended

    def family(self) -> dict[int, dict[str, str]]:
        """The environments of all its processes that live, by process."""
        environments = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                text = path.read_text(errors="replace")
            except OSError:
                continue
            if self.mark in text:
                environments[int(path.parent.name)] = dict(
                    variable.split("=", 1) for variable in text.split("\0") if "=" in variable
                )
        return environments

    def ranks(self, number: int) -> list[int]:
        """A rank and its data workers, oldest first."""
        return sorted(pid for pid, environment in self.family().items() if environment.get("RANK") == str(number))

    def wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + 200  # the machine may be busy
        while not path.exists():
            if time.monotonic() > deadline:
                for pid in self.family():
                    os.kill(pid, signal.SIGKILL)
                pytest.fail(f"no {path.name} in 200 s: {self.process.communicate()}")
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def outcome(self) -> Outcome:
        """Once it has ended with all its processes."""
        self.stdout, stderr = self.process.communicate(timeout=300)
        deadline = time.monotonic() + 60
        while self.family():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return Outcome(self.process.returncode, self.stdout, stderr)

    def end(self) -> tuple[int, str, float]:
        """Exit code, standard error, and how long it took to end, with all its processes."""
        start = time.monotonic()
        code, _, stderr = self.outcome()
        return code, stderr, time.monotonic() - start

    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "results.json").read_text())

    def losses(self) -> list[float]:
        return metrics(self.folder)["train/loss"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """start(*overrides, under=command, env=…, folder=…): training of a tiny network, in a process of its own.

    folder=None: where it says itself.
    """
    commands: list[Command] = []

    def begin(
        *overrides: str,
        under: tuple[str, ...] = (sys.executable,),
        env: dict[str, str] | None = None,
        folder: Path | None = tmp_path / "run",
    ) -> Command:
        mark = f"qnmixer-test-{uuid.uuid4().hex}"
        variables = environment(QNMIXER_TEST_MARK=mark) | (env or {})
        arguments = [*TINY, *([] if "data=numpy" in overrides else PHANTOMS), *overrides]
        if folder:
            arguments.append(f"hydra.run.dir={folder}")
        process = subprocess.Popen(
            [*under, "-m", "qnmixer.train", *arguments], cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables, start_new_session=True,
        )  # fmt: skip
        commands.append(Command(process, mark, folder or tmp_path))
        return commands[-1]

    yield begin
    for command in commands:
        for pid in command.family():
            os.kill(pid, signal.SIGKILL)
        command.process.communicate()


@dataclass
class OfflineRun:
    """One W&B run, or the part of it that one process wrote, as wandb's own tool reads it back."""

    folder: Path
    id: str = ""
    started: str = ""
    name: str = ""
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)  # a column each in W&B's table of runs
    exit_code: int | None = None  # None: it was never ended
    history: list[dict[str, Any]] = field(default_factory=list)  # a dict for each step
    records: list[dict[str, Any]] = field(default_factory=list)  # everything, as it was written

    @property
    def metrics(self) -> set[str]:
        """Names of what was logged."""
        return {name for row in self.history for name in row if not name.startswith("_")}


def offline_runs(folder: Path) -> list[OfflineRun]:
    """The W&B runs anywhere below a folder, in the order in which they began."""
    runs = [_read_offline_run(path) for path in folder.rglob("offline-run-*/*.wandb")]
    return sorted(runs, key=lambda run: run.started)


def _read_offline_run(path: Path) -> OfflineRun:
    from wandb.util import get_core_path

    # As `wandb leet inspect --json` runs it, which takes 1 s to start.
    options = ["--no-observability", "--json", "--run-file", str(path)]
    command = [get_core_path(), "leet", "inspect", *options, str(path.parents[1])]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    run = OfflineRun(path.parent, records=[json.loads(line) for line in text.splitlines()])
    for record in run.records:
        content = record.get(record["type"], {})
        if record["type"] == "run":
            run.id, run.started = content["run_id"], content["start_time"]
            run.name, run.group = content.get("display_name", ""), content.get("run_group")
            run.tags = content.get("tags", [])
        elif record["type"] == "exit":
            run.exit_code = content.get("exit_code", 0)
        elif record["type"] == "history":
            run.history.append(content["item"])
        if record["type"] in ("run", "config"):
            run.config |= content.get("config", content).get("update", {})
        if record["type"] == "summary":
            run.summary |= content.get("update", {})
    return run
