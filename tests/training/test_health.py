"""Warnings about networks that die, which the tests plant, and no warning about healthy ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qnmixer.engine.build import build_module
from qnmixer.engine.config import Config
from qnmixer.engine.run_module import RunModule
from qnmixer.engine.tracking.records import read_metrics
from qnmixer.engine.tracking.run import Run
from qnmixer.engine.training import steps
from qnmixer.errors import UnstableNetwork
from qnmixer.fit import fit
from qnmixer.models import UnrolledNetwork

LONG = ["trainer.max_steps=55", "trainer.val_every_n_steps=55", "data.n_train=400", "test_after_training=false"]


class Planted(UnrolledNetwork[Tensor]):
    """FBP times a weight; `fault` says what becomes of its image after 15 calls."""

    title = "Planted"

    def __init__(self, projector: Any, fault: str, after: int = 15) -> None:
        super().__init__(n_iterations=1)
        self.projector, self.fault, self.after, self.calls = projector, fault, after, 0
        self.weight = nn.Parameter(torch.ones(1))

    def start(self, y: Tensor) -> Tensor:
        return self.projector.fbp(y)

    def step(self, t: int, y: Tensor, state: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()
        x = self.weight * state
        if self.calls <= self.after:
            return x
        if self.fault == "dead":
            return (x - 100).clamp_min(0)
        if self.fault == "overflow":
            return x + 0 * (0 * x).sqrt()
        if self.fault == "worse":
            return x + 0.3 * torch.ones_like(x)
        if self.fault == "still" and self.calls <= 21:
            return x.detach() + 0 * x
        return 1e4 * x if self.fault == "far" else x


def run(config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str, **options: Any) -> dict[str, Any]:
    def planted(config: Config, projector: Any = None) -> RunModule:
        module = build_module(config, projector)
        module.network = Planted(module.projector, fault, **options)
        return module

    monkeypatch.setattr(steps, "build_module", planted)
    fit(config, Run(folder))
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(
    ("fault", "words", "names"),
    [
        ("dead", [], {"zero_gradient", "worse_than_fbp"}),
        ("worse", [], {"worse_than_fbp"}),
        ("overflow", ["trainer.precision=16-mixed"], {"gradient_not_finite"}),  # each step is skipped
    ],
)
def test_a_network_that_dies_is_reported_within_fifty_steps(
    tiny_config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    words: list[str],
    names: set[str],
) -> None:
    record = run(tiny_config(*LONG, "optimizer.lr=1e-9", *words), tmp_path, monkeypatch, fault)
    assert {warning["name"] for warning in record["warnings"]} == names
    assert len(record["warnings"]) == len(names)
    assert all(15 <= warning["step"] <= 15 + 50 for warning in record["warnings"])
    assert all(warning["warning"] in capsys.readouterr().out for warning in record["warnings"][:1])
    told = {name for row in read_metrics(tmp_path / "metrics.csv") for name in row if row[name] == "1.0"}
    assert {f"health/{name}" for name in names} <= told


def test_it_is_the_gradient_of_the_step_that_is_checked(
    tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is zero in the checks at steps 10 and 20, and not in those before and after: too few for a warning."""
    record = run(tiny_config(*LONG), tmp_path, monkeypatch, "still", after=1)
    assert "zero_gradient" not in {warning["name"] for warning in record.get("warnings", [])}


def test_the_warm_up_of_a_run_of_epochs_is_waited_for(
    tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = ["trainer.max_epochs=1", "trainer.max_steps=-1", "data.n_train=60", "data.batch_size=1"]
    slow = ["schedule=cosine", "schedule.warmup=0.9", "optimizer.lr=1e-9", "trainer.val_every_n_steps=60"]
    record = run(tiny_config(*epoch, *slow, "test_after_training=false"), tmp_path, monkeypatch, "worse")
    assert record["steps"] == 60
    assert "warnings" not in record


def test_a_start_that_is_far_off_is_refused_before_the_first_step(
    tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnstableNetwork, match=r"untrained network.*FBP's.*safe_step_size"):
        run(tiny_config(), tmp_path, monkeypatch, "far", after=0)
    record = json.loads((tmp_path / "results.json").read_text())
    assert (record["status"], record["steps"]) == ("failed", 0)


def test_a_batch_that_only_fills_a_step_is_left_out(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    """One slice an epoch, and four batches a step: three have no slice of their own."""
    few = ["data.n_train=1", "data.batch_size=1", "trainer.accumulate_grad_batches=4", "trainer.max_steps=3"]
    fit(tiny_config(*few, "test_after_training=false"), Run(tmp_path))
    assert json.loads((tmp_path / "results.json").read_text())["status"] == "done"


def test_a_healthy_run_has_no_warning(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    fit(tiny_config(*LONG), Run(tmp_path))
    assert "warnings" not in json.loads((tmp_path / "results.json").read_text())
