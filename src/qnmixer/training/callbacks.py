"""Callbacks. Those of every run log loss, gradient, speed and memory at each step. The config names others."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, TypeVar

import lightning as L
import torch
from annotated_types import Ge, Lt
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from qnmixer.data.batch import Batch, to_hu
from qnmixer.data.dataset import EpochSampler
from qnmixer.data.own_datamodule import OwnDataModule, loaders_of, samples_of
from qnmixer.errors import PluginError
from qnmixer.evaluation.metrics import psnr
from qnmixer.evaluation.pictures import MethodImages, SliceImages, draw_slices
from qnmixer.measurement.pairs import check_pairs
from qnmixer.module.base import RunModule
from qnmixer.module.build import require_residual
from qnmixer.parallel.device_memory import MIB, read_usage
from qnmixer.parallel.gather import gather
from qnmixer.parallel.tracker import PeakTracker
from qnmixer.reconstruction.weights import MEAN_KEY, TRAINED_KEY
from qnmixer.runs.terminal import Console
from qnmixer.settings.logged_names import ITERATES, best_name
from qnmixer.settings.parts import CallbackConfig, MetricConfig, mode_of, modes_of
from qnmixer.settings.sections import Count

# Those of every run

_T = TypeVar("_T", bound=Callback)


def callback_of(trainer: L.Trainer, kind: type[_T]) -> _T:
    """The callback of this kind, which every run has."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning's, untyped
    return next(callback for callback in callbacks if isinstance(callback, kind))


class DataCheck(Callback):
    """Checks what only a run can see of measured sinograms and of loaders of the user's own.

    At the first batch of training and of validation: whether sinograms are those of their images, and whether the run
    needs images that are not there. After each pass: whether any slice had a weight.
    """

    def __init__(self) -> None:
        self._checked: set[tuple[str, int]] = set()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, *_: Any) -> None:
        """Compare the first sinograms of training with their images."""
        self._check_pairs(trainer, pl_module, batch, "train")

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Compare the first sinograms of validation, of each loader, with their images."""
        self._check_pairs(trainer, pl_module, batch, "val", dataloader_idx)

    def _check_pairs(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Batch, part: str, loader: int = 0
    ) -> None:
        if (part, loader) in self._checked:
            return
        self._checked.add((part, loader))
        data: Any = getattr(trainer, "datamodule", None)
        is_own = isinstance(data, OwnDataModule)
        if getattr(data, "measured", False) and "sinogram" in batch and ("image" in batch or is_own):
            assert isinstance(module, RunModule)
            if "image" not in batch:
                require_residual(module.config)
            check_pairs(module.config, module.projector, batch, part)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise DataError if no slice of training has a weight."""
        self._require_weight(trainer, "train")

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise DataError if no slice of validation has a weight: means over no slice would be NaN."""
        self._require_weight(trainer, "val")

    def _require_weight(self, trainer: L.Trainer, part: str) -> None:
        data: Any = getattr(trainer, "datamodule", None)
        if isinstance(data, OwnDataModule):
            data.require_weight(part)


class StepMetrics(Callback):
    """Raises FloatingPointError, with step and slices, for a loss that is not finite. Logs the numbers of each step.

    It is the first callback of a run, so that others may read what it computes. `step`, the number of optimizer steps
    done, and `samples`, the slices seen by all devices together, are in each row. Lightning uses `step` as the step of
    the row. The speed is measured since the previous row or validation, with data loading.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._asked: tuple[Tensor, torch.cuda.Event | None, Tensor, str] | None = None  # a loss that is being checked
        self._largest_norm: Tensor | float = 0.0
        self._loss: Tensor | float = 0.0
        self._row = (0, 0.0)  # samples and time at the previous row, or after a validation since

    def state_dict(self) -> dict[str, Any]:
        """The largest norm so far."""
        return {"largest_norm": float(self._largest_norm)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the largest norm of a resumed run."""
        self._largest_norm = state_dict["largest_norm"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._row = samples_until(trainer, trainer.global_step), time.monotonic()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, *_: Any) -> None:
        """Store the names of the slices, for the message."""
        self._names = batch["name"]

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Ask whether the loss is finite.

        If the host reads a number from a GPU, it waits for all queued work, and then the GPU waits for the host. So the
        answer is copied in the background, and read before the weights change. The GPU has the backward pass meanwhile.
        """
        if loss.numel() > 1:
            method = f"{type(pl_module).__name__}.training_step"
            raise PluginError(f"{method} gives a tensor {[*loss.shape]}: it must give one number, the mean over images")
        self._raise_if_not_finite()  # with accumulation, the loss of the batch before is still unchecked
        loss = loss.detach()
        finite = torch.isfinite(loss).to("cpu", non_blocking=True)  # into pinned memory
        copied = torch.cuda.current_stream(loss.device).record_event() if loss.is_cuda else None
        self._asked = finite, copied, loss, f"at step {trainer.global_step} (slices: {', '.join(self._names)})"
        if copied is None:
            self._raise_if_not_finite()

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise PluginError for a weight without a gradient. ddp would wait for it, and not average others."""
        copies = trainer.strategy.model
        if not isinstance(copies, DistributedDataParallel) or copies.find_unused_parameters:
            return
        if not copies.require_backward_grad_sync:  # a window goes on
            return
        names = [name for name, p in pl_module.named_parameters() if p.requires_grad and p.grad is None]
        if names:
            suffix = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise PluginError(
                f"strategy=ddp waits for a gradient of {names[0]}{suffix}, but the loss does not depend on it: take "
                "the weight out (or requires_grad_(False)), or set strategy.find_unused_parameters=true"
            )

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check the loss. Log the gradient norm before clipping, its maximum in the run, lr and the mean of λ_t."""
        assert isinstance(pl_module, RunModule)
        self._raise_if_not_finite()
        index = [candidate is optimizer for candidate in trainer.optimizers].index(True)
        number = f"_{index}" if index else ""  # of another optimizer than that of the network
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = gather(torch.nn.utils.get_total_norm(gradients))  # that of shards is itself in shards
        # The scaler skips a step whose gradient overflows. That norm would be the largest for the rest of the run.
        counted = norm if _scaler(trainer) is None else norm.nan_to_num(nan=0.0, posinf=0.0)
        pl_module.log(f"train/grad_norm{number}", norm)
        # As a tensor in float64: Lightning would round a Python float to float32.
        pl_module.log(f"train/lr{number}", torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64))
        if index:
            return
        self._largest_norm = torch.maximum(counted, torch.as_tensor(self._largest_norm, device=norm.device))
        pl_module.log("train/grad_norm_max", self._largest_norm)
        if (trainer.global_step + 1) % trainer.log_every_n_steps:  # type: ignore[attr-defined]  # Lightning's, untyped
            return  # no logger would see these values, and each costs small operators on the GPU
        for t, step_size in enumerate(pl_module.network.step_sizes):
            pl_module.log(f"train/lambda_{t}", gather(step_size.detach()).mean())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Log an optimizer step after its last batch: place, speed, and the loss, the mean over its samples."""
        n = trainer.accumulate_grad_batches
        if "loss" in outputs:  # a step that optimizes by itself may return none
            # Lightning has divided the loss by the batches of a step already.
            self._loss = outputs["loss"] + (self._loss if batch_idx % n else 0.0)
        if (batch_idx + 1) % n:
            return
        if "loss" in outputs:
            pl_module.log("train/loss", self._loss, batch_size=1, sync_dist=True)
        samples = _log_place(trainer, pl_module, on_epoch=False)
        if trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]  # Lightning's, untyped
            return
        (earlier_samples, start), self._row = self._row, (samples, time.monotonic())
        pl_module.log("train/samples_per_second", torch.tensor((samples - earlier_samples) / (self._row[1] - start)))
        if (scaler := _scaler(trainer)) is not None:
            pl_module.log("train/loss_scale", torch.tensor(scaler.get_scale()))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the place of the validation."""
        _log_place(trainer, pl_module, on_epoch=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock again: the time of a validation is not that of training."""
        if not trainer.sanity_checking:
            self.on_train_start(trainer, pl_module)

    def _raise_if_not_finite(self) -> None:
        if self._asked is None:
            return
        (finite, copied, loss, where), self._asked = self._asked, None
        if copied is not None:
            copied.synchronize()  # waits for that copy only
        if not finite:
            raise FloatingPointError(f"the loss became {loss.item()} {where}")


def samples_until(trainer: L.Trainer, step: int) -> int:
    """Slices that all devices together have seen after this number of optimizer steps."""
    loader = trainer.train_dataloader
    if loader is None:  # a network that does not learn, or a resumed run that only lacks its last validation
        loader = trainer.datamodule.train_dataloader()  # type: ignore[attr-defined]  # Lightning's, untyped
    sampler = getattr(loader, "sampler", None)
    return sampler.samples_until(step) if isinstance(sampler, EpochSampler) else samples_of(trainer, loader, step)


def _log_place(trainer: L.Trainer, module: L.LightningModule, *, on_epoch: bool) -> int:
    """Log step and samples, and return the samples. They are on the CPU, so the host waits for no device."""
    samples = samples_until(trainer, trainer.global_step)
    for name, value in (("step", trainer.global_step), ("samples", samples)):
        exact = torch.tensor(value, dtype=torch.float64)
        module.log(name, exact, on_step=not on_epoch, on_epoch=on_epoch, reduce_fx="max", batch_size=1)
    return samples


def _scaler(trainer: L.Trainer) -> Any:
    """The GradScaler of 16-mixed, or None."""
    return getattr(trainer.precision_plugin, "scaler", None)


class MemoryMonitor(Callback):
    """Logs memory at each optimizer step, and measures the memory of a step.

    The memory of a step is the largest number of bytes of tensors on the fullest device during an optimizer step:
    weights, gradients, optimizer state, graph and the scan's matrices. `qnmixer.plan` predicts it. It is that of the
    first step with whole batches, without the very first step. Of a run without one it is that of the largest batches
    in two epochs, and a line says how many slices they had. On CUDA torch's allocator counts. On a CPU the tracker of
    the plan counts the real tensors. It cannot see those of fsdp and compile=true, so there is no figure then.

    memory/peak_mib is the same figure, on CUDA of each step. memory/allocated_mib, memory/reserved_mib and
    memory/device_used_mib are counters of the process, see `Usage`. On a CPU they include Python and all libraries.

    Args:
        console: prints the lines; None: the terminal.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.measured_mib: float | None = None  # of a step with whole batches; None before there was one
        self.short_step: dict[str, float] = {}  # MiB and slices of the largest step, while `measured_mib` is None
        self._settings: dict[str, Any] = {}
        self._resumed: dict[str, Any] = {}
        self._tracker: PeakTracker | None = None
        self._tracking = ExitStack()
        self._whole = 0  # slices in a whole batch
        self._slices = 0  # in the smallest batch of this step
        self._n_steps = 0
        self._is_done = False

    def state_dict(self) -> dict[str, Any]:
        """The memory of a step, for a resumed run that has no such step any more, and the settings that it is of."""
        return {"measured_mib": self.measured_mib, "settings": self._settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of the part before the resume."""
        self._resumed = state_dict

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ask how many slices a whole batch has. With equal settings, a step needs what it did before the resume."""
        assert isinstance(pl_module, RunModule)
        self._whole = getattr(trainer.train_dataloader, "batch_size", None) or 0
        self._settings = _settings_of_memory(pl_module.settings)
        if self._settings and self._resumed.get("settings") == self._settings:
            self.measured_mib = self._resumed["measured_mib"]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Reset the peak at the start of an optimizer step, which may take several batches."""
        assert isinstance(pl_module, RunModule)
        n_slices = len(batch["weight"])
        if batch_idx % trainer.accumulate_grad_batches:
            self._slices = min(self._slices, n_slices)
            return
        self._tracking.close()  # of a step that the end of an epoch has cut
        self._tracker, self._slices = None, n_slices
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
            return
        is_larger = n_slices > self.short_step.get("slices", 0)
        if self._n_steps and not self._is_done and is_larger and _is_measured(trainer, pl_module):
            # As few steps as possible: the tracker slows them down.
            self._tracker = self._tracking.enter_context(PeakTracker())
            tensors = [value for value in batch.values() if isinstance(value, Tensor)]
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning's, untyped
            for callback in callbacks:
                if isinstance(callback, EMA):
                    tensors += callback.mean.values()
            self._tracker.track(pl_module, *trainer.optimizers, *tensors)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Log memory, if the batch ended an optimizer step."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._tracking.close()
        self._n_steps += 1
        self._whole = self._whole or self._slices  # of loaders that do not know it: as many as in the first
        usage = read_usage(pl_module.device)
        peak, self._tracker = usage.peak if self._tracker is None else self._tracker.peak_bytes, None
        assert isinstance(pl_module, RunModule)
        if self._n_steps > 1 and not self._is_done and _is_measured(trainer, pl_module):
            self._measure(trainer, pl_module.device, peak or 0)
        whole = None if self.measured_mib is None else round(self.measured_mib * MIB)
        values = vars(usage) | {"peak": peak if pl_module.device.type == "cuda" else whole}
        for name, value in values.items():  # all at each step: Lightning forgets a value at the end of its epoch
            if value is not None:
                pl_module.log(f"memory/{name}_mib", value / MIB, batch_size=1, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say what a run measured that ended before a step with whole batches."""
        if not self._is_done:
            self._print()

    def as_record(self) -> dict[str, float | None]:
        """The entry `memory` of results.json."""
        return {"measured_step": self.measured_mib} | (self.short_step if self.measured_mib is None else {})

    def _measure(self, trainer: L.Trainer, device: torch.device, peak: int) -> None:
        """Keep the memory of a step, if its batches are the largest so far. All processes do the same."""
        values = torch.tensor([peak / MIB, self._slices, self._whole], device=device)
        # Of the fullest device: this is what must fit. It has the largest batch.
        mib, slices, whole = trainer.strategy.reduce(values, reduce_op="max").tolist()
        self._whole = int(whole)
        if slices >= whole:
            self.measured_mib, self._is_done = mib, True
        elif slices > self.short_step.get("slices", 0):
            self.short_step = {"short_step": mib, "slices": slices}
        # Then all steps of an epoch have been seen, and none has whole batches.
        self._is_done |= self._n_steps > trainer.num_training_batches / trainer.accumulate_grad_batches
        if self._is_done:
            self._print()

    def _print(self) -> None:
        step = "memory: {:,.0f} MiB in tensors at the peak of a step"
        if self.measured_mib is not None:
            line = step.format(self.measured_mib)
        elif self.short_step:
            n, short = self.short_step["slices"], step.format(self.short_step["short_step"])
            line = f"{short} with {n:.0f} slices; a whole batch has {self._whole}, and needs more"
        else:
            return
        self.console.lines(line)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop counting."""
        self._tracking.close()


def _is_measured(trainer: L.Trainer, module: RunModule) -> bool:
    """Whether a run's tensors are counted. The tracker sees neither storages that fsdp frees nor compiled code."""
    is_hidden = isinstance(trainer.strategy, ModelParallelStrategy) or bool(module.settings.get("compile"))
    return module.device.type == "cuda" or not is_hidden


def _settings_of_memory(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that a resume may change and that change the memory of a step; {} in a script."""
    if not settings:
        return {}
    sections = ("callbacks", "compile", "memory", "module", "strategy")
    keys = ("accelerator", "accumulate_grad_batches", "devices", "num_nodes", "precision")
    values = {key: settings[key] for key in sections} | {key: settings["trainer"][key] for key in keys}
    return values | {"batch_size": settings["data"]["batch_size"]}


# Those that a config names

_REFUSED_CALLBACKS = (BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder, StochasticWeightAveraging)
"""Callbacks that change what the config fixes. Schedule, `samples` and resuming rely on it."""


def build_callbacks(callbacks: Mapping[str, CallbackConfig], metrics: Mapping[str, MetricConfig]) -> list[Callback]:
    """Build the callbacks of the config's group `callbacks`.

    A callback that monitors a metric, such as EarlyStopping, gets the metric's mode, unless the config has one.

    Raises PluginError for a target that is no callback, that refuses its arguments, or that changes what the config
    fixes.
    """
    built = []
    for config in callbacks.values():
        if issubclass(config.load(), _REFUSED_CALLBACKS):
            raise PluginError(
                f"{config.as_typed} would change the run while it trains: set data.batch_size, "
                "trainer.accumulate_grad_batches or optimizer.lr instead, or choose callbacks=ema"
            )
        mode = mode_of(str(config.arguments.get("monitor")), metrics)
        built.append(config.build(supplied={} if mode is None else {"mode": mode}))
    return built


class EMA(Callback):
    """Validation and checkpoints use the mean of the weights. Training continues with the weights themselves.

    Lightning's own callback would copy the scan's matrix too. It also swaps the two sets of weights in a checkpoint
    that is written during a validation.

    Args:
        decay: the share of the old mean that remains after a step.
    """

    def __init__(self, decay: Annotated[float, Ge(0), Lt(1)] = 0.999) -> None:
        self.decay = decay
        self.mean: dict[str, Tensor] = {}
        self._swapped = False

    @torch.no_grad()
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start from the mean in the checkpoint, or from the weights of the network."""
        weights = {name: p.detach() for name, p in pl_module.named_parameters()}
        self.mean = {name: self.mean.get(name, p).to(p.device, copy=True) for name, p in weights.items()}

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the mean after an optimizer step."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        for name, parameter in pl_module.named_parameters():
            self.mean[name].lerp_(parameter, 1 - self.decay)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the mean into the network."""
        self._swap(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the trained weights back."""
        self._swap(pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the mean as the weights, for every reader of a checkpoint, and the trained weights beside it."""
        if not self.mean:
            return
        weights = {name: p.detach() for name, p in pl_module.named_parameters()}
        trained, mean = (self.mean, weights) if self._swapped else (weights, self.mean)
        checkpoint[TRAINED_KEY] = trained
        checkpoint["state_dict"] = checkpoint["state_dict"] | mean

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read the mean; the weights themselves in a checkpoint of a run without this callback."""
        self.mean = checkpoint[MEAN_KEY]

    @torch.no_grad()
    def _swap(self, pl_module: L.LightningModule) -> None:
        self._swapped = not self._swapped
        for name, parameter in pl_module.named_parameters():
            if name in self.mean:
                weights = parameter.detach().clone()
                parameter.copy_(self.mean[name])
                self.mean[name].copy_(weights)


_MOST_ITERATES = 15  # iterates in a picture


class IteratePictures(Callback):
    """Draws x₀ … x_T of the first validation slices with error maps, and logs the health of H, at each validation.

    Args:
        n_slices: the number of slices.
    """

    def __init__(self, n_slices: Count) -> None:
        self.n_slices = n_slices

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Run the slices again, one by one, and draw them. All processes do the same, as fsdp requires."""
        if trainer.sanity_checking:
            return
        assert isinstance(pl_module, RunModule)
        loader: Any = loaders_of(trainer.val_dataloaders)[0]
        config, rows = pl_module.config, []
        taken = {*modes_of(config.metrics), f"val/{ITERATES}", best_name(config.monitor)}
        for n, batch in enumerate(_first_slices(trainer, loader, self.n_slices)):
            batch = trainer.strategy.batch_to_device(batch)
            with trainer.precision_plugin.forward_context():
                row, health = _iterates(pl_module, batch)
            rows.append(row)
            for name, value in health.items() if n == 0 else ():
                if f"val/{name}" in taken:
                    method = f"{type(pl_module.network).__name__}.diagnostics"
                    raise PluginError(f"{method} gives {name}, which a run logs itself: give it another name")
                pl_module.log(f"val/{name}", value, batch_size=1, on_step=False, on_epoch=True, sync_dist=True)
        if not trainer.is_global_zero:
            return
        path = Path(trainer.default_root_dir) / "pictures" / f"iterates_{trainer.global_step:07d}.png"
        draw_slices(path, rows)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image(f"val/{ITERATES}", [str(path)], trainer.global_step)


def _first_slices(trainer: L.Trainer, loader: Any, n: int) -> Iterator[Any]:
    """The first n slices of a loader, one by one, as batches of one, on the host."""
    if isinstance(getattr(loader, "sampler", None), EpochSampler):
        for k in range(min(n, loader.sampler.length)):
            yield loader.collate_fn([loader.dataset[k]])
        return
    # Of a user's LightningDataModule, which completes a batch.
    batch = trainer.datamodule.on_before_batch_transfer(next(iter(loader)), 0)  # type: ignore[attr-defined]  # Lightning's
    for k in range(min(n, len(batch["weight"]))):
        yield {name: values[k : k + 1] for name, values in batch.items()}


def _iterates(module: RunModule, batch: Batch) -> tuple[SliceImages, dict[str, Tensor]]:
    """Some x_t of a batch of one slice, and the health of H after the last one."""
    T = module.network.n_iterations
    shown = sorted({round(k * T / (_MOST_ITERATES - 1)) for k in range(_MOST_ITERATES)})
    state, iterates = module.network.trajectory(module.measure(batch, "val"), shown)
    truth = to_hu(batch, batch["image"])[0, 0].cpu() if "image" in batch else None
    window, own_range = module.config.evaluation.window, module.config.data.own_range
    row = SliceImages(f"slice {int(batch['sample'][0])}", truth, [], window)
    for t, image in zip(shown, iterates, strict=True):
        caption = "" if truth is None else f"{float(psnr(image, batch['image'], own_range=own_range)):.2f} dB"
        row.methods.append(MethodImages(f"x{t}", [to_hu(batch, image)[0, 0].cpu()], caption))
    return row, module.network.diagnostics(state)
