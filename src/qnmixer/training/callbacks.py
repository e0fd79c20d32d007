"""What is shown while a network trains: lines in the terminal, pictures in the run folder and in W&B."""

import math
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from rich.console import Console
from torch import Tensor

from qnmixer.models.latent_bfgs import CurvaturePair
from qnmixer.training.evaluation import to_hu
from qnmixer.training.metrics import psnr
from qnmixer.training.module import Batch, ReconstructionModule
from qnmixer.training.pictures import Panel, Row, draw_iterates


class ValidationLine(Callback):
    """One line a validation: what the network reaches, how fast, how long to go; kept in logs as in terminals."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.last_step = 0
        self._start, self._first_step = 0.0, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._start, self._first_step = time.monotonic(), trainer.global_step

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the line."""
        values, step = trainer.callback_metrics, trainer.global_step
        self.last_step = step
        total, done = trainer.estimated_stepping_batches, step - self._first_step
        seconds = time.monotonic() - self._start
        left = f" · {_duration(seconds / done * (total - step))} left" if done and math.isfinite(total) else ""
        self.console.print(
            f"step {step}/{total} · val PSNR {values['val/psnr']:.2f} dB · SSIM {100 * values['val/ssim']:.2f} "
            f"· {1000 * seconds / max(1, done):.0f} ms a step, all included{left}",
            highlight=False,
            soft_wrap=True,
        )


class PromptInterrupt(Callback):
    """Ctrl-C ends training at the next batch at the latest.

    Python drops a KeyboardInterrupt that is raised inside a finaliser, of which drawing pictures has many.
    """

    def __init__(self) -> None:
        self._asked = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over Ctrl-C."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._ask)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hand Ctrl-C back."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Raise what was dropped."""
        if self._asked:
            raise KeyboardInterrupt

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self._asked = True
        raise KeyboardInterrupt


class IteratePictures(Callback):
    """At each validation, x₀ … x_T of the first validation slice with error maps, and the health of H."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Run the first batch again, keeping every iterate."""
        if batch_idx or not isinstance(pl_module, ReconstructionModule):
            return
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            trajectory = pl_module.network.trajectory(pl_module.measure(batch, "val"))
        for name, value in _curvature(trajectory[-1][0].pairs).items():
            pl_module.log(name, value, batch_size=1, on_step=False, on_epoch=True, sync_dist=True)
        if not trainer.is_global_zero:
            return
        path = self.folder / f"iterates_{trainer.global_step:07d}.png"
        draw_iterates(path, _iterate_row(batch, [image for _, image in trajectory]))
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("val/iterates", [str(path)], step=None)


def _iterate_row(batch: Batch, iterates: list[Tensor]) -> Row:
    """The first slice of a batch at every x_t."""
    values = [float(psnr(x[:1], batch["image"][:1])) for x in iterates]
    panels = [
        Panel(f"x{t}\n{value:.2f} dB", to_hu(batch, x)[0, 0].cpu())
        for t, (x, value) in enumerate(zip(iterates, values, strict=True))
    ]
    return Row(batch["name"][0], to_hu(batch, batch["image"])[0, 0].cpu(), panels)


def _curvature(pairs: tuple[CurvaturePair, ...]) -> dict[str, float]:
    """Mean cos(z, s) and the share of pairs that the safeguard skipped."""
    if not pairs:
        return {}
    cosines = torch.stack([pair.cosine for pair in pairs])
    skipped = torch.stack([pair.used == 0 for pair in pairs])
    return {"val/cosine_zs": float(cosines.mean()), "val/skipped_pairs": float(skipped.float().mean())}


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
