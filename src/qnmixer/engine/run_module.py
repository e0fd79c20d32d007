"""What a run adds to a LightningModule: the measurement, shards, means over all devices, and complete checkpoints."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from qnmixer.engine.batch import Batch
from qnmixer.engine.data.own import n_batches
from qnmixer.engine.lightning_private import set_position
from qnmixer.engine.parallel.shards import gather
from qnmixer.engine.reconstructor import Measurement
from qnmixer.errors import ConfigError
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.weights import CHECKPOINT_KEY, MEAN_KEY, RUN_KEY, TRAINED_KEY

if TYPE_CHECKING:
    from qnmixer.engine.config.run import Config
    from qnmixer.physics import FanBeamProjector


class RunModule(L.LightningModule):
    """The base of LightningModules that a run can train.

    A subclass sets `network` in its constructor, and has `training_step`, `validation_step` and `configure_optimizers`.

    In a script without a run, `measurement` may be set; else it is the scan of the network, without noise.

    Attributes:
        network: it alone is evaluated. Other networks of the module, such as a discriminator, are trained and saved.
        config: of the run; a script has none.
        measurement: the scan and its noise.
        settings: the config as plain data, for checkpoints; empty in a script.
    """

    network: UnrolledNetwork[Any]
    config: "Config"
    measurement: Measurement

    def __init__(self) -> None:
        super().__init__()
        self.means = nn.ModuleDict()
        self.settings: dict[str, Any] = {}

    def attach(self, config: "Config", settings: dict[str, Any], measurement: Measurement) -> None:
        """Give the module what the run knows. The builder of a run calls it once."""
        self.config, self.settings, self.measurement = config, settings, measurement

    @property
    def projector(self) -> "FanBeamProjector":
        """A, Aᵀ and FBP of the scan."""
        return self.measurement.projector

    def measure(self, batch: Batch, stream: str) -> Tensor:
        """The noisy sinogram y [B, 1, V, D] of a batch. Its noise depends on (seed, stream, sample) only.

        The loader may have made y already, as `batch["sinogram"]`: with noise, or from a scanner. Else it is made here.

        stream: train, val or test.
        """
        if not hasattr(self, "measurement"):
            self.measurement = Measurement(self.network.projector)
        y: Tensor = self.measurement(batch, stream)
        return y

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch: a mean over its images."""
        raise NotImplementedError(f"{type(self).__name__} has no training_step")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Tell the network the optimizer step, by which it draws random numbers. It is that of all devices."""
        self.network.step_key = (self.config.seed if self.settings else 0, self.global_step)

    def configure_model(self) -> None:
        """Shard all networks of the module for fsdp, in the hook that Lightning has for it.

        Raises ConfigError for a weight of the module itself, whose gradients fsdp would not average.
        """
        # `self.trainer` raises without a trainer; `_trainer` is None then.
        shard = None if self._trainer is None else getattr(self.trainer.strategy, "shard", None)
        if shard is None:
            return
        if weight := next(iter(self._parameters), None):
            raise ConfigError(
                f"strategy=fsdp does not average the gradient of {weight}, a weight of {type(self).__name__} itself: "
                "put it into a torch module of that class, or choose strategy=ddp"
            )
        for child in self.children():
            if any(True for _ in child.parameters()):
                shard(child, self.device_mesh)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a number, as Lightning does. In a plan and in doctor's comparison there is no trainer, and no log."""
        if self._trainer is not None:
            super().log(name, value, *args, **options)

    def log_means(self, prefix: str, values: Mapping[str, Tensor], counted: Tensor) -> None:
        """Log the means over the counted images of all batches and processes.

        Args:
            prefix: of the names, as in val/NAME.
            values: [B] by name.
            counted: [B]; False for samples that only fill the batch.
        """
        for name, value in values.items():  # all before the first is logged: Lightning looks for them once
            if _key(name) not in self.means:
                # Sums over processes, because a mean of means would count fillers. NaN must stay NaN.
                self.means[_key(name)] = MeanMetric(nan_strategy="disable").to(value.device)
        for name, value in values.items():
            mean = self.means[_key(name)]
            assert isinstance(mean, MeanMetric)
            mean.update(value[counted])
            self.log(f"{prefix}/{name}", mean, on_step=False, on_epoch=True)

    def n_steps(self) -> int:
        """Optimizer steps of the whole run. Lightning's count would load the data too early for a resumed run."""
        if not self.settings:
            return int(self.trainer.estimated_stepping_batches)
        trainer = self.config.trainer
        if trainer.max_epochs is None:
            return trainer.max_steps
        n_per_epoch = n_batches(self.trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]  # Lightning's, untyped
        by_epochs = trainer.max_epochs * n_per_epoch // trainer.accumulate_grad_batches
        return by_epochs if trainer.max_steps == -1 else min(trainer.max_steps, by_epochs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the config as plain data, so that a checkpoint is complete by itself.

        Raises FloatingPointError if the weights are not finite. The loss of another rank may have caused that.
        """
        if not math.isfinite(norm := float(gather(torch.nn.utils.get_total_norm(list(self.parameters()))))):
            raise FloatingPointError(f"the norm of the weights became {norm} at step {self.global_step}")
        if self.settings:
            checkpoint[CHECKPOINT_KEY] = {"format": 1, "config": self.settings}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Resume at the same place in the data, whatever the strategy, and with the weights that were trained."""
        # The place follows from the number of steps, because a step has another number of batches with each strategy.
        data: Any = getattr(self._trainer, "datamodule", None)
        if not hasattr(data, "start_at"):  # without a trainer, or with loaders of one's own, there is no place to set
            return
        per_epoch, accumulate = n_batches(data.train_dataloader()), self.trainer.accumulate_grad_batches
        epoch, step = divmod(checkpoint["global_step"], per_epoch // accumulate)
        data.start_at(epoch, step * accumulate)
        validating = bool(checkpoint.get(RUN_KEY, {}).get("validating"))
        set_position(checkpoint, epoch, step * accumulate, epoch * per_epoch, validating)
        # A run may resume without callbacks=ema, which saves the mean as the weights.
        checkpoint[MEAN_KEY], trained = checkpoint["state_dict"], checkpoint.get(TRAINED_KEY, {})
        checkpoint["state_dict"] = checkpoint[MEAN_KEY] | trained


def _key(metric: str) -> str:
    """The key of a metric's mean. A ModuleDict refuses the names of its own methods, as type."""
    return f"of {metric}"
