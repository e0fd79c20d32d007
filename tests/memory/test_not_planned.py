"""Networks whose step does not run without data: a plan says so in a line, and a run goes on without it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qnmixer.errors import ConfigError, OutOfMemory
from qnmixer.memory.plan import Planner, advice, changes
from qnmixer.memory.plan_config import PlanConfig
from qnmixer.memory.report import print_plan
from qnmixer.models import UnrolledNetwork
from qnmixer.module.build import build_module
from qnmixer.parallel.shapes import _Shapes
from qnmixer.physics import FanBeamProjector
from qnmixer.settings.compose import compose
from qnmixer.settings.run import Config
from qnmixer.training import steps

from ..conftest import config_of

NEEDS_DATA: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "shape": lambda x, y: len(x[x > 0.1]) / x.numel(),
    "numpy": lambda x, y: float(x.numpy().mean()),
    "item": lambda x, y: 2.0 if y.mean().item() > 100 else 1.0,
    "branch": lambda x, y: 2.0 if x.mean() > 0.5 else 1.0,
    "list": lambda x, y: x.mean(dim=(0, 1, 2)).tolist()[0],
    "nonzero": lambda x, y: len(torch.nonzero(x > 0.1)) / x.numel(),
    "equal": lambda x, y: float(torch.equal(x, y)),
}
"""What a step multiplies its part by, from x and y."""


class Own(UnrolledNetwork[Tensor]):
    def __init__(self, projector: FanBeamProjector, n_iterations: int, channels: int, kind: str) -> None:
        super().__init__(n_iterations)
        if kind == "wide" and channels < 8:
            raise RuntimeError("it is too narrow")
        self.projector, self.kind = projector, kind
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, n_iterations)]  # known without data
        self.part = nn.Conv2d(1, 1, 3, padding=1)

    def step(self, t: int, y: Tensor, x: Tensor) -> Tensor:
        if self.kind == "short" and self.n_iterations > 3:
            raise RuntimeError("there are three rates")
        return x - self.part(x) * (NEEDS_DATA[self.kind](x.detach(), y) if self.kind in NEEDS_DATA else 1)


RUN = [
    "model=custom", f"model._target_={__name__}.Own", "model.n_iterations=3", "model.channels=8",
    "data.image_size=32", "geometry.n_views=8", "geometry.n_detectors=48", "geometry.detector_pitch=20",
    "data.batch_size=2", "trainer.accelerator=cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def plans_end() -> Iterator[None]:
    yield
    assert _Shapes.active is None


def run_of(kind: str) -> Config:
    return config_of(*RUN, f"+model.kind={kind}")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        *((kind, []) for kind in NEEDS_DATA),
        ("item", ["memory=recompute"]),
        ("shape", ["strategy=pipeline", "trainer.devices=3"]),
    ],
)
def test_a_plan_of_it_is_one_line(kind: str, words: list[str]) -> None:
    config = PlanConfig.parse(compose("plan", [*RUN, f"+model.kind={kind}", *words]))
    with pytest.raises(ConfigError) as error:
        print_plan(config)
    assert str(error.value).startswith("a step of this run cannot be planned: without data it raises ")
    assert len(str(error.value).splitlines()) == 1


def test_a_run_goes_on_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "memory_of", lambda _: 0.01)  # so that each step counts as large
    with pytest.raises(OutOfMemory):
        steps.require_memory(run_of("plain"))
    for kind in ("shape", "numpy", "item"):
        steps.require_memory(run_of(kind))


def test_a_run_that_is_out_of_memory_says_so_without_a_plan(tmp_path: Path) -> None:
    config = run_of("item")
    module = build_module(config)
    trainer = steps.build_trainer(config, tmp_path, [], [])
    refused = pytest.raises(OutOfMemory, match=r"^out of memory: lower data\.batch_size=2$")
    with refused, steps.out_of_memory_advice(config, module, trainer):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_what_alone_cannot_be_planned_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A network of three iterations at most has no growth, and one of eight channels at least is not made narrower."""
    print_plan(PlanConfig.parse(compose("plan", [*RUN, "+model.kind=short", "format=json"])))
    plan = json.loads(capsys.readouterr().out)
    assert plan["per_iteration_mib"] is None
    assert plan["peak_mib"] > 0
    config = run_of("wide")
    assert "model.channels" in " ".join(changes(config))
    line = advice(Planner(config), config, 0.0)
    assert line.startswith("out of memory: a step of this run needs")
    assert "model.channels" not in line
