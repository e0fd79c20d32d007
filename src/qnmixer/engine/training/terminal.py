"""The lines of a run before and after training, and the library warnings that it hides."""

import logging
import shlex
import sys
import warnings

import lightning as L

from qnmixer.engine.checkpoints.reading import built_from
from qnmixer.engine.config import Config, effective_batch
from qnmixer.engine.config.compose import quoted
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.sampler import EpochSampler
from qnmixer.engine.plugins import trust_words
from qnmixer.engine.processes.ranks import is_rank, rank
from qnmixer.engine.reports.tables import Console
from qnmixer.engine.run_module import RunModule
from qnmixer.engine.tracking.run import Run

_NOT_FOR_USERS = (
    "The .*dataloader.* does not have many workers",
    "The number of training batches .* is smaller than the logging interval",
    "Checkpoint directory .* exists and is not empty",
    "The dirpath has changed from",
    "(?s)You're resuming from a checkpoint that ended before the epoch ended",  # the sampler knows where it was
    "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
    "It is recommended to use `self.log\\('(step|samples)', ..., sync_dist=True",  # every rank has the same
    # The stride of a dimension of size 1 means nothing, as in weights of convolutions from one channel. The gradient
    # has the memory layout of its bucket. Only torch's comparison of the numbers says otherwise.
    "Grad strides do not match bucket view strides",
)


def quieten() -> None:
    """Hide lines of libraries about which a user can do nothing."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in _NOT_FOR_USERS:
        warnings.filterwarnings("ignore", message=message)
    if rank() != 0:
        warnings.simplefilter("ignore")  # rank 0 prints the same warnings
    if is_rank():  # Python drops an exception in a finaliser; that a signal stopped the rank is not worth a traceback
        sys.unraisablehook = lambda it: (
            None if issubclass(it.exc_type, KeyboardInterrupt) else sys.__unraisablehook__(it)
        )


def print_start(config: Config, module: RunModule, data: SliceDataModule, trainer: L.Trainer, console: Console) -> None:
    """Print network, scan, data, batch, and the limit of the training."""
    t, batch, n_parameters = config.trainer, effective_batch(config), sum(p.numel() for p in module.parameters())
    nodes = f" × {t.num_nodes} nodes" if t.num_nodes > 1 else ""
    devices = f" × {t.devices} devices{nodes}" if config.strategy.name != "single" else ""
    noise = "measured" if data.measured else f"noise {config.noise.name}"
    lines = [
        f"{module.network.title}, T = {module.network.n_iterations}, {n_parameters:,} parameters, "
        f"on {trainer.strategy.root_device}{devices}, strategy {config.strategy.name}",
        f"{config.geometry.n_views} views × {config.geometry.n_detectors} detector bins, {noise}",
        data.describe(),
    ]
    if n_parameters:
        steps = _steps_per_epoch(config, len(data.dataset("train")))
        limits = [f"{t.max_steps:,} steps"] * (t.max_steps > -1)
        limits += [f"{t.max_epochs:,} epochs ({t.max_epochs * steps:,} steps)"] if t.max_epochs else []
        lines += [
            f"batch {config.data.batch_size}{devices} × accumulation {t.accumulate_grad_batches} = {batch} "
            f"slice{'s' * (batch > 1)} an optimizer step; {steps:,} step{'s' * (steps > 1)} an epoch",
            f"training ends after {' or '.join(limits)}",
        ]
    if config.debug.name in ("few_batches", "overfit"):
        lines.append(f"debug={config.debug.name}: the numbers of such a run mean little")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    if data.measured and (doubt := _other_unit(module, data)):
        console.warn(doubt, style="bold red")


def _other_unit(module: RunModule, data: SliceDataModule) -> str | None:
    """A line if the first measured sinogram is in another unit than its image, as −log of transmission is."""
    sample = data.dataset("train")[0]
    x, fbp = sample["image"].flatten(), module.projector.fbp(sample["sinogram"][None]).flatten()
    gain = float(fbp @ x / (x @ x).clamp_min(1e-12))
    if 1 / 3 < gain < 3:
        return None
    return (
        f"FBP of the sinogram of {sample['name']} is {gain:.2g} times its image: measured sinograms are line integrals "
        "of (HU + 1000) / (data.hu_max + 1000) in mm, not −log of transmission (docs/make_it_yours.md)"
    )


def print_end(config: Config, run: Run) -> None:
    """Print where the results are, and how to try the network on other slices."""
    run.console.print(f"run folder: {run.folder}", soft_wrap=True)
    if (profile := run.folder / "profile").is_dir():
        run.console.print(f"profile: {profile} (traces are for https://ui.perfetto.dev)", soft_wrap=True)
    if picture := run.record.get("picture"):
        words = [f"run={quoted(run.folder)}", *trust_words(built_from(config, "metrics.").values()), "data=dicom"]
        lines = f"on your own slices: python -m qnmixer.evaluate {shlex.join(words)} data.root=/path/to/dicom"
        run.console.print(f"{lines}\npicture: {picture}", soft_wrap=True, highlight=False)


def _steps_per_epoch(config: Config, n_slices: int) -> int:
    """Optimizer steps of an epoch."""
    limit = config.trainer.extra.get("limit_train_batches")
    steps = limit // config.trainer.accumulate_grad_batches if isinstance(limit, int) else limit
    return EpochSampler(n_slices, shuffle=False, batch_size=effective_batch(config), batches=steps).steps
