"""The callbacks that the config names, pictures of the iterates, and the evaluation for the loggers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import Logger, WandbLogger
from torch import Tensor

from qnmixer.engine.batch import Batch, to_hu
from qnmixer.engine.config.sections import CallbackConfig, Count, MetricConfig, modes_of
from qnmixer.engine.evaluation.evaluate import PAGE, PICTURE
from qnmixer.engine.evaluation.scores import Evaluation
from qnmixer.engine.optimization.metrics import psnr
from qnmixer.engine.reports.pictures import MethodImages, SliceImages, draw_slices
from qnmixer.engine.run_module import RunModule
from qnmixer.errors import PluginError

_MOST_SHOWN = 15  # iterates in a picture
_REFUSED: dict[type[Callback], str] = {
    BatchSizeFinder: "set data.batch_size: python -m qnmixer.plan says what fits",
    GradientAccumulationScheduler: "set trainer.accumulate_grad_batches",
    LearningRateFinder: "set optimizer.lr, or try several: -m optimizer.lr=1e-4,3e-4,1e-3",
    StochasticWeightAveraging: "choose callbacks=ema, which averages weights too",
}
"""Callbacks that change what the config fixes, and what to do instead. Schedule, `samples` and resuming rely on it."""


def build_callbacks(
    callbacks: Mapping[str, CallbackConfig], metrics: Mapping[str, MetricConfig] | None = None
) -> list[Callback]:
    """Build the callbacks of the config's group `callbacks`.

    A callback that monitors a metric, such as EarlyStopping, gets the metric's mode, unless the config has one.

    Raises PluginError for a target that is no callback, that refuses its arguments, or that changes what the config
    fixes.
    """
    for it in callbacks.values():
        for kind, instead in _REFUSED.items():
            if issubclass(it.load(), kind):
                raise PluginError(f"{it.key}={it._target_} would change the run while it trains: {instead}")
    modes = modes_of(metrics or {})
    return [it.build(offered=_mode(it, modes)) for it in callbacks.values()]


def _mode(callback: CallbackConfig, modes: Mapping[str, str]) -> dict[str, str]:
    monitored = str(callback.arguments.get("monitor"))
    return {"mode": modes[monitored]} if monitored in modes else {}


class IteratePictures(Callback):
    """Draws x₀ … x_T of the first validation slices with error maps, and logs the health of H, at each validation.

    Args:
        n_slices: the number of slices.
        folder: of the pictures; None: pictures/ of the run folder.
    """

    def __init__(self, n_slices: Count, folder: Path | None = None) -> None:
        self.n_slices, self.folder = n_slices, folder

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Run the slices again, one by one, and draw them. All processes do the same, as fsdp requires."""
        assert isinstance(pl_module, RunModule)
        loader: Any = trainer.val_dataloaders
        rows = []
        for n in range(min(self.n_slices, loader.sampler.length)):
            batch = trainer.strategy.batch_to_device(loader.collate_fn([loader.dataset[n]]))
            with trainer.precision_plugin.forward_context():
                row, health = _iterates(pl_module, batch)
            rows.append(row)
            for name, value in health.items() if n == 0 else ():
                pl_module.log(f"val/{name}", value, batch_size=1, on_step=False, on_epoch=True, sync_dist=True)
        if not trainer.is_global_zero:
            return
        folder = self.folder or Path(trainer.default_root_dir) / "pictures"
        path = folder / f"iterates_{trainer.global_step:07d}.png"
        draw_slices(path, rows)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("val/iterates", [str(path)], trainer.global_step)


def _iterates(module: RunModule, batch: Batch) -> tuple[SliceImages, dict[str, Tensor]]:
    """Some x_t of a batch of one slice, and the health of H after the last one."""
    T = module.network.n_iterations
    shown = sorted({round(k * T / (_MOST_SHOWN - 1)) for k in range(_MOST_SHOWN)})
    state, iterates = module.network.trajectory(module.measure(batch, "val"), shown)
    row = SliceImages(f"slice {int(batch['sample'][0])}", to_hu(batch, batch["image"])[0, 0].cpu(), [])
    for t, image in zip(shown, iterates, strict=True):
        value = float(psnr(image, batch["image"], own_range=module.config.data.own_range))
        row.methods.append(MethodImages(f"x{t}", [to_hu(batch, image)[0, 0].cpu()], f"{value:.2f} dB"))
    return row, module.network.diagnostics(state)


def log_evaluation(loggers: Sequence[Logger], evaluation: Evaluation, folder: Path, step: int, samples: int) -> None:
    """Log the means of the evaluation. W&B also gets the table, picture and page from `folder`."""
    means = {"samples": float(samples)} | {f"test/{name}": value for name, value in evaluation.metrics().items()}
    for logger in loggers:
        logger.log_metrics(means, step)
        if isinstance(logger, WandbLogger):
            _log_table(logger, evaluation, step)
            logger.log_image("test/picture", [str(folder / PICTURE)], step)
            for path in filter(Path.exists, (folder / PICTURE, folder / PAGE)):  # the page is an extra
                logger.experiment.save(str(path), base_path=str(folder.parent), policy="now")
        logger.save()  # Lightning will not call them again, and some loggers write at intervals only


def _log_table(logger: WandbLogger, evaluation: Evaluation, step: int) -> None:
    """Log the table as a file of this run only. W&B's own way also makes an artifact, which names the home folder."""
    import wandb

    headings, rows = evaluation.numbers()
    table = wandb.Table(columns=[*headings], data=rows)
    table.bind_to_run(logger.experiment, "test/table", step)
    logged: dict[str, Any] = {"test/table": table}
    logger.log_metrics(logged, step)
