"""The learning rate of each step after a resume that changes the schedule, or does not."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from qnmixer.fit import fit
from qnmixer.module.parts import learning_rate_factor
from qnmixer.runs.run import Run
from qnmixer.training.checkpointing import BuiltSchedule

from ..conftest import metrics, tiny_config

Schedule = lr_scheduler.LRScheduler


class Line(Schedule):
    """Of one's own: it stores its length, which torch restores with its place."""

    def __init__(self, optimizer: torch.optim.Optimizer, n_steps: int) -> None:
        self.n_steps = n_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [rate * max(0.0, 1 - self.last_epoch / self.n_steps) for rate in self.base_lrs]


def warmed_up(optimizer: torch.optim.Optimizer, n: int) -> Schedule:
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, n - 3)], [3])


def warmed_up_line(optimizer: torch.optim.Optimizer, n: int) -> Schedule:
    line = lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / n)
    return lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5, 2), line], [2])


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], Schedule]] = {
    "function": lambda optimizer, n: lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / n),
    "cosine": lr_scheduler.CosineAnnealingLR,
    "cycle": lambda optimizer, n: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=n + 1),
    "own": Line,
    "warmed up": warmed_up,
    "warmed up line": warmed_up_line,
    "chain": lambda optimizer, n: lr_scheduler.ChainedScheduler([Line(optimizer, n)]),
}


def built(kind: str, n_steps: int) -> tuple[torch.optim.Optimizer, Schedule]:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.1, 0.02)]
    optimizer = torch.optim.AdamW(groups)
    return optimizer, SCHEDULES[kind](optimizer, n_steps)


def stepped(optimizer: torch.optim.Optimizer, schedule: Schedule, n_steps: int) -> list[list[Any]]:
    """Rates and betas of all groups at each step."""
    found = []
    for _ in range(n_steps):
        found.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("length", [12, 20])
@pytest.mark.parametrize("by_hand", [None, 0.7])
def test_the_steps_after_a_resume_follow_the_schedule_of_now(kind: str, length: int, by_hand: float | None) -> None:
    """An unchanged schedule goes on bit for bit, also where a rate was set by hand."""
    optimizer, schedule = built(kind, 12)
    before = BuiltSchedule(schedule)
    stepped(optimizer, schedule, 8)
    if by_hand is not None:
        optimizer.param_groups[0]["lr"] = by_hand
    kept = optimizer.state_dict(), schedule.state_dict()
    resumed_optimizer, resumed = built(kind, length)
    now = BuiltSchedule(resumed)
    resumed_optimizer.load_state_dict(kept[0])
    resumed.load_state_dict(kept[1])
    now.resume(before.settings)
    if by_hand is not None:
        assert resumed_optimizer.param_groups[0]["lr"] == by_hand
        return
    if length == 12:
        assert repr(resumed.state_dict()) == repr(schedule.state_dict())
    whole_optimizer, whole = built(kind, length)
    expected = stepped(whole_optimizer, whole, length)[8:]
    assert stepped(resumed_optimizer, resumed, length - 8) == expected


def test_a_schedule_by_a_metric_stays_as_it_was() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for value in (1.0, 1.0, 1.0):
        schedule.step(value)
    other = lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), patience=5)
    now = BuiltSchedule(other)
    other.load_state_dict(schedule.state_dict())
    now.resume("")
    assert other.state_dict() == schedule.state_dict()


@pytest.mark.parametrize(("optimizer", "schedule"), [("adamw", "cosine"), ("muon", "constant")])
def test_a_run_that_resumes_with_another_schedule_follows_it_at_once(
    tmp_path: Path, optimizer: str, schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says where its rate goes on, if that is another one."""
    words = f"optimizer={optimizer} callbacks=lr_monitor test_after_training=false trainer.limit_val_batches=0".split()
    first = tiny_config(*words, f"schedule={schedule}", "trainer.max_steps=4")
    fit(first, Run(tmp_path))
    resumed = tiny_config(*words, "schedule=cosine", "trainer.max_steps=8", f"resume={tmp_path}")
    capsys.readouterr()
    fit(resumed, Run(tmp_path, resume=str(tmp_path)))
    said = re.findall(r"^the schedule is another one now: .* at (\S+), not (\S+) \(", capsys.readouterr().out, re.M)
    rates = {name: values for name, values in metrics(tmp_path).items() if name.startswith("lr-")}
    assert len(rates) == {"adamw": 3, "muon": 4}[optimizer]
    factor, factor_before = learning_rate_factor(resumed.schedule, 8), learning_rate_factor(first.schedule, 4)
    lr = metrics(tmp_path)["train/lr"][4]
    assert [tuple(map(float, pair)) for pair in said] == [
        pytest.approx((lr, lr / factor(4) * factor_before(4)), rel=0.01, abs=1e-12)
    ]
    for values in [*rates.values(), metrics(tmp_path)["train/lr"]]:
        expected = [values[0] / factor_before(0) * factor(step) for step in range(4, 8)]
        assert values[4:] == pytest.approx(expected)
