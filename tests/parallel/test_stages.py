from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops

from qnmixer.build import build_module
from qnmixer.config import parse
from qnmixer.config.compose import compose
from qnmixer.errors import ConfigError
from qnmixer.models.qn_mixer import QNMixer, QNState
from qnmixer.module import ReconstructionModule
from qnmixer.parallel.stages import (
    Action,
    Logged,
    Packing,
    Stage,
    actions,
    cut_by_cost,
    cut_evenly,
    idle_share,
    loss_of_part,
    ranges,
    survey,
)


def everything(schedule: str, devices: int, n: int, per_device: int = 1) -> list[list[Action]]:
    return [actions(schedule, device, devices, n, per_device) for device in range(devices)]


@pytest.mark.parametrize(
    ("schedule", "n", "per_device"),
    [
        ("1f1b", 4, 1),
        ("1f1b", 9, 1),
        ("gpipe", 6, 1),
        ("sequential", 3, 1),
        ("interleaved", 8, 2),
        ("interleaved", 3, 3),
    ],
)
def test_a_schedule_does_everything_once_and_comes_to_an_end(schedule: str, n: int, per_device: int) -> None:
    done = [action for device in everything(schedule, 4, n, per_device) for action in device]
    assert sorted(done) == sorted(Action(kind, s, k) for kind, s, k in product("FB", range(4 * per_device), range(n)))
    assert 0 < idle_share(schedule, 4, n, [1.0] * 4 * per_device, per_device) < 1


@pytest.mark.parametrize(("devices", "n", "per_device"), [(4, 8, 2), (2, 6, 3), (4, 3, 2), (4, 4, 4)])
def test_interleaved_is_torchs(devices: int, n: int, per_device: int) -> None:
    """Torch's own order, from the functions that its schedule is made of (the schedule itself needs processes)."""
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    in_round = n // max(1, n // devices)
    for device in range(devices):
        total = per_device * n
        warm_up = min(total, (per_device - 1) * in_round + 2 * (devices - 1 - device))  # torch's; a function since 2.11
        expected = _get_1f1b_rank_ops(
            per_device, devices, warm_up, total - warm_up, warm_up, device,
            lambda step, r=device: step // in_round % per_device * devices + r,
            lambda step, r=device, w=warm_up: (per_device - 1 - (step - w) // in_round % per_device) * devices + r,
        )  # fmt: skip
        order = [Action(kinds[a.computation_type.name], a.stage_index, a.microbatch_index) for a in expected if a]
        assert actions("interleaved", device, devices, n, per_device) == order


def test_1f1b_holds_as_many_microbatches_as_devices_are_left() -> None:
    for device, order in enumerate(everything("1f1b", 4, 8)):
        held = [0]
        for action in order:
            held.append(held[-1] + (1 if action.kind == "F" else -1))
        assert max(held) == 4 - device


@pytest.mark.parametrize("n", [4, 8, 16])
def test_the_bubble_of_equal_stages_is_the_textbooks(n: int) -> None:
    for schedule in ("1f1b", "gpipe"):
        assert idle_share(schedule, 4, n, [1.0] * 4) == pytest.approx(3 / (n + 3))
    assert idle_share("sequential", 4, n, [1.0] * 4) == pytest.approx(3 / 4)
    assert idle_share("interleaved", 4, n, [0.5] * 8, per_device=2) == pytest.approx(1.5 / (n + 1.5))


def test_cuts() -> None:
    assert cut_evenly(14, 4) == [4, 4, 3, 3]
    assert ranges([4, 4, 3, 3]) == [range(0, 4), range(4, 8), range(8, 11), range(11, 14)]
    assert cut_by_cost([1] * 16, 4) == [4, 4, 4, 4]
    assert cut_by_cost([3, 1, 1, 1, 1, 1, 1, 3], 4) == [1, 3, 3, 1]
    costs = [2.0, 1, 4, 1, 1, 3, 2, 2, 1]
    every = [c for c in product(range(1, 8), repeat=3) if sum(c) == len(costs)]
    worst = [max(sum(costs[t] for t in part) for part in ranges(cut)) for cut in every]
    found = cut_by_cost(costs, 3)
    assert max(sum(costs[t] for t in part) for part in ranges(found)) == min(worst)


def module_of(*overrides: str) -> ReconstructionModule:
    tiny = (
        "data.image_size=16 geometry.n_views=8 geometry.n_detectors=24 geometry.detector_pitch=40 "
        "model.n_iterations=5 model.channels=4 model.n_mixer_layers=1"
    )
    torch.manual_seed(0)
    module = build_module(parse(compose("train", [*tiny.split(), *overrides])))
    for p in module.parameters():
        p.data += 0.02 * torch.randn_like(p)
    return module


@pytest.mark.parametrize("overrides", [(), ("model.hessian_gradient=detach",), ("model.hessian=identity",)])
def test_a_state_comes_out_of_its_packing_as_it_went_in(overrides: tuple[str, ...]) -> None:
    """Values, types, what is differentiated; and one copy of what the state holds twice."""
    module = module_of(*overrides)
    y = torch.rand(3, 1, 8, 24)
    state: Any = module.network.run(range(4), y, module.network.start(y))
    packing = Packing.of(state)
    packed = packing.pack(state)
    assert packed.shape == (3, packing.width)
    back = packing.unpack(packed)
    assert isinstance(back, QNState)
    assert isinstance(module.network, QNMixer)
    assert Packing.of(back) == packing
    assert torch.equal(packing.pack(back), packed)
    large, small = {"identity": (1, 1), "bfgs": (2 * 3 + 2, 2 * 3 + 1)}[module.network.hessian]
    assert packing.width == (1 + large) * 256 + small  # x; of each pair s, z, ρ and cosine; s, its scale, and r


def test_stages_one_after_the_other_are_the_network() -> None:
    module = module_of()
    network, y = module.network, torch.rand(2, 1, 8, 24)
    packings, costs = survey(network, y, torch.enable_grad, timed=True)
    assert len(packings) == 6
    assert len(costs) == 5
    assert min(costs) > 0
    assert all(p.grad is None for p in network.parameters())
    packed: tuple[torch.Tensor, ...] = ()
    for iterations in ranges([1, 2, 2]):
        stage = Stage(network, iterations, packings[iterations.start] if iterations.start else None)
        packed = (stage(*packed, y=y),)
        if iterations.stop < 5:
            assert packed[0].shape == (2, packings[iterations.stop].width)
    packed[0].square().sum().backward()
    through = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    network.zero_grad()
    x = network(y)
    torch.testing.assert_close(packed[0], x)
    x.square().sum().backward()
    for found, p in zip(through, network.parameters(), strict=True):
        torch.testing.assert_close(found, p.grad, rtol=1e-4, atol=1e-6)


class Logging(ReconstructionModule):
    """Logs the means of its images and of its sinograms."""

    what: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        y = self.measure(batch, "train")
        x = self.network(y)
        self.log_dict({"x": x.mean(), "y": y.mean()}, prog_bar=True)
        self.log("one", self.what or 1, True)
        return x.mean()


def logging(monkeypatch: pytest.MonkeyPatch) -> ReconstructionModule:
    monkeypatch.setattr("qnmixer.module.ReconstructionModule", Logging)
    return module_of()


def test_micro_batches_log_the_means_of_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    module, logged = logging(monkeypatch), Logged()
    names = [set(vars(it)) for it in (module, module.network)]
    x = torch.rand(4, 1, 16, 16)
    batch = {"image": x, "sinogram": torch.rand(4, 1, 8, 24)}
    losses = [loss_of_part(module, batch, 0, part, first, logged) for first, part in ((0, x[:1]), (1, x[1:]))]
    assert sum(map(float, losses)) == pytest.approx(float(x.mean()))
    found = {name: float(value) for name, value in logged.values.items()}
    assert found == pytest.approx({"x": float(x.mean()), "y": float(batch["sinogram"].mean()), "one": 1})
    assert logged.options["x"][1]["prog_bar"] is True
    assert logged.options["one"] == ((True,), {})
    assert names == [set(vars(it)) for it in (module, module.network)]  # its methods are its own again


def test_metric_objects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = logging(monkeypatch)
    monkeypatch.setattr(Logging, "what", nn.Identity())
    x = torch.rand(1, 1, 16, 16)
    with pytest.raises(ConfigError, match="training_step logs one as a metric object: log a number"):
        loss_of_part(module, {"image": x, "sinogram": torch.rand(1, 1, 8, 24)}, 0, x, 0, Logged())
