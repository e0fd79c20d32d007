"""What a training step will hold in the memory of its device, told without the device and without the memory.

The step itself is run on fake tensors, which have shapes but no data, under the tracker that ships with torch. Only the
operator is real. Past the first few iterations memory is affine in T, so that two short steps give a long one (the
tests hold the two against each other).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from qnmixer.config import Config, RecomputeConfig
from qnmixer.parallel.memory import apply_memory_mode, offloading_loop, stays
from qnmixer.physics import FanBeamProjector
from qnmixer.training.build import build_projector
from qnmixer.training.module import ReconstructionModule
from qnmixer.training.optimizers import build_optimizer

MIB = 2**20

# From here on memory was seen to be affine in T.
_FEWEST_ITERATIONS = 4

AUTOCAST = {"32": None, "16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device when a training step holds most, by what they are; `host`: moved off it by offloading."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    operator: float
    host: float = 0.0

    @property
    def peak(self) -> float:
        """All that the device holds."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """What `peak` is the sum of."""
        return {name: value for name, value in vars(self).items() if name != "host"}

    def moved(self, steps: float, towards: "Footprint") -> "Footprint":
        """The footprint that many steps further along the line through this one and another."""
        return Footprint(*(a + steps * (b - a) for a, b in zip(astuple(self), astuple(towards), strict=True)))


@dataclass(frozen=True)
class Prediction:
    """The footprint of a run, and how many bytes each further iteration adds to it."""

    footprint: Footprint
    per_iteration: float


class Planner:
    """Predicts the footprint of configs that share one scan; what it has run it remembers."""

    def __init__(self, config: Config, projector: FanBeamProjector | None = None) -> None:
        self.projector = projector or build_projector(config)
        self.projector.fbp_spectral_radius()  # networks ask for these numbers, which fake tensors could not give
        self.projector.operator_norm()
        self._known: dict[str, Footprint] = {}

    def predict(self, config: Config) -> Prediction:
        """The footprint of a run on one device, from a step of all its iterations and one of some more."""
        T, width = config.model.n_iterations, _width(config)
        footprint, longer = (self._step(config, t, config.data.batch_size) for t in (T, T + width))
        return Prediction(footprint, (longer.peak - footprint.peak) / width)

    def estimate(self, config: Config) -> Footprint:
        """The footprint of a run on one device, from two steps of few iterations: sooner, and nearly the same."""
        T, width, batch = config.model.n_iterations, _width(config), config.data.batch_size
        first = max(_FEWEST_ITERATIONS, 2 * width)
        first += (T - first) % width
        if first + width >= T:
            return self._step(config, T, batch)
        small, larger = (self._step(config, t, batch) for t in (first, first + width))
        return small.moved((T - first) / width, larger)

    def optimizer_state(self, config: Config) -> float:
        """Bytes that the optimizer keeps between steps."""
        with _without_data():
            module = ReconstructionModule(config, self.projector)
            optimizer = build_optimizer(config.optimizer, module.network)
            _make_state(optimizer)
            states = [value for state in optimizer.state.values() for value in state.values()]
            return sum(value.nbytes for value in states if isinstance(value, Tensor))

    def _step(self, config: Config, n_iterations: int, batch: int) -> Footprint:
        model = replace(config.model, n_iterations=n_iterations)
        config = replace(config, model=model, data=replace(config.data, batch_size=batch))
        key = repr((config.model, config.data.batch_size, config.memory, config.optimizer, config.loss))
        dtype = AUTOCAST[config.trainer.precision]
        key += f"{dtype and dtype.itemsize} {config.trainer.accumulate_grad_batches > 1}"
        if key not in self._known:
            self._known[key] = track_step(config, self.projector)
        return self._known[key]


def _width(config: Config) -> int:
    """Iterations by which memory grows evenly: those of a segment that is recomputed together."""
    return config.memory.segment if isinstance(config.memory, RecomputeConfig) else 1


def track_step(config: Config, projector: FanBeamProjector) -> Footprint:
    """The footprint of the training step of a config, run whole on fake tensors."""
    dtype = AUTOCAST[config.trainer.precision]
    n_batches = min(2, config.trainer.accumulate_grad_batches)  # from the second on, there are gradients all along
    hosted = _Hosted()
    with _without_data():
        module = ReconstructionModule(config, projector)
        network = module.network
        apply_memory_mode(network, config.memory)
        if config.memory.name == "offload":
            network.loop = partial(offloading_loop, pack=hosted.pack, unpack=hosted.unpack)
        optimizer = build_optimizer(config.optimizer, network)
        _make_state(optimizer)
        tracker = _PeakTracker()
        tracker.track_external(module, optimizer)
        size = config.data.image_size
        with tracker:
            for k in range(n_batches):
                tracker.reset_mod_stats()
                image = torch.rand(config.data.batch_size, 1, size, size)
                weight = torch.ones(config.data.batch_size)
                with torch.no_grad():
                    y = projector(image)
                with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                    loss = module.batch_loss(network(y), image, weight)
                if k == 0:
                    optimizer.zero_grad()  # where Lightning does it: those of the step before live until here
                loss.backward()
                del loss, y, image, weight
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    of = {str(kind).rpartition(".")[2]: n for kind, n in peak.items()}
    return Footprint(
        parameters=of["PARAM"],
        gradients=of["GRAD"],
        optimizer=of["OPT"],
        activations=of["ACT"] + of["TEMP"] + of["OTH"],
        operator=of["BUFFER"],
        host=hosted.bytes,
    )


@contextmanager
def _without_data() -> Iterator[None]:
    """Tensors made inside have a shape and no data; random numbers are as they were afterwards."""
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True), _AnyNumber():
        yield


class _PeakTracker(MemTracker):
    """Torch's tracker without its figures by module, which take most of its time."""

    def _update_peak_stats(self, peak_state: Any) -> None:
        by_module, self.memory_tracking = self.memory_tracking, WeakIdKeyDictionary()
        super()._update_peak_stats(peak_state)
        self.memory_tracking = by_module


class _AnyNumber(TorchDispatchMode):
    """Where an optimizer asks a fake tensor for its value, any will do: no shape depends on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 1.0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


class _Hosted:
    """Saved tensors that offloading moves to the host: shapes only, so that the tracker sees them leave."""

    def __init__(self) -> None:
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        if stays(tensor):
            return lambda: tensor
        self.bytes += tensor.nbytes
        return partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype)

    @staticmethod
    def unpack(make: Callable[[], Tensor]) -> Tensor:
        return make()


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """What an optimizer keeps from its first step on, and the gradients of that step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
