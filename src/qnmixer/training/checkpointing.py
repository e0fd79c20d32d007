"""What a run keeps to go on from: best.ckpt, last.ckpt, and in them all that Lightning does not keep by itself.

A checkpoint is made between two optimizer steps, once the logs have all that the last one had to say: where the next
batch begins, at the end of a validation, at the end of training. So has a run that was told to stop.
"""

import io
import math
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from qnmixer.checkpoints.reading import load
from qnmixer.errors import Stopped
from qnmixer.files import PART_SUFFIX, atomic_file, remove, replace
from qnmixer.parallel.pipeline import PipelineStrategy
from qnmixer.processes.ranks import rank
from qnmixer.processes.signals import be_patient, told
from qnmixer.training.lightning_private import number_rows, validate_as_in_training
from qnmixer.training.random_states import of_all_ranks, random_state, set_random_state

KEY = "qnmixer_run"


class Keeping(Checkpoint):
    """Keeps checkpoints, and ends training when somebody has told it to.

    Args:
        folder: for the checkpoints.
        monitor: which value is best; a loss is best when lowest.
        every_n_steps: last.ckpt so often, beside those at validations.
        goes_on: a run goes on in the folder that it began in: the best so far is there.
    """

    def __init__(self, folder: Path, monitor: str, every_n_steps: int | None, goes_on: bool) -> None:
        self.folder, self.monitor, self.every_n_steps, self.goes_on = folder, monitor, every_n_steps, goes_on
        self.best: float | None = None
        self.validated = 0  # optimizer steps at the last validation
        self.seconds = 0.0  # that the run had taken when it was gone on with
        self._start = time.monotonic()
        self._saved = 0
        self._ranks = Agreement()
        self._restored: dict[str, Any] = {}
        self._random: dict[str, Any] | None = None  # as it was when the validation at hand began

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Connect the ranks."""
        self._ranks.connect()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Go on exactly as it was, with the validation that was cut short first."""
        be_patient(True)
        self._restore_random(trainer)
        if self._restored.get("validating"):
            validate_as_in_training(trainer)
        self._restored = {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Between two steps: keep what is due, and stop where it was asked for."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        step = trainer.global_step
        number_rows(trainer, step)
        if self.every_n_steps and step % self.every_n_steps == 0 and step > self._saved:
            self.save(trainer, "last")
        if self._ranks.stop(told() is not None):
            self._stop(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember what a validation that is cut short has to begin with again."""
        self._restore_random(trainer)  # of a run that was over but for its last validation
        self._random = random_state(trainer.strategy.root_device)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Stop where it was asked for."""
        if trainer.state.fn == TrainerFn.FITTING and self._ranks.stop(told() is not None):
            self._stop(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the best and the last."""
        self._random = None
        self.validated = trainer.global_step
        if trainer.state.fn == TrainerFn.FITTING:
            self.keep(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the last steps; what follows (a validation, the evaluation) a signal ends at once."""
        if self._saved != trainer.global_step:
            self.save(trainer, "last")
        if self._ranks.stop_now(told() is not None):
            self._stop(trainer)
        be_patient(False)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put in what Lightning does not."""
        checkpoint[KEY] = {
            "monitor": self.monitor,
            "best": self.best,
            "validated": self.validated,
            "validating": self._random is not None,
            "cut": getattr(trainer.strategy, "cut", None),
            "seconds": self.seconds + time.monotonic() - self._start,
            "random": of_all_ranks(self._random or random_state(trainer.strategy.root_device)),
        }

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take it from there."""
        kept = checkpoint[KEY]
        self._restored = dict(kept)
        self.validated, self._saved = kept["validated"], checkpoint["global_step"]
        if isinstance(trainer.strategy, PipelineStrategy):
            trainer.strategy.cut = kept["cut"]
        if self.goes_on:
            self.seconds = kept["seconds"]
            self.best = kept["best"] if kept["monitor"] == self.monitor else None

    def keep(self, trainer: L.Trainer) -> None:
        """Keep weights that have just been validated: as the best where they are, then as the last.

        In this order: last.ckpt is not to know of a best.ckpt that is not there.
        """
        score = float(trainer.callback_metrics[self.monitor])
        sign = -1 if self.monitor == "val/loss" else 1
        if math.isnan(score):
            score = -sign * math.inf
        if trainer.strategy.reduce_boolean_decision(self.best is None or sign * score > sign * self.best):
            self.best = score
            self.save(trainer, "best")
        self.save(trainer, "last")

    def save(self, trainer: L.Trainer, name: str) -> None:
        """Write a checkpoint."""
        trainer.save_checkpoint(self.folder / f"{name}.ckpt")
        if name == "last":
            self._saved = trainer.global_step

    def _restore_random(self, trainer: L.Trainer) -> None:
        states = self._restored.pop("random", [])
        if rank() < len(states):
            set_random_state(states[rank()], trainer.strategy.root_device)

    def _stop(self, trainer: L.Trainer) -> None:
        if self._saved != trainer.global_step or self._random is not None:
            self.save(trainer, "last")
        be_patient(False)
        raise Stopped(told(), together=True)


class Agreement:
    """Whether any rank has been told to stop, known to all of them at the same point; nothing waits for it.

    What is asked at one point is answered at the next, so long has the message of a few bytes between CPUs.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._flag = torch.zeros(1)
        self._work: dist.Work | None = None

    def connect(self) -> None:
        """Make a group of all ranks, if there are others."""
        if dist.is_initialized() and self._group is None:
            self._group = dist.new_group(backend="gloo")

    def stop(self, mine: bool) -> bool:
        """Whether anybody had been told at the last such point."""
        if self._group is None:
            return mine
        if self._answer():
            return True
        self._ask(mine)
        return False

    def stop_now(self, mine: bool) -> bool:
        """Whether anybody has been told by now; all wait for the answer."""
        if self._group is None:
            return mine
        before = self._answer()
        self._ask(mine or before)
        return self._answer()

    def _ask(self, mine: bool) -> None:
        self._flag.fill_(mine)
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _answer(self) -> bool:
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        return bool(self._flag)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoints that are there whole or not at all: a full disk keeps the one before."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write to a temporary file beside path, then rename."""
        path, encoded = Path(path), io.BytesIO()
        torch.save(checkpoint, encoded)
        of_shards = path.is_dir()  # a file cannot take the place of a folder at once
        target = path.with_name(path.name + PART_SUFFIX) if of_shards else path
        if of_shards:
            remove(target)
        with atomic_file(target) as stream:
            stream.write(encoded.getbuffer())
        if of_shards:
            replace(target, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """On the CPU, and never by unpickling code."""
        return load(Path(path))
