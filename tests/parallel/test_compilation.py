"""What is compiled computes the same; under ddp, fsdp and the pipeline: `test_gradients_of_one_process`."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from qnmixer.errors import ConfigError
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.models import FBP, QNMixer
from qnmixer.parallel.devices import compile_blocks, resolve_devices
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.settings.sections import MemoryConfig

from ..conftest import tiny_config
from ..models.conftest import FIGURE

MODES = {name: MemoryConfig(name=name) for name in ("keep", "recompute")}


@pytest.fixture(scope="module")
def projector() -> FanBeamProjector:
    return FanBeamProjector(FanBeamGeometry(16, 25.0, 12, 24, 40.0, 600.0, 290.0, 0.26))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_the_same_gradients_from_few_graphs(
    projector: FanBeamProjector, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network with regularisers of their own per iteration, more of them than torch compiles versions of a code."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    network = QNMixer(projector, 10, channels=4, n_mixer_layers=1, shared_regularizer=False, **FIGURE)
    for p in network.parameters():
        nn.init.normal_(p, std=0.05)
    compiled = copy.deepcopy(network)
    torch._dynamo.reset()
    counters.clear()
    for it in (network, compiled):
        apply_memory_mode(it, MODES[mode])
    compile_blocks(compiled)
    truth = torch.rand(2, 1, 16, 16)
    for it in (network, compiled):
        (it(projector(truth)) - truth).square().mean().backward()
    assert 2 <= counters["stats"]["unique_graphs"] <= 8
    assert compiled.state_dict().keys() == network.state_dict().keys()
    for (name, p), q in zip(network.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")


def test_a_network_without_blocks_and_a_missing_compiler_are_told(
    projector: FanBeamProjector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="has no blocks"):
        compile_blocks(FBP(projector))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        resolve_devices(tiny_config("compile=true", "trainer.accelerator=cpu"))


def test_sparse_products_pass_the_compiler_as_they_are(projector: FanBeamProjector) -> None:
    """As one operator of the graph each, which nothing looks into."""
    x = torch.rand(2, 1, 16, 16, requires_grad=True)
    compiled = torch.compile(projector, backend="aot_eager")
    assert torch.equal(compiled(x), projector(x))
    (found,), (expected,) = (torch.autograd.grad(it(x).square().sum(), x) for it in (compiled, projector))
    assert torch.equal(found, expected)
