"""The parts of a pipeline in one process; with several: `test_gradients_of_one_process`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from qnmixer.models.qn_mixer import QNMixer, QNState
from qnmixer.module import ReconstructionModule
from qnmixer.parallel.pipeline import Logged, Packing, loss_of_part, stages_of, sum_gradients

from ..conftest import tiny_module


def test_stages_are_as_equal_as_possible() -> None:
    assert stages_of(14, 4) == [range(4), range(4, 8), range(8, 11), range(11, 14)]


def module_of(*overrides: str) -> ReconstructionModule:
    module = tiny_module("model.n_iterations=5", *overrides)
    for p in module.parameters():
        p.data += 0.02 * torch.randn_like(p)
    return module


@pytest.mark.parametrize("overrides", [(), ("model.hessian_gradient=detach",), ("model.hessian=identity",)])
def test_a_state_comes_out_of_its_packing_as_it_went_in(overrides: tuple[str, ...]) -> None:
    """Values, types, what is differentiated; and one copy of what the state holds twice."""
    module = module_of(*overrides)
    y = torch.rand(3, 1, 8, 24)
    state: Any = module.network.run(range(4), y, module.network.start(y))
    packing = Packing.from_state(state)
    packed = packing.pack(state)
    assert packed.shape == (3, packing.width)
    back = packing.unpack(packed)
    assert isinstance(back, QNState)
    assert isinstance(module.network, QNMixer)
    assert Packing.from_state(back) == packing
    assert torch.equal(packing.pack(back), packed)
    large, small = {"identity": (1, 1), "bfgs": (2 * 3 + 2, 2 * 3 + 1)}[module.network.hessian]
    assert packing.width == (1 + large) * 256 + small  # x; of each pair s, z, ρ and cosine; s, its scale, and r


class Logging(ReconstructionModule):
    """Logs the means of its images and of its sinograms."""

    what: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        y = self.measure(batch, "train")
        x = self.network(y)
        self.log_dict({"x": x.mean(), "y": y.mean()}, prog_bar=True)
        self.log("one", self.what or 1, True)
        if len(x) == 3:
            self.log("of some", 5)
        return x.mean()


def test_micro_batches_log_the_means_of_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qnmixer.module.ReconstructionModule", Logging)
    module = module_of()
    logged: Logged = {}
    names = [set(vars(it)) for it in (module, module.network)]
    x = torch.rand(4, 1, 16, 16)
    batch = {"image": x, "sinogram": torch.rand(4, 1, 8, 24), "weight": torch.ones(4)}
    losses = [loss_of_part(module, batch, 0, part, first, logged) for first, part in ((0, x[:1]), (1, x[1:]))]
    assert sum(map(float, losses)) == pytest.approx(float(x.mean()))
    found = {name: float(total) / share for name, (total, share, *_) in logged.items()}
    assert found == pytest.approx({"x": float(x.mean()), "y": float(batch["sinogram"].mean()), "one": 1, "of some": 5})
    assert logged["x"][3]["prog_bar"] is True
    assert logged["one"][2:] == ((True,), {})
    assert names == [set(vars(it)) for it in (module, module.network)]  # its methods are its own again


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
    sum_gradients(optimizer.param_groups[0]["params"], divisor=2)
    assert torch.equal(here.grad, torch.full((2, 3), 2.0))
    assert elsewhere.grad is not None
    assert not elsewhere.grad.any()  # its iteration is on another device
    optimizer.step()
    assert torch.equal(frozen, torch.ones(2, 3))
