"""The ranks of `qnmixer.doctor`: each talks to the others, trains a few real steps, and writes a report.

Each rank also notes what it is doing. The process that waits reads these notes and names ranks that hang.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import default_collate

from qnmixer.engine.build import build_data_module, build_module
from qnmixer.engine.cli import explain
from qnmixer.engine.config.run import Config, devices_per_replica, parse, to_plain
from qnmixer.engine.config.sections import MemoryConfig
from qnmixer.engine.data.dataset import Pick
from qnmixer.engine.memory.modes import apply_memory_mode
from qnmixer.engine.parallel.devices import allow_tf32
from qnmixer.engine.parallel.shards import gather
from qnmixer.engine.parallel.strategies import build_precision
from qnmixer.engine.processes.launch import launch
from qnmixer.engine.processes.process import die_with_parent, leave, rank
from qnmixer.engine.tracking.loggers import build_loggers
from qnmixer.engine.training.callbacks import build_callbacks
from qnmixer.engine.training.steps import build_trainer
from qnmixer.errors import RankFailed
from qnmixer.files import atomic_file

STEPS = 6
"""Optimizer steps with finite gradients."""

_MOST_SKIPPED = 10  # by a GradScaler; it starts at 2^16
_MESSAGE = 2**22  # numbers, 16 MiB

Number = tuple[int, float]
"""A global sample number, and the weight of the sample in its batch."""


@dataclass
class Report:
    """What one rank found."""

    total: tuple[float, float] | None = None  # smallest and largest number of a sum over the ranks
    seconds: float = 0.0  # of an all-reduce of 16 MiB
    weights: list[float] = field(default_factory=list)  # of a linear layer that ddp trained
    shares: dict[str, list[Number]] = field(default_factory=dict)  # samples of an epoch of train and val
    lengths: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # before clipping, of the first step that is not skipped
    window: list[tuple[Number, int]] = field(default_factory=list)  # samples of that step, each with its batch's size
    scale: float = 1.0  # of the GradScaler in that step
    n_finite: int = 0  # optimizer steps with finite gradients
    n_skipped: int = 0  # optimizer steps without finite gradients
    bad_gradient: str | None = None  # the last parameter whose gradient is not finite
    diverged: str | None = None  # the error of a loss that is not finite
    held: list[tuple[int, int]] = field(default_factory=list)  # after each step: tensors with a graph, and bytes

    def write(self, folder: Path) -> None:
        """Write the report for `read_report`."""
        with atomic_file(folder / f"report_{rank()}.pt") as stream:  # another rank's death may end this one here
            torch.save(vars(self), stream)


def read_report(folder: Path, of: int) -> Report:
    """The report of a rank; an empty one if it wrote none."""
    path = folder / f"report_{of}.pt"
    return Report(**torch.load(path, weights_only=True)) if path.exists() else Report()


def named_ranks(numbers: list[int]) -> str:
    """A text such as "ranks 0, 2"."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def run_ranks(config: Config, folder: Path, n: int, patience: float) -> None:
    """Run `examine` on n ranks. Each writes its report into the folder.

    Raises RankFailed, which names the rank, if a rank fails. The same if no rank makes progress for `patience` seconds:
    then the ranks that are furthest behind hang. All ranks are stopped.
    """
    path, ended = folder / "job.json", threading.Event()
    path.write_text(
        json.dumps({"config": to_plain(config), "folder": str(folder), "patience": patience}), encoding="utf-8"
    )
    stuck: list[str] = []

    def watch() -> None:
        last, since = _notes(folder, n), time.monotonic()
        while not ended.wait(0.5):
            if (now := _notes(folder, n)) != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > patience:
                behind = [rank for rank, notes in enumerate(now) if len(notes) == min(map(len, now))]
                stuck.append(f"{named_ranks(behind)}: no progress for {patience:.0f} s in {now[behind[0]][-1]}")
                os.kill(os.getpid(), signal.SIGINT)  # makes `launch` stop the ranks
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        launch(["-m", "qnmixer.engine.checkup.rank", str(path)], n)
    except (RankFailed, KeyboardInterrupt) as error:
        if stuck:
            raise RankFailed(stuck[0]) from error
        raise
    finally:
        ended.set()
        watcher.join()


def _note(folder: Path, doing: str) -> None:
    """Note that this rank makes progress."""
    with (folder / f"notes_{rank()}.txt").open("a", encoding="utf-8") as stream:
        stream.write(f"{doing}\n")


def _notes(folder: Path, n: int) -> list[list[str]]:
    """What each rank has noted, the first line for its start."""
    found = [["starting Python"] for _ in range(n)]
    for number, notes in enumerate(found):
        with suppress(FileNotFoundError):
            notes += (folder / f"notes_{number}.txt").read_text(encoding="utf-8").splitlines()
    return found


def examine(config: Config, folder: Path, patience: float) -> None:
    """Talk to the other ranks, if there are any, then train a few steps, and write a report.

    `config` must come from `resolve_devices`. Raises the errors of training, after it wrote the report.
    """
    report = Report()
    try:
        if (config.trainer.devices or 1) > 1:
            communicate(report, config.trainer.accelerator, folder, patience)
            report.write(folder)
        train_a_little(report, config, folder)
        _note(folder, "leaving")
    except FloatingPointError as error:
        report.diverged = _line(error)
        raise
    finally:
        report.write(folder)


def communicate(report: Report, accelerator: str, folder: Path, patience: float) -> None:
    """Sum numbers over all ranks, and train a linear layer with ddp. The process group stays, for training."""
    device = torch.device("cpu")
    if accelerator == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    _note(folder, "joining the process group")
    # Longer than the patience of the watching process, which can name the rank that hangs. A collective cannot.
    timeout = timedelta(seconds=2 * patience + 30)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)

    _note(folder, "all-reduce")
    message = torch.full((_MESSAGE,), float(rank() + 1), device=device)
    dist.all_reduce(message)
    total = float(message.min()), float(message.max())
    start = time.perf_counter()
    dist.all_reduce(message)
    message[0].item()  # waits for a GPU
    report.seconds = time.perf_counter() - start

    _note(folder, "training a linear layer")
    # Different weights on each rank: they become equal only if ddp really broadcasts them.
    torch.manual_seed(rank())
    layer = nn.parallel.DistributedDataParallel(nn.Linear(4, 1).to(device))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(8, 4, device=device)).square().mean().backward()
        optimizer.step()
    report.weights = [float(value) for p in layer.parameters() for value in p.detach().flatten()]
    report.total = total


def train_a_little(report: Report, config: Config, folder: Path) -> None:
    """Run a few steps of a config as training runs them."""
    n_steps = STEPS + _MOST_SKIPPED
    trainer_config = replace(
        config.trainer, max_steps=n_steps, max_epochs=None, val_every_n_steps=None, limit_val_batches=0,
        log_every_n_steps=n_steps,
    )  # fmt: skip
    run = replace(config, trainer=trainer_config, logger={}, finetune=None, resume=None)
    _note(folder, "building the network")
    module, callbacks = untrained(run), [Probe(report, folder), *build_callbacks(run.callbacks, run.metrics)]
    trainer = build_trainer(run, folder, callbacks, build_loggers(run, folder, []))
    data = build_data_module(run)
    _note(folder, "starting to train")
    trainer.fit(module, datamodule=data)


class Probe(Callback):
    """Stores the samples and gradients of one step, the samples of an epoch on this rank, and what memory holds."""

    def __init__(self, report: Report, folder: Path) -> None:
        self.report, self.folder = report, folder
        self._window: list[tuple[Number, int]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count the samples of an epoch without loading them."""
        for part, loader in (("train", trainer.train_dataloader), ("val", trainer.datamodule.val_dataloader())):
            # The samplers' numbers are enough: loading an epoch of CT would take minutes.
            self.report.shares[part] = [(pick.n, pick.weight) for batch in loader.batch_sampler for pick in batch]
            self.report.lengths[part] = len(loader.dataset)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Store its samples, each with the number of samples in its batch."""
        _note(self.folder, "steps of the network")
        numbers = zip(batch["sample"].tolist(), batch["weight"].tolist(), strict=True)
        self._window += [(number, len(batch["weight"])) for number in numbers]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Store the gradients, if they are the first finite ones."""
        report, named = self.report, [(name, p.grad) for name, p in pl_module.named_parameters() if p.grad is not None]
        # For fsdp this is a collective, so every rank must get here, also one that needs no gradients.
        gradients = {name: gather(gradient) for name, gradient in named}
        if bad := [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]:
            report.n_skipped += 1
            report.bad_gradient = bad[0]
        else:
            report.n_finite += 1
            if report.n_finite == 1:
                scaler = getattr(trainer.precision_plugin, "scaler", None)
                report.scale = 1.0 if scaler is None else scaler.get_scale()
                report.window = self._window
                report.gradients = {name: gradient.detach().cpu().clone() for name, gradient in gradients.items()}
        self._window = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop all ranks at the same step: when there are enough steps, or when the GradScaler cannot help."""
        if not self._window:  # the end of an optimizer step
            self.report.held.append(held(pl_module.device))
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        enough = self.report.n_finite >= STEPS or (self.report.n_skipped > 0 and not scaled)
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(enough, all=False)


def held(device: torch.device) -> tuple[int, int]:
    """The tensors that hold a graph, and the bytes in all tensors. Both are exact, unlike the memory of a process."""
    gc.collect()  # garbage in cycles would look like a leak
    tensors = [it for it in gc.get_objects() if issubclass(type(it), Tensor) and it.layout is torch.strided]
    n_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else sum(it.nbytes for it in tensors)
    return sum(it.grad_fn is not None for it in tensors), n_bytes


def reference_gradients(config: Config, window: list[tuple[Number, int]], scale: float) -> dict[str, Tensor]:
    """The gradient of one optimizer step over these samples, by parameter, in one process and one sample at a time.

    Args:
        config: of the run with all its devices.
        window: the samples of all devices, each with the number of samples in its batch.
        scale: of the GradScaler, because half precision rounds differently without it.
    """
    device = torch.device(config.trainer.accelerator)
    # One device has no room for the graph that a pipeline spreads over several. The gradients are bit-identical.
    memory: MemoryConfig = MemoryConfig(name="recompute") if device.type == "cuda" else config.memory
    module = untrained(replace(config, memory=memory)).to(device)
    dataset = build_data_module(config).dataset("train")
    autocast = build_precision(config, config.trainer.accelerator).forward_context
    n_batches = (config.trainer.devices or 1) // devices_per_replica(config) * config.trainer.accumulate_grad_batches
    allow_tf32(config.trainer.tf32)
    for number, together in window:
        batch: Any = default_collate([dataset[Pick(*number)]])
        batch |= {key: value.to(device) for key, value in batch.items() if isinstance(value, Tensor)}
        with autocast():
            loss = module.training_step(batch, 0)
        (loss * (scale / n_batches / together)).backward()  # the loss of a batch is a mean over its samples
    return {n: p.grad.cpu() / scale for n, p in module.named_parameters() if p.grad is not None}


def untrained(config: Config) -> Any:
    """The LightningModule of a config, the same in every process.

    Its weights are moved off their initial values, because there G is zero and passes no gradient back.
    """
    L.seed_everything(config.seed, workers=True, verbose=False)
    module = build_module(config)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.02 * torch.randn_like(p))
    apply_memory_mode(module.network, config.memory)
    return module


def _line(error: BaseException) -> str:
    """An error as one line: its own message if the user can fix it, else with its type."""
    text = explain(error, "doctor") or f"{type(error).__name__}: {error}"
    return text.strip().splitlines()[0]


def main(path: Path) -> None:
    """Run as one rank of the job in this file."""
    die_with_parent()
    job = json.loads(path.read_text(encoding="utf-8"))
    folder = Path(job["folder"])
    log = os.open(folder / f"log_{rank()}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):  # keep warnings of libraries out of the checklist
        os.dup2(log, stream)
    _note(folder, "starting")
    try:
        examine(parse(job["config"]), folder, job["patience"])
        if dist.is_initialized():
            dist.destroy_process_group()
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        leave(error, _line(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
