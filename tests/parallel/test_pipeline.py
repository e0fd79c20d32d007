"""The parts of a pipeline in one process; with several: `test_gradients_of_one_process`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from qnmixer.engine.build import build_module
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import parse
from qnmixer.engine.parallel.pipeline import Packing, stages_of, sum_gradients
from qnmixer.models.qn_mixer import QNMixer, QNState
from qnmixer.module import ReconstructionModule


def test_stages_are_as_equal_as_possible() -> None:
    words = ["model.n_iterations=14", "strategy=pipeline", "trainer.devices=4"]
    assert stages_of(parse(compose("train", words))) == [range(4), range(4, 8), range(8, 11), range(11, 14)]


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


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_frozen_weights_stay_as_they_are() -> None:
    """A gradient of 0 would let the optimizer's weight decay shrink them."""
    here, elsewhere, frozen = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(3))
    frozen.requires_grad_(False)
    here.grad = torch.full((2, 3), 4.0)
    optimizer = torch.optim.AdamW([frozen, here, elsewhere], lr=0.1, weight_decay=0.5)
    sum_gradients(optimizer.param_groups[0]["params"])
    assert torch.equal(here.grad, torch.full((2, 3), 4.0))
    assert elsewhere.grad is not None
    assert not elsewhere.grad.any()  # its iteration is on another device
    optimizer.step()
    assert torch.equal(frozen, torch.ones(2, 3))
