"""What a run adds to a LightningModule: the measurement, shards, means over all devices, and complete checkpoints."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from qnmixer.data.batch import Batch
from qnmixer.data.own_datamodule import loader_names, n_batches
from qnmixer.errors import CheckpointError, ConfigError, first_line
from qnmixer.measurement.measurement import Measurement
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.module.parts import parts_of
from qnmixer.parallel.gather import gather
from qnmixer.parallel.lightning_private import (
    ONLY_THE_CLASS,
    loader_number,
    of_all_loaders,
    set_hparams,
    set_position,
    trainer_of,
)
from qnmixer.physics import FanBeamProjector
from qnmixer.reconstruction.checkpoints import load_run, run_of
from qnmixer.reconstruction.weights import CHECKPOINT_KEY, MEAN_KEY, RUN_KEY, SUFFIX, TRAINED_KEY, find_checkpoint
from qnmixer.runs.records import own_modules
from qnmixer.settings.plugins import check_trusted, module_of, parameters_of, taken
from qnmixer.settings.run import Config, checked

_PARTS = "network", "loss", "optimizer", "schedule", "metrics"
"""What a run gives to a module, beside its own arguments."""
_OF_LIGHTNING = "map_location", "hparams_file", "strict", "weights_only"
"""Arguments of Lightning's `load_from_checkpoint` that are none of the module."""


class RunModule(L.LightningModule):
    """The base of LightningModules that a run can train.

    A subclass sets `network` in its constructor, and has `training_step`, `validation_step` and `configure_optimizers`.

    In a script without a run, `measurement` may be set; else it is the scan of the network, without noise.

    Attributes:
        takes_scans: whether its training steps can have several scans, of data.views and data.arcs.
        takes_stages: whether its training step needs no more of the network than x_T from y, as in a pipeline.
        network: it alone is evaluated. Other networks of the module, such as a discriminator, are trained and saved.
        config: of the run; a script has none.
        measurement: the scan and its noise.
        settings: the config as plain data, for checkpoints; empty in a script.
    """

    takes_scans: ClassVar[bool] = True
    takes_stages: ClassVar[bool] = True
    network: UnrolledNetwork[Any]
    config: Config
    measurement: Measurement

    def __init__(self) -> None:
        super().__init__()
        self.means = nn.ModuleDict()
        self.settings: dict[str, Any] = {}

    def attach(self, config: Config, settings: dict[str, Any], measurement: Measurement) -> None:
        """Give the module what the run knows. The builder of a run calls it once."""
        self.config, self.settings, self.measurement = config, settings, measurement
        self._keep_arguments(config.module.keywords())

    def _keep_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Set Lightning's hyperparameters to the arguments of the class that are its own, as plain values."""
        # A class may have saved all its arguments, but nobody could read a checkpoint of objects.
        kept = {**self.hparams, **arguments}
        set_hparams(self, {name: kept[name] for name in kept if name not in _PARTS and not callable(kept[name])})

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # a run's checkpoint needs no arguments
        cls, checkpoint_path: str | Path, *, trust: Collection[str] = (), **arguments: Any
    ) -> Self:
        """The module of a checkpoint, with its weights, on the CPU. No code of the file is executed.

        That of a run gets the network, loss, optimizer, schedule, metrics and own arguments of the run.

        Args:
            checkpoint_path: of a run, or of a script.
            trust: modules outside qnmixer whose classes and functions the config of the run may name. The class that
                is called needs no word.
            arguments: of the class, in place of those of the file, or of Lightning's `load_from_checkpoint`. A
                checkpoint of a script needs those that are no numbers or texts, such as `network`.

        Raises:
            CheckpointError: the file cannot be read, its network is not known, or it is of a class that does not fit.
            PluginError: the file names something of a module that is not in `trust`.
        """
        changes = {name: value for name, value in arguments.items() if name not in _OF_LIGHTNING}
        arguments = {"map_location": "cpu", "weights_only": True} | ONLY_THE_CLASS | arguments
        if "network" in arguments:
            return cls._loaded(checkpoint_path, **arguments)
        path = find_checkpoint(checkpoint_path)
        if path.suffix == SUFFIX:
            raise CheckpointError(f"{path} has weights of a network only: qnmixer.load_pretrained loads it")
        try:
            trained = load_run(path, "best", trust, "loss.", "schedule.", "metrics.")
        except CheckpointError as error:
            try:
                return cls._loaded(path, **arguments)
            except Exception as further_error:
                line = f"{error}, or give network=… for the checkpoint of a script"
                raise CheckpointError(line) from further_error
        section, named = trained.config.module, trained.config.optimizer.targets()
        is_of_class = section.target == f"{cls.__module__}.{cls.__qualname__}"
        named |= {key: target for key, target in section.targets().items() if is_of_class and key != section.key}
        named = {key: target for key, target in named.items() if module_of(target) != "torch.optim"}
        check_trusted(str(path), named, [*trust, *own_modules(run_of(path))])
        parts = parts_of(checked(trained.config, "loss", "optimizer", "schedule")) | {"network": trained.network}
        own = section.built(cls, parts) if is_of_class else {}  # another class gets those that it takes, from Lightning
        try:
            module = cls._loaded(path, **{**parts, **own, **arguments})
        except (TypeError, RuntimeError) as error:
            if is_of_class:
                raise
            has = f", which has {', '.join(keywords)}" if (keywords := section.keywords()) else ""
            line = f"{path} is of {section.target}{has}: load it with that class. {cls.__name__} does not fit"
            raise CheckpointError(f"{line} ({first_line(error)})") from error
        module.measurement = trained.measurement
        parameters = parameters_of(cls)  # type: ignore[arg-type]  # mypy: without a hash
        takes_all = is_of_class or any(p.kind is p.VAR_KEYWORD for p in parameters)
        module._keep_arguments((section.keywords() if takes_all else taken(cls, section.keywords())) | changes)
        return module

    @classmethod
    def _loaded(cls, path: str | Path, **arguments: Any) -> Self:
        """The module, as Lightning builds it: by arguments, and by the hyperparameters of the file."""
        return super().load_from_checkpoint(path, **arguments)

    @property
    def projector(self) -> FanBeamProjector:
        """A, Aᵀ and FBP of the scan."""
        return self.measurement.projector

    def measure(self, batch: Batch, stream: str) -> Tensor:
        """The noisy sinogram y [B, 1, V, D] of a batch. Its noise depends on (seed, stream, sample) only.

        The loader may have made y already, as `batch["sinogram"]`: with noise, or from a scanner. Else it is made here.

        stream: train, val or test.
        """
        if not hasattr(self, "measurement"):
            self.measurement = Measurement(self.network.projector)
        return self.measurement(batch, stream)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch: a mean over its images."""
        raise NotImplementedError(f"{type(self).__name__} has no training_step")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Tell the network the optimizer step, by which it draws random numbers. It is that of all devices."""
        self.network.step_key = (self.config.seed if self.settings else 0, self.global_step)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Give the network the scan of the run again, after a step at another one."""
        if hasattr(self, "measurement"):
            self.measurement.at_scan()

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients, as Lightning does; also those of 16-mixed in a module that optimizes by itself.

        There they are still multiplied by the loss scale when the module clips them. So the bound is multiplied too.
        """
        scaler = getattr(getattr(trainer_of(self), "precision_plugin", None), "scaler", None)
        if scaler is not None and not self.automatic_optimization and gradient_clip_val:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if not math.isfinite(gather(torch.nn.utils.get_total_norm(gradients))):
                return  # the scaler skips this step: clipped, the gradients could look finite
            gradient_clip_val *= scaler.get_scale()
        super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def configure_model(self) -> None:
        """Shard all networks of the module for fsdp, in the hook that Lightning has for it.

        Raises ConfigError for a weight of the module itself, whose gradients fsdp would not average.
        """
        trainer = trainer_of(self)
        shard = None if trainer is None else getattr(trainer.strategy, "shard", None)
        if shard is None:
            return
        if weight := next((name for name, _ in self.named_parameters(recurse=False)), None):
            raise ConfigError(
                f"strategy=fsdp does not average the gradient of {weight}, a weight of {type(self).__name__} itself: "
                "put it into a torch module of that class, or choose strategy=ddp"
            )
        for child in self.children():
            if any(True for _ in child.parameters()):
                shard(child, self.device_mesh)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a number, as Lightning does. In a plan and in doctor's comparison there is no trainer, and no log."""
        if trainer_of(self) is not None:
            super().log(name, value, *args, **options)

    def log_means(self, prefix: str, values: Mapping[str, Tensor], counted: Tensor) -> None:
        """Log the means over the counted images of all batches and processes.

        With several loaders of validation, those of each are val/NAME/LOADER, and val/NAME is over all.

        Args:
            prefix: of the names, as in val/NAME.
            values: [B] by name.
            counted: [B]; False for samples that only fill the batch.
        """
        trainer = trainer_of(self)
        loaders = loader_names(getattr(trainer, f"{prefix}_dataloaders", None))
        of_loaders = [_key(name, n) for n in range(len(loaders)) for name in values]
        for key in (*map(_key, values), *of_loaders):  # all before the first is logged: Lightning looks for them once
            if key not in self.means:
                # Sums over processes, because a mean of means would count fillers. NaN must stay NaN.
                self.means[key] = MeanMetric(nan_strategy="disable").to(counted.device)
        for name, value in values.items():
            if trainer is None or not loaders:
                self._log_mean(_key(name), f"{prefix}/{name}", value[counted])
                continue
            n = loader_number(trainer)
            self._log_mean(_key(name, n), f"{prefix}/{name}/{loaders[n]}", value[counted])
            with of_all_loaders(trainer):
                self._log_mean(_key(name), f"{prefix}/{name}", value[counted])

    def _log_mean(self, key: str, name: str, values: Tensor) -> None:
        mean = self.means[key]
        assert isinstance(mean, MeanMetric)
        mean.update(values)
        self.log(name, mean, on_step=False, on_epoch=True, add_dataloader_idx=False)

    def n_steps(self) -> int:
        """Optimizer steps of the whole run. Lightning's count would load the data too early for a resumed run."""
        if not self.settings:
            return int(self.trainer.estimated_stepping_batches)
        trainer = self.config.trainer
        if trainer.max_epochs in (None, -1):
            return trainer.max_steps
        n_per_epoch = self._batches_of_epoch()
        by_epochs = trainer.max_epochs * n_per_epoch // trainer.accumulate_grad_batches
        return by_epochs if trainer.max_steps == -1 else min(trainer.max_steps, by_epochs)

    def _batches_of_epoch(self) -> int:
        """The batches of an epoch in this process. Lightning cuts a user's own loader only: ours has its length."""
        loader, limit = self.trainer.datamodule.train_dataloader(), self.trainer.limit_train_batches  # type: ignore[attr-defined]  # Lightning's, untyped
        n = n_batches(loader)
        return min(n, limit) if isinstance(limit, int) else int(n * limit)

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
        data: Any = getattr(trainer_of(self), "datamodule", None)
        if not hasattr(data, "start_at"):  # without a trainer, or with loaders of one's own, there is no place to set
            return
        per_epoch, accumulate = self._batches_of_epoch(), self.trainer.accumulate_grad_batches
        epoch, step = divmod(checkpoint["global_step"], per_epoch // accumulate)
        data.start_at(epoch, step * accumulate)
        validating = bool(checkpoint.get(RUN_KEY, {}).get("validating"))
        set_position(checkpoint, epoch, step * accumulate, epoch * per_epoch, validating)
        # A run may resume without callbacks=ema, which saves the mean as the weights.
        checkpoint[MEAN_KEY], trained = checkpoint["state_dict"], checkpoint.get(TRAINED_KEY, {})
        checkpoint["state_dict"] = checkpoint[MEAN_KEY] | trained


def _key(metric: str, loader: int | None = None) -> str:
    """The key of a metric's mean. A ModuleDict refuses the names of its own methods, as type."""
    return f"of {metric}" if loader is None else f"of {metric} of loader {loader}"
