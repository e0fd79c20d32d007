"""One rank of `test_parity`: train each of some configs by its strategy, and write down what must be the same."""

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from rich.console import Console
from torch import Tensor

from qnmixer.config import Config, parse
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.parallel.memory import apply_memory_mode
from qnmixer.ranks import rank
from qnmixer.training.fit import build_trainer
from qnmixer.training.module import ReconstructionModule, whole


class Record(Callback):
    """The gradient of the first step, before clipping; the loss and the scale of every step; the weights at the end."""

    def __init__(self, scale: float | None) -> None:
        self.scale = scale
        self.gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self.scales: list[float] = []
        self._step = 0
        self.weights: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        if self.scale:
            _precision(trainer).scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, growth_interval=3)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if not self.gradients:
            self.gradients = {n: whole(p.grad).clone() for n, p in pl_module.named_parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        if self.scale:
            self.scales.append(_precision(trainer).scaler.get_scale())  # type: ignore[union-attr]  # set above

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.weights = {n: whole(p.detach()).clone() for n, p in pl_module.named_parameters()}


def _precision(trainer: L.Trainer) -> MixedPrecision:
    assert isinstance(trainer.precision_plugin, MixedPrecision)
    return trainer.precision_plugin


def train(config: Config, folder: Path, resume: Path | None = None, scale: float | None = None) -> dict[str, Any]:
    """Train a config in this process, as one rank of its strategy; what was recorded."""
    L.seed_everything(1, verbose=False)
    module = ReconstructionModule(config)
    for p in module.parameters():  # away from the start, where G is zero and nothing flows back through it
        p.data += 0.02 * torch.randn_like(p)
    apply_memory_mode(module.network, config.memory)
    record = Record(scale)
    trainer = build_trainer(config, folder, [record], Console(quiet=True))
    trainer.fit(module, datamodule=SliceDataModule(config.data), ckpt_path=resume, weights_only=True)
    trainer.save_checkpoint(folder / "last.ckpt")
    return {key: getattr(record, key) for key in ("gradients", "losses", "scales", "weights")}


def main(job: Path) -> None:
    for k, task in enumerate(json.loads(job.read_text())):
        folder = Path(task["folder"])
        resume = Path(task["resume"]) if task["resume"] else None
        found = train(parse(task["config"]), folder, resume, task["scale"])
        torch.save(found, folder / f"rank_{rank()}.pt")
        print(k, task["folder"], flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
