"""Commands in the process of the test."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qnmixer.settings.project import project_at, project_here
from qnmixer.train import check

from .saved import run
from .schemas import SCHEMAS

CHECKS: dict[str, Callable[..., Any]] = {name: schema.parse for name, schema in SCHEMAS.items()} | {"train": check}


@dataclass
class Outcome:
    """What a command left: exit code, standard error, whether its task ran, and the config that its check gave."""

    code: int
    stderr: str
    ran: bool
    config: Any

    @property
    def line(self) -> str:
        """The one line of a refused command."""
        assert self.code == 1, self
        assert not self.ran
        (line,) = self.stderr.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")


class Typed:
    """typed(name, *words): a command line as its module starts it, with a task of the test's own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch

    def __call__(
        self,
        name: str,
        *words: str,
        task: Any = None,
        check: Callable[..., Any] | None = None,
        project: Path | None = None,
    ) -> Outcome:
        task_configs: list[Any] = []
        checked_configs: list[Any] = [None]

        def checking(config: Any) -> Any:
            checked_configs.append((check or CHECKS[name])(config))
            return checked_configs[-1]

        find = partial(project_at, project) if project else project_here  # project: whose own command it is
        code, _, stderr = run(task or task_configs.append, checking, name, *words, find_project=find)
        return Outcome(code, stderr, bool(task_configs), checked_configs[-1])

    def train(self, *overrides: str, task: Any = None) -> Outcome:
        """Train with its run folder in the test's own folder."""
        return self("train", *overrides, f"hydra.run.dir={self.folder}", task=task)


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_wandb: None) -> Typed:
    monkeypatch.chdir(tmp_path)
    return Typed(tmp_path / "run", monkeypatch)
