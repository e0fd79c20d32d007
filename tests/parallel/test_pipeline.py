from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from qnmixer.engine.parallel.pipeline import sum_gradients


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
