"""Promise 1: any command line reaches its task, or ends in one line and a non-zero exit code, and writes nothing."""

import importlib
import logging
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra

from qnmixer.commands import command
from qnmixer.runs import sweeps
from qnmixer.settings.compose import compose
from qnmixer.settings.options import CONF, flat, options

from ..schemas import SCHEMAS

LINES = {
    "train": [
        "experiment=demo",
        "data=numpy data.root=ct data.split=explicit data.val_patients=[1.10,P2]",
        "data=mixed data.sources.slices.root=ct",
        "data=two_detect data.root=ct geometry=two_detect",
        "model=regformer optimizer=muon schedule=step memory=recompute",
        "model=custom model._target_=qnmixer.models.LEARN",
        "callbacks=[ema,early_stopping] metrics=[default,rmse_hu] tags=[a,b]",
        "logger=[wandb,csv] logger.wandb.project=mine",
        "strategy=pipeline trainer.devices=2 data.batch_size=4",
        "noise=physical noise.photons=1e5 loss=ssim_mix",
        "resume=ct",
        "experiment=demo hydra.run.dir=ct",
        "--config-dir conf loss=mine",
        "-m seed=1,2 optimizer.lr=1e-3,1e-4",
        "--cfg job trainer.max_epochs=2",
    ],
    "plan": ["device=V100-32 experiment=demo", "trainer.max_steps=4"],
    "doctor": ["strategy=ddp trainer.devices=2"],
    "evaluate": ["run=ct data=phantoms noise=field", "run=ct evaluation=task", "-m run=ct,nowhere"],
    "reconstruct": ["run=pretrained input=ct output=out formats=[npy]"],
    "compare": ["sweep=[ct,nowhere] split=val"],
    "export": ["run=ct output=a.safetensors"],
    "calibrate": ["input=ct output=out"],
    "robustness": ["run=ct noises=[none] views=[2]"],
}
"""Command lines that are right, or name files that are not there."""
LINES = {name: lines for name, lines in LINES.items() if name in SCHEMAS}

VALUES = [
    "", "null", "None", "true", "-1", "0", "1.5", "1e400", "nan", "inf", "9" * 5000, "a", "a b", "é", "x" * 300,
    "\x1b[2J", "a=b", "'", '"a', "\\", "[", "[]", "[1,[2]]", "{}", "{a:1}", "{a:{b:[1]}}", "{_target_:os.system}",
    "[{_target_:a.b}]", "${seed}", "${nope}", "${", "${oc.env:HOME}", "${oc.env:NOT_THERE}", "1,2", "a,b,", "range(3)",
    "glob(*)", "interval(0,1)", "choice(1,2)", "int(1)", "(1,2)", "/", "~", "..", "ct", "a_file", "runs/x", "1:2", "@",
    "$x", "[" * 400,
]  # fmt: skip
FLAGS = [
    "-m", "--multirun", "--multi", "-mm", "--", "-", "--cfg", "--cfg=job", "--cfg=jb", "-c", "--info", "--info=x", "-i",
    "--resolve", "--package", "--package=model", "-p", "--config-name=x", "--config-path=x", "-cd",
    "--config-dir=nowhere", "--config-dir", "--experimental-rerun=x", "--experiment", "--seed=3", "--max-epochs",
    "--lr", "--run", "-sc", "-r", "--shell-completion", "--hydra-help", "--help", "--version", "-lr", "-1", "---",
]  # fmt: skip


class Checked(BaseException):
    """Raised in place of the task, after all checks."""


def mutated(rng: random.Random, words: list[str], keys: list[str]) -> list[str]:
    """The words with one or two changes."""
    groups = sorted(path.name for path in CONF.iterdir() if path.is_dir())
    words = [*words]
    for _ in range(rng.randint(1, 2)):
        i = rng.randrange(len(words) + 1)
        word = words[i] if i < len(words) else f"{rng.choice(keys)}={rng.choice(VALUES)}"
        key, equal, value = word.partition("=")
        n, group = rng.randrange(len(word) + 1), rng.choice(groups)
        ways = [
            [f"{key}={rng.choice(VALUES)}"],
            [f"{rng.choice(keys)}={rng.choice(VALUES)}"],
            [f"{rng.choice(keys)}{equal}{value}"],
            [f"{group}={rng.choice([*VALUES, *options(group)])}"],
            [word[:n] + word[n + 1 :]],
            [word[:n] + rng.choice("aé._=,[]{}$~+@:/\\'\" \n0") + word[n:]],
            [word[:n][::-1] + word[n:]],
            [rng.choice(["+", "++", "~", "~~", "--", "-", "=", "$", "@"]) + word],
            [key, value],
            [f"--{key}", value],
            [key],
            [f"{key}.{rng.choice(['a', '0', '_target_', 'name'])}={value}"],
            [f"{key}@{group}={value}"],
            [f"hydra.{rng.choice(['run.dir', 'sweep.dir', 'mode', 'launcher', 'job.name', key])}={value}"],
            [word, rng.choice(FLAGS)],
            [word, word],
            [],
        ]
        words[i : i + 1] = rng.choice(ways)
    return words


def command_lines(n: int) -> Iterator[tuple[str, list[str]]]:
    rng = random.Random(n)
    keys = {name: sorted(dict(flat(dict(compose(name, []).items_ex(resolve=False))))) for name in LINES}
    lines = [(name, line.split()) for name in LINES for line in LINES[name]]
    for i in range(n):
        name, words = lines[i % len(lines)]
        yield name, mutated(rng, words, keys[name])


@contextmanager
def without_tasks() -> Iterator[None]:
    """Commands end where their task, or their sweep, would begin to write."""

    def end(*_: Any, **__: Any) -> None:
        raise Checked

    plain_sweep = command._plain_sweep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hydra, "run", end)
        patch.setattr(sweeps, "run_lock", end)
        patch.setattr(command, "make_free_folder", end)
        patch.setattr(command, "_plain_sweep", lambda *words: end(plain_sweep(*words)))
        patch.delenv(command.TRACEBACK, raising=False)
        yield


def files_in(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """A line may let Hydra configure logging. A handler that stays would write to what this test had as its output."""
    handlers = [*logging.root.handlers]
    yield
    for handler in [*logging.root.handlers]:
        if handler not in handlers and "pytest" not in type(handler).__module__:
            logging.root.removeHandler(handler)


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize("n", [60, pytest.param(1500, marks=pytest.mark.long)])
def test_every_mutated_line_runs_or_is_refused_in_one_line(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_wandb: None
) -> None:
    (tmp_path / "ct").mkdir()
    (tmp_path / "a_file").touch()
    (tmp_path / "conf" / "loss").mkdir(parents=True)
    (tmp_path / "conf" / "loss" / "mine.yaml").write_text("_target_: qnmixer.losses.l1\n")
    monkeypatch.chdir(tmp_path)
    files, refusals, failures = files_in(tmp_path), 0, []
    for name, words in command_lines(n):
        monkeypatch.setattr(sys, "argv", [name, *words])
        capsys.readouterr()
        code: Any = 0
        try:
            with without_tasks():
                importlib.import_module(f"qnmixer.{name}").main()
        except Checked:
            pass
        except SystemExit as end:
            code = end.code or 0
        except Exception as error:
            failures.append((name, words, repr(error)[:300]))
            continue
        lines = capsys.readouterr().err.splitlines()
        refusals += code != 0
        if code != 0 and not (
            code == 1 and len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 4000
        ):
            failures.append((name, words, code, lines))
        if files_in(tmp_path) != files:
            failures.append((name, words, os.listdir()))
            files = files_in(tmp_path)
    print(f"{refusals} of {n} lines refused")
    assert not failures, "\n".join(map(str, failures))
    assert refusals > n / 2  # it tests errors
