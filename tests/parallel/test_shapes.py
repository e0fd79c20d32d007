"""Tensors without data against real ones, operator by operator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from qnmixer.memory.plan import Planner
from qnmixer.parallel.shapes import _Shapes, key_of, storage_of, without_data
from qnmixer.parallel.tracker import PeakTracker
from qnmixer.settings.compose import compose
from qnmixer.settings.override import override
from qnmixer.settings.run import parse

from ..memory.test_plan import SMALL

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "a result": lambda x: x + 1,
    "a view": lambda x: x[:, 1:].transpose(0, 1),
    "a view of a view": lambda x: x[1:].detach().view(-1, 1),
    "parts": lambda x: x.split(1),
    "a strided view": lambda x: x[1:].as_strided((2,), (1,)),
    "in place": lambda x: x.mul_(2),
    "a shape changed in place": lambda x: x.clone().unsqueeze_(0).squeeze_(0).t_(),
    "into a tensor": lambda x: torch.add(x, x, out=torch.empty(2, 3)),
    "several results": lambda x: torch.sort(x),
    "of several tensors": lambda x: torch._foreach_add([x, x.clone()], 1.0),
    "a number and a truth": lambda x: ((x > 0) + 1, (x > 0) + True, (x > 0) + 1.0),
    "a type": lambda x: x.half() * x,
    "a random number": lambda x: torch.rand_like(x).uniform_(),
    "a constant": lambda x: x * torch.tensor(2.0),
    "a real one": lambda x: x * REAL,
    "a view of a real one": lambda x: REAL[1:],
    "complex": lambda x: ((z := torch.fft.rfft(x).conj()), z * 1j, z.imag, z.imag + 1),
    "bytes": lambda x: x.view(torch.uint8),
    "a list of places": lambda x: x[:, torch.tensor([0, 2])],
    "a sparse product": lambda x: x @ SPARSE,
}
REAL = torch.ones(2, 3)
SPARSE = torch.eye(3).to_sparse_csr()


@pytest.mark.parametrize("name", OPERATIONS)
def test_shapes_are_those_of_real_tensors(name: str) -> None:
    """Also those that a second call takes from the cache. Views share memory, and others do not."""
    operation = OPERATIONS[name]
    real = torch.ones(2, 3)
    results = tree_leaves(operation(real))
    for _ in range(2):
        with without_data():
            shape = torch.ones(2, 3)
            for expected, result in zip(results, tree_leaves(operation(shape)), strict=True):
                for what in ("shape", "dtype", "device", "is_conj", "is_neg", "stride", "storage_offset"):
                    value, wanted = (getattr(tensor, what) for tensor in (result, expected))
                    assert (value() if callable(value) else value) == (wanted() if callable(wanted) else wanted)
                assert (result is shape) == (expected is real)
                for other, real_other in ((shape, real), (REAL, REAL)):
                    shares = key_of(storage_of(result)) == key_of(storage_of(other))
                    assert shares == (expected.untyped_storage()._cdata == real_other.untyped_storage()._cdata)
                assert storage_of(result).nbytes() == expected.untyped_storage().nbytes()


def test_memory_is_free_with_the_last_of_its_views() -> None:
    with without_data(), PeakTracker() as tracker:
        x = torch.ones(256)
        view = x[1:]
        del x
        assert tracker.current["activations"] == 1024
        del view
        assert tracker.current["activations"] == 0


def test_gradients_of_a_layer_with_state() -> None:
    """What autograd keeps, and a buffer that changes."""
    with without_data():
        layer = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.MaxPool2d(2))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(torch.ones(2, 1, 8, 8))
        output.float().sum().backward()
        assert [p.grad.shape for p in layer.parameters() if p.grad is not None] == [p.shape for p in layer.parameters()]
        assert output.shape == (2, 4, 3, 3)


def test_random_states_stay() -> None:
    before = torch.get_rng_state()
    with without_data():
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())


def test_torch_is_asked_once_for_each_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another mode of memory, or iterations more, have few new ones. So a plan of many settings takes seconds.

    Those of H are new in each iteration, because it has a pair more.
    """
    monkeypatch.setattr(_Shapes, "_cache", {})
    planner = Planner(config := parse(compose("train", [*SMALL, "model.n_iterations=4"])))
    planner.estimate(config)
    known = len(_Shapes._cache)
    planner.estimate(override(config, "model.n_iterations=6"))
    planner.estimate(override(config, "memory=recompute"))
    assert known < len(_Shapes._cache) < 1.3 * known
