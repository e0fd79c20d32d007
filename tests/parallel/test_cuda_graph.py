"""What is captured, replayed on a CPU (`tests/cuda/replay.py`); in training: `tests/cuda/test_gpu.py`."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from qnmixer.errors import ConfigError
from qnmixer.models import LEARN
from qnmixer.parallel.cuda_graph import replay_training
from qnmixer.physics import FanBeamGeometry, FanBeamProjector

from ..cuda.replay import CPUGraph, graphs_on_the_cpu


@pytest.fixture
def graphs() -> Iterator[list[CPUGraph]]:
    with graphs_on_the_cpu() as made:
        yield made


@pytest.fixture
def network() -> LEARN:
    projector = FanBeamProjector(FanBeamGeometry(16, 25.0, 12, 24, 40.0, 600.0, 290.0, 0.26))
    return LEARN(projector, n_iterations=2, channels=4)


def test_only_training_on_batches_of_the_captured_shape_is_replayed(graphs: list[CPUGraph], network: LEARN) -> None:
    names, y = network.state_dict().keys(), network.projector(torch.rand(3, 1, 16, 16))
    expected = network(y)
    replay_training(network, torch.zeros_like(y[:2]), nullcontext)
    forward, backward = graphs
    assert network.state_dict().keys() == names
    torch.testing.assert_close(network(y), expected)
    torch.testing.assert_close(network.eval()(y[:2]), expected[:2])
    assert forward.n_replayed == 0
    torch.testing.assert_close(network.train()(y[:2]), expected[:2])
    assert (forward.n_replayed, backward.n_replayed) == (1, 0)


def test_weights_are_read_at_each_replay(graphs: list[CPUGraph], network: LEARN) -> None:
    y = network.projector(torch.rand(2, 1, 16, 16))
    replay_training(network, torch.zeros_like(y), nullcontext)
    before = network(y).clone()
    with torch.no_grad():
        for p in network.parameters():
            nn.init.normal_(p, std=0.1)
    after = network(y).clone()
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, network.eval()(y))


class _Waiting(LEARN):
    def image(self, state: Tensor) -> Tensor:
        return state / state.max().item()


def test_a_network_that_waits_for_the_gpu_is_told(graphs: list[CPUGraph], network: LEARN) -> None:
    waiting = _Waiting(network.projector, n_iterations=2, channels=4)
    with pytest.raises(ConfigError, match=r"^trainer\.cuda_graph=true, but LEARN cannot be captured \(.*\): leave"):
        replay_training(waiting, torch.ones(2, 1, 12, 24), nullcontext)
