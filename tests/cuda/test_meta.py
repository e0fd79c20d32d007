"""Training steps on torch's meta device, which has no data: what a GPU would wait for, or refuse, shows without one."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qnmixer.memory.modes import apply_memory_mode
from qnmixer.module.build import build_module
from qnmixer.module.parts import build_optimizer
from qnmixer.parallel.tracker import batch_of

from ..conftest import config_of
from .test_gpu import NETWORKS, SMALL

OTHERS = {
    "the paper's": "model=qn_mixer_paper model.n_iterations=2 model.channels=4",
    "recompute": f"{NETWORKS['qn_mixer']} memory=recompute",
    "muon": f"{NETWORKS['qn_mixer']} optimizer=muon",
    "SSIM": f"{NETWORKS['learn']} loss=ssim_mix",
}


class Watch(TorchDispatchMode):
    """Counts operators on the device that take tensors of the host, or that compute in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.odd: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [it for it in tree_leaves((args, kwargs, result)) if isinstance(it, Tensor)]
        if any(it.is_meta for it in tensors):
            self.odd[f"{func}, of the host"] += any(it.ndim and not it.is_meta for it in tensors)
            self.odd[f"{func}, float64"] += any(it.dtype == torch.float64 for it in tensors if it.is_meta)
        return result


@pytest.mark.parametrize("words", (NETWORKS | OTHERS).values(), ids=NETWORKS | OTHERS)
def test_a_step_stays_on_its_device(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it asks for a number or a shape that depends on data, which makes a GPU and its host wait, torch raises."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # it does not know this device
    config = config_of(*SMALL, *words.split())
    module = build_module(config)
    module.projector.safe_step_size()  # numbers that networks ask for once
    module.projector.operator_norm()
    apply_memory_mode(module.network, config.memory)
    optimizer = build_optimizer(config.optimizer, module.to("meta").network)
    image = torch.empty(2, 1, 16, 16, device="meta")
    with Watch() as watch:
        batch = batch_of(image, torch.empty(2, device="meta"), torch.empty(2, 1, 8, 24, device="meta"))
        module.training_step(batch, 0).backward()
        torch.nn.utils.clip_grad_norm_(module.network.parameters(), 1.0)
        optimizer.step()
    assert +watch.odd == {}
    state = [value for of in optimizer.state.values() for value in of.values() if value.ndim]
    assert {it.device.type for it in state} <= {"meta"}
