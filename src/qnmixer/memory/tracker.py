"""Torch's memory tracker for steps on fake tensors, and what stands in there for ddp's buckets and for the host."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed._tools.mod_tracker import ModTracker
from torch.utils._python_dispatch import TorchDispatchMode

from qnmixer.config import Config, batch_of_replica
from qnmixer.memory.modes import apply_memory_mode, offloading_loop, stays
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.optimization.losses import build_loss, weighted
from qnmixer.reconstructor import AUTOCAST


def apply_hosted_mode(network: UnrolledNetwork[Any], config: Config, hosted: "Hosted") -> None:
    """The memory mode of a run; what offloading moves goes to `hosted`."""
    apply_memory_mode(network, config.memory)
    if config.memory.name == "offload":
        network.loop = partial(offloading_loop, pack=hosted.pack, unpack=hosted.unpack)


def batch_loss(config: Config) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Loss of images, truths and weights as training has it."""
    return partial(weighted, build_loss(config.loss), batch=batch_of_replica(config))


def autocast(config: Config) -> torch.autocast:
    """The autocast of a run's precision, on the CPU."""
    dtype = AUTOCAST[config.trainer.precision]
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def n_bytes(tensors: Iterable[Tensor], n_shards: int = 1) -> int:
    """Bytes of some tensors, or of one shard of each, cut along the first dimension."""
    return sum(-(-len(t) // n_shards) * (t.nbytes // len(t)) if t.ndim else t.nbytes for t in tensors)


def optimizer_bytes(optimizer: torch.optim.Optimizer, n_shards: int) -> float:
    """Bytes of an optimizer's state, or of one shard of it."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return n_bytes((value for value in states if isinstance(value, Tensor)), n_shards)


def by_kind(snapshot: dict[Any, int]) -> dict[str, int]:
    """A snapshot of the tracker by the names of its kinds."""
    return {str(kind).rpartition(".")[2]: n for kind, n in snapshot.items()}


@contextmanager
def without_data() -> Iterator[None]:
    """Tensors made inside have a shape and no data; random numbers are as they were afterwards."""
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True), _AnyNumber():
        yield


class PeakTracker(MemTracker):
    """Torch's tracker without its figures by module, whose hooks keep graphs alive, and with peaks that start again.

    `most` bytes of activations and temporary memory since then; the same with gradients of weights counted.
    """

    most = most_with_gradients = 0

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = _NoModules()

    def track_external(self, *external: Any) -> None:
        """Count these from the start; of modules the gradients too, those to come included."""
        super().track_external(*external)
        for module in external:
            if isinstance(module, nn.Module):
                self._track_module_params_and_buffers(module, install_grad_hooks=True)

    @property
    def active(self) -> int:
        """Bytes of activations and temporary memory now."""
        return sum(of[_MemRefType.ACT] + of[_MemRefType.TEMP] for of in self._curr_mem_snap.values())

    def restart(self) -> None:
        """Let the peaks start from what there is now."""
        self.most = self.most_with_gradients = 0
        self._note()

    def _note(self) -> None:
        active = self.active
        gradients = sum(of[_MemRefType.GRAD] for of in self._curr_mem_snap.values())
        self.most = max(self.most, active)
        self.most_with_gradients = max(self.most_with_gradients, active + gradients)

    def _update_peak_stats(self, peak_state: Any) -> None:
        super()._update_peak_stats(peak_state)
        self._note()


class _NoModules(ModTracker):
    """Sees no module; still knows forward from backward."""

    def __enter__(self) -> "_NoModules":
        return self

    def __exit__(self, *args: object) -> None: ...


class _AnyNumber(TorchDispatchMode):
    """Where an optimizer asks a fake tensor for its value, any will do: no shape depends on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 1.0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


class Buckets:
    """ddp's buckets, made of the gradients there are; while `in_use`, each gradient that backward made goes there."""

    def __init__(self, network: UnrolledNetwork[Any]) -> None:
        self.in_use = True
        self._of = {p: p.grad for p in network.parameters() if p.grad is not None}
        self.bytes = n_bytes(self._of.values())
        for p in self._of:
            p.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: Tensor) -> None:
        own = self._of[parameter]  # type: ignore[index]  # a parameter
        if self.in_use and parameter.grad is not own:
            own.copy_(parameter.grad)  # type: ignore[arg-type]  # there is one
            parameter.grad = own


class Hosted:
    """Saved tensors that offloading moves to the host: shapes only, so that the tracker sees them leave."""

    def __init__(self) -> None:
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Count a tensor and forget its data."""
        if stays(tensor):
            return lambda: tensor
        self.bytes += tensor.nbytes
        return partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype)

    @staticmethod
    def unpack(make: Callable[[], Tensor]) -> Tensor:
        """One of its shape."""
        return make()


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """What an optimizer keeps from its first step on, and the gradients of that step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
