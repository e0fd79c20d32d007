"""How a strategy trains, and what the plan counts for it. Each other strategy is in the file of its name.

`Parallelism` is that of strategy=single, from which the others differ.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar

from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from qnmixer.parallel.device_memory import DevicePlan, Footprint
from qnmixer.parallel.torch_private import tree_map_only
from qnmixer.parallel.tracker import PeakTracker, autocast
from qnmixer.settings.parts import averages_weights
from qnmixer.settings.run import Config
from qnmixer.settings.sections import TrainerConfig
from qnmixer.settings.strategies import StrategyConfig

TIMEOUT = timedelta(minutes=30)  # long, because ranks wait while one of them evaluates, plans or writes
S = TypeVar("S", bound=StrategyConfig)


class Parallelism(Generic[S]):
    """One device, which runs the whole network. `keys`: of the strategy; `config`: with the number of devices."""

    frees_gradients: ClassVar[bool] = True  # a step frees the gradients of the step before

    def __init__(self, keys: S, config: Config) -> None:
        self.keys, self.config = keys, config

    def strategy(self) -> Strategy | str:
        """The strategy for Lightning's Trainer."""
        return "auto"

    def footprint(self, alone: Footprint, network: Any) -> Footprint:
        """The footprint of a step on one of the devices, from that of a step in one process."""
        return alone

    def plan(self, module: Any, optimizer: Optimizer, batch_of: Callable[[int], Any]) -> tuple[DevicePlan, ...]:
        """The plan of each device that works on one batch, by a training step on tensors without data.

        `batch_of` gives a batch of so many samples, with their sinograms.
        """
        config, network = self.config, module.network
        on_gpu = config.trainer.accelerator != "cpu"  # a plan is for GPUs, unless the run is known to have none
        if on_gpu:
            _step_all_at_once(optimizer)
        tracker = PeakTracker()
        tracker.track(module, optimizer)
        norms = _NormsInFull() if on_gpu and config.trainer.precision != "32" else nullcontext()
        with tracker, norms:
            for k in range(min(2, config.trainer.accumulate_grad_batches)):  # later ones take the same as the second
                batch = batch_of(config.data.batch_size)
                with autocast(config.trainer.precision):
                    loss = module.training_step(batch, 0)
                if k == 0:  # as in Lightning: the gradients of the step before exist until here
                    optimizer.zero_grad(set_to_none=self.frees_gradients)
                loss.backward()
                del loss, batch
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
        footprint = Footprint(**tracker.peak)
        if averages_weights(config.callbacks):
            footprint = replace(footprint, parameters=2 * footprint.parameters)
        return (DevicePlan(range(network.n_iterations), 1, self.footprint(footprint, network)),)


def parallelism_of(config: Config) -> Parallelism[Any]:
    """How a run trains by its strategy."""
    module, _, name = config.strategy.parallelism.rpartition(".")
    return getattr(import_module(module), name)(config.strategy, config)


def build_precision(trainer: TrainerConfig, accelerator: str) -> Precision:
    """Autocast, and a GradScaler for fp16, on a CPU too: there Lightning would silently use bf16 for 16-mixed."""
    precision = trainer.precision
    return Precision() if precision == "32" else MixedPrecision(precision, accelerator)


def _step_all_at_once(optimizer: Optimizer) -> None:
    """Make an optimizer update all weights together, which needs a temporary of the size of all weights.

    torch does so by default on a GPU but not on a CPU.
    """
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None:
            group["foreach"] = True


class _NormsInFull(TorchFunctionMode):
    """Makes norms take and give float32, as under autocast on a GPU. On a CPU they would stay in half precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.layer_norm, F.group_norm):
            args, kwargs = tree_map_only(Tensor, Tensor.float, (args, kwargs))
        return func(*args, **(kwargs or {}))
