"""One rank of the tests of gradients and of buffers: train configs by their strategies, write what must be equal."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision
from torch import Tensor
from torch.distributed.tensor import DTensor

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.evaluation.evaluate import evaluate
from qnmixer.measurement.build import build_geometry
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.module.base import RunModule
from qnmixer.module.build import build_module
from qnmixer.parallel.devices import compile_blocks
from qnmixer.reconstruction.checkpoints import load_weights
from qnmixer.runs.loggers import build_loggers
from qnmixer.runs.processes.process import rank, world_size
from qnmixer.settings.run import Config, parse
from qnmixer.training.callbacks import build_callbacks
from qnmixer.training.checkpointing import Checkpointing
from qnmixer.training.steps import build_trainer

FACTORS = (2.0**13, 2.0**-13)
"""Of a scaler's growth and backoff: gradients overflow at 2^23, and at 2^18 they do not, so from 2^10 on every other
step is skipped.
"""


class Record(Callback):
    """The gradient of the first step, before clipping; the loss and the scale of every step; the weights at the end.

    `local`: norms of this rank's gradients after the first batch of a window of several.
    """

    def __init__(self, scale: float | None, gradients: bool) -> None:
        self.scale, self._records_gradients = scale, gradients
        self.gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self.scales: list[float] = []
        self._step = 0
        self.weights: dict[str, Tensor] = {}
        self.local: list[float | None] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        if self.scale:
            _precision(trainer).scaler = torch.amp.GradScaler("cpu", self.scale, *FACTORS, growth_interval=1)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if self._records_gradients and not self.gradients:
            self.gradients = whole({n: p.grad for n, p in pl_module.named_parameters() if p.grad is not None})

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step:
            if not self.local:  # in the middle of the first window
                self.local = [None if p.grad is None else float(p.grad.norm()) for p in pl_module.parameters()]
            return
        self._step = trainer.global_step
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        if self.scale:
            self.scales.append(_precision(trainer).scaler.get_scale())  # type: ignore[union-attr]  # set above

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.weights = whole({n: p.detach() for n, p in pl_module.named_parameters()})


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors, with those in shards put together: all in one message, since each takes milliseconds."""
    shards = {name: tensor.to_local() for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    of_ranks: list[Any] = [None] * world_size()
    if shards:
        torch.distributed.all_gather_object(of_ranks, shards)
    return {n: torch.cat([of[n] for of in of_ranks]) if n in shards else t.clone() for n, t in tensors.items()}


def _precision(trainer: L.Trainer) -> MixedPrecision:
    assert isinstance(trainer.precision_plugin, MixedPrecision)
    return trainer.precision_plugin


def magnitudes(module: RunModule, config: Config) -> dict[str, Tensor]:
    """The sum of |gradient of a slice| over the slices of the first step, by tensor.

    The gradient of a step is the sum of these. Where it cancels, rounding is as large as in its terms.
    """
    data = SliceDataModule(config.data)  # of its own: the run's stays at its start
    data.setup("fit")
    sums: dict[str, Tensor] = {}
    for _, batch in zip(range(config.trainer.accumulate_grad_batches), data.train_dataloader(), strict=False):
        y = module.measure(batch, "train")
        loss = batch["weight"] * module.loss(module.network(y), batch["image"])
        for term in loss / len(loss) / config.trainer.accumulate_grad_batches:
            module.zero_grad()
            term.backward(retain_graph=True)
            for name, p in module.named_parameters():
                if p.grad is not None:
                    sums[name] = sums.get(name, torch.zeros(())) + p.grad.norm()
    return sums


def train(
    config: Config,
    folder: Path,
    resume: str | None = None,
    scale: float | None = None,
    measure: bool = False,
    save: bool = False,
    exact: bool = False,
    terms: bool = False,
) -> dict[str, Any]:
    """Train a config in this process, as one rank of its strategy; what was recorded.

    `measure`: with the checkpoints of a run, whose validation and test are recorded. `save`: write last.ckpt.
    `exact`: in float64. `terms`: with the magnitudes of the first step's gradients.
    """
    L.seed_everything(1, verbose=False)
    module = build_module(config)
    for p in module.parameters():  # away from the start, where G is zero and nothing flows back through it
        p.data += 0.02 * torch.randn(p.shape)  # not like p, whose layout in memory may differ
    apply_memory_mode(module.network, config.memory)
    if config.compile:
        compile_blocks(module.network)
    record = Record(scale, gradients=not (resume or save))  # shards take as long as a step
    callbacks = [record, *([Checkpointing(folder, config.monitor, None, "max")] if measure else [])]
    trainer = build_trainer(
        config, folder, [*callbacks, *build_callbacks(config.callbacks, {})], build_loggers(config, folder, [])
    )
    if exact:
        trainer.strategy.precision_plugin = DoublePrecision()
    data = SliceDataModule(config.data, geometry=build_geometry(config))
    sums = magnitudes(copy.deepcopy(module), config) if terms else {}
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    if save:
        trainer.save_checkpoint(folder / "last.ckpt")
    results = {key: getattr(record, key) for key in ("gradients", "losses", "scales", "weights", "local")}
    results["magnitudes"], saved = sums, module.network.state_dict()
    results["buffers"] = {name: saved[name].clone() for name, _ in module.network.named_buffers() if name in saved}
    if measure:
        trainer.validate(module, datamodule=data, verbose=False)  # as a run does after its last step
        results["validation"] = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        trained_module = build_module(config)
        load_weights(trained_module, folder / "checkpoints" / "last.ckpt")
        evaluation = evaluate(trained_module, data, "test", config.evaluation, trainer.strategy.root_device)
        results["test"] = [list(vars(score).values()) for score in evaluation.scores]
        results["rows"] = [row.name for row in evaluation.rows]
    return results


def main(job: Path) -> None:
    for k, task in enumerate(json.loads(job.read_text())):
        config, folder = parse(task.pop("config")), Path(task.pop("folder"))
        torch.save(train(config, folder, **task), folder / f"rank_{rank()}.pt")
        print(k, folder, flush=True)


sys.path.insert(0, str(Path(__file__).parents[2]))  # for a module of tests/own.py
if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
