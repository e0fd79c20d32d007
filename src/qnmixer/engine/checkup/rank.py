"""One rank of `qnmixer.doctor`. It runs collectives on a tiny network, or a few real training steps, and reports.

Each rank writes its progress into a file. The process that waits reads these files and finds ranks that hang. Imports
for training are late: ranks that only communicate start in a third of the time.
"""

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from qnmixer.engine.cli import explain
from qnmixer.engine.config import Config, parse
from qnmixer.engine.config.run import devices_per_replica, section, with_iterations
from qnmixer.engine.config.sections import MemoryConfig, PipelineConfig
from qnmixer.engine.memory.footprint import MIB
from qnmixer.engine.memory.leaks import LeakWatch
from qnmixer.engine.processes.ranks import die_with_parent, leave, rank
from qnmixer.files import write_text

WINDOWS = 2
"""Optimizer steps of the configured network."""

GROWTH_STEPS = 66
"""Of a small one."""

_MOST_SKIPPED = 10  # by a GradScaler; it starts at 2^16
_MESSAGE = 2**22  # numbers, 16 MiB

Number = tuple[int, float]
"""A global sample number, and the weight of the sample in its batch."""


@dataclass
class Report:
    """The results of one rank's training steps."""

    window: list[tuple[Number, int]] = field(default_factory=list)  # samples of the step whose gradients are stored
    scale: float = 1.0  # of the GradScaler in that step
    shares: dict[str, list[Number]] = field(default_factory=dict)  # of an epoch of train and val
    lengths: dict[str, int] = field(default_factory=dict)
    n_finite: int = 0  # optimizer steps with finite gradients
    n_skipped: int = 0  # optimizer steps without finite gradients
    not_finite: str | None = None  # the first module whose output is not finite
    bad_gradient: str | None = None  # the last parameter whose gradient is not finite
    error: str | None = None
    diverged: bool = False  # the error is a loss that is not finite
    held: tuple[int, int] | None = None  # bytes at the end of an early and of the last step
    leak: tuple[int, int, int] | None = None  # steps, bytes before, bytes after

    def write(self, folder: Path) -> None:
        """Write the report for `read_report`."""
        (folder / f"report_{rank()}.json").write_text(json.dumps(asdict(self)))


def read_report(folder: Path, of: int) -> Report | None:
    """Read the report of a rank, if it wrote one."""
    path = folder / f"report_{of}.json"
    return Report(**json.loads(path.read_text())) if path.exists() else None


class Progress:
    """Writes the progress of this rank into a file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"progress_{rank()}.json"
        self.count = 0
        self("starting")

    def __call__(self, doing: str) -> None:
        """Start a new phase."""
        self.count += 1
        write_text(self.path, json.dumps([self.count, doing, os.getpid()]))


def communicate(accelerator: str, folder: Path, patience: float) -> None:
    """Sum numbers over all ranks, train a linear layer with ddp, and write this rank's results."""
    progress = Progress(folder)
    device = torch.device("cpu")
    if accelerator == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    progress("joining the process group")
    # Longer than the patience of the watching process, which can name the rank that hangs. A collective cannot.
    timeout = timedelta(seconds=2 * patience + 30)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)

    progress("all-reduce")
    message = torch.full((_MESSAGE,), float(rank() + 1), device=device)
    dist.all_reduce(message)
    total = [float(message.min()), float(message.max())]
    start = time.perf_counter()
    for _ in range(3):
        dist.all_reduce(message)
    message[0].item()  # waits for a GPU
    seconds = (time.perf_counter() - start) / 3

    progress("training a linear layer")
    # Different weights on each rank: they become equal only if ddp really broadcasts them.
    torch.manual_seed(rank())
    layer = nn.parallel.DistributedDataParallel(nn.Linear(4, 1).to(device))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(8, 4, device=device)).square().mean().backward()
        optimizer.step()
    weights = [float(value) for p in layer.parameters() for value in p.detach().flatten()]
    found = {"total": total, "seconds": seconds, "weights": weights}
    (folder / f"communication_{rank()}.json").write_text(json.dumps(found))
    progress("leaving")
    dist.destroy_process_group()


def train_a_little(config: Config, folder: Path) -> None:
    """Run a few steps of a config as training runs them, then many steps of a small network. Write a report of both.

    Also writes gradients_RANK.pt: the gradients before clipping, by parameter, of the first step that was not skipped.
    `config` must come from `resolve_devices`. Raises the errors of training, after it wrote the report.
    """
    from lightning.pytorch.callbacks import LambdaCallback

    from qnmixer.engine.build import build_data_module
    from qnmixer.engine.tracking.loggers import build_loggers
    from qnmixer.engine.training.callbacks import build_callbacks
    from qnmixer.engine.training.trainer import build_trainer

    progress, report = Progress(folder), Report()
    steps, growth = StepProbe(report, progress, folder), GrowthProbe(report, progress)
    try:
        for run, callback in (
            (
                _short(config, WINDOWS + _MOST_SKIPPED),
                LambdaCallback(
                    on_train_start=steps.start,
                    on_train_batch_start=steps.before_batch,
                    on_before_optimizer_step=steps.before_step,
                    on_train_batch_end=steps.after_batch,
                ),
            ),
            (_short(small_network(config), GROWTH_STEPS), LambdaCallback(on_train_batch_end=growth.after_batch)),
        ):
            module = untrained(run)
            callbacks = [callback, *build_callbacks(run.callbacks, run.metrics)]
            trainer = build_trainer(run, folder, callbacks, build_loggers(run, folder, []))
            data = build_data_module(run)
            trainer.fit(module, datamodule=data)
        progress("leaving")
    except Exception as error:
        report.error, report.diverged = _line(error), isinstance(error, FloatingPointError)
        raise
    finally:
        report.write(folder)


class StepProbe:
    """Stores the samples and gradients of one step, the samples of an epoch on this rank, and what is not finite."""

    def __init__(self, report: Report, progress: Progress, folder: Path) -> None:
        self.report, self.progress, self.folder = report, progress, folder
        self._window: list[tuple[Number, int]] = []

    def start(self, trainer: Any, module: Any) -> None:
        """Count the samples of an epoch without loading them, and watch the outputs of all modules."""
        for part, loader in (("train", trainer.train_dataloader), ("val", trainer.datamodule.val_dataloader())):
            # The samplers' numbers are enough: loading an epoch of CT would take minutes.
            self.report.shares[part] = [(pick.n, pick.weight) for batch in loader.batch_sampler for pick in batch]
            self.report.lengths[part] = len(loader.dataset)
        for name, child in module.network.named_modules():
            child.register_forward_hook(partial(self._look_at, f"{name or 'network'} ({type(child).__name__})"))

    def before_batch(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Store its samples, each with the number of samples in its batch."""
        self.progress("steps of the network")
        numbers = zip(batch["sample"].tolist(), batch["weight"].tolist(), strict=True)
        self._window += [(number, len(batch["weight"])) for number in numbers]

    def before_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Store the gradients, if they are the first finite ones."""
        from qnmixer.engine.parallel.shards import gather

        named = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
        # For fsdp this is a collective, so every rank must get here, also one that needs no gradients.
        gradients = {name: gather(gradient) for name, gradient in named}
        bad = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
        if bad:
            self.report.n_skipped += 1
            self.report.bad_gradient = bad[0]
        else:
            self.report.n_finite += 1
            if self.report.n_finite == 1:
                scaler = getattr(trainer.precision_plugin, "scaler", None)
                self.report.scale = 1.0 if scaler is None else scaler.get_scale()
                self.report.window = self._window
                kept = {name: gradient.detach().cpu().clone() for name, gradient in gradients.items()}
                torch.save(kept, self.folder / f"gradients_{rank()}.pt")
        self._window = []

    def after_batch(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop all ranks at the same step: when there are enough steps, or when the GradScaler cannot help."""
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        enough = self.report.n_finite >= WINDOWS or (self.report.n_skipped > 0 and not scaled)
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(enough, all=False)

    def _look_at(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.report.not_finite is None and not all(
            bool(torch.isfinite(leaf).all()) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)
        ):
            self.report.not_finite = name


def short_leak_watch() -> LeakWatch:
    """A leak detector for `GROWTH_STEPS` steps.

    The limits were measured on the CPU over 40 steps. Losses that are stored with their graphs add 4.8 MiB or more. The
    backward pass has freed the tensors of these graphs by then. Healthy runs add 0.6 MiB at most.
    """
    return LeakWatch(warm_up=16, window=10, n_windows=3, floor=2 * MIB, evenness=0.2)


class GrowthProbe:
    """Stores the memory at the end of each step."""

    def __init__(self, report: Report, progress: Progress) -> None:
        self.report, self.progress = report, progress
        self._watch, self._held = short_leak_watch(), list[int]()

    def after_batch(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add one step."""
        from qnmixer.engine.memory.usage import read_usage

        self.progress("steps of a small network")
        if len(self._held) % self._watch.window == 0:
            gc.collect()  # over so few steps garbage in cycles would hide a leak
        self._held.append(read_usage(module.device).allocated)
        if leak := self._watch.update(self._held[-1]):
            self.report.leak = astuple(leak)
        if len(self._held) == GROWTH_STEPS:
            self.report.held = (self._held[self._watch.warm_up], self._held[-1])


def reference_gradients(config: Config, window: list[tuple[Number, int]], scale: float) -> dict[str, Tensor]:
    """The gradient of one optimizer step over these samples, by parameter, in one process and one sample at a time.

    Args:
        config: of the run with all its devices.
        window: the samples of all devices, each with the number of samples in its batch.
        scale: of the GradScaler, because half precision rounds differently without it.
    """
    from torch.utils.data import default_collate

    from qnmixer.engine.build import build_data_module
    from qnmixer.engine.data.sampler import Pick
    from qnmixer.engine.parallel.devices import allow_tf32
    from qnmixer.engine.parallel.strategies import build_precision

    device = torch.device(config.trainer.accelerator)
    # One device has no room for the graph that a pipeline spreads over several. The gradients are bit-identical.
    memory: MemoryConfig = MemoryConfig(name="recompute") if device.type == "cuda" else config.memory
    module = untrained(replace(config, memory=memory)).to(device)
    data = build_data_module(config)
    dataset = data.dataset("train")
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
    import lightning as L

    from qnmixer.engine.build import build_module
    from qnmixer.engine.memory.modes import apply_memory_mode

    L.seed_everything(config.seed, workers=True, verbose=False)
    module = build_module(config)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.02 * torch.randn_like(p))
    apply_memory_mode(module.network, config.memory)
    return module


def small_network(config: Config) -> Config:
    """The same run with a small network, scan and phantoms: many of its steps take seconds."""
    geometry, unit = config.geometry, math.lcm(*config.model.divisors().values())
    T, batch = 2, 1
    strategy = config.strategy
    if isinstance(strategy, PipelineConfig):
        T, batch = devices_per_replica(config) * strategy.stages_per_device, strategy.microbatch_size
        strategy = replace(strategy, cut=None)
    bins = 64
    of_data = {key: getattr(config.data, key) for key in ("scaling", "hu_max", "seed")}
    of_data |= {"image_size": unit * math.ceil(48 / unit), "batch_size": batch, "num_workers": 0}
    return replace(
        with_iterations(replace(config, model=config.model.smallest()), T),
        strategy=strategy,
        geometry=replace(
            geometry,
            n_views=8,
            n_detectors=bins,
            detector_pitch=geometry.detector_pitch * geometry.n_detectors / bins,
            detector_offset=geometry.detector_offset * bins / geometry.n_detectors,
        ),
        data=section("data", "phantoms", **of_data),
        trainer=replace(config.trainer, accumulate_grad_batches=1),
    )


def _short(config: Config, n_steps: int) -> Config:
    """A run of the given number of optimizer steps, without validation and logger."""
    trainer = replace(
        config.trainer, max_steps=n_steps, max_epochs=None, val_every_n_steps=None, limit_val_batches=0,
        log_every_n_steps=n_steps,
    )  # fmt: skip
    return replace(config, trainer=trainer, logger={}, finetune=None, resume=None)


def _line(error: BaseException) -> str:
    """An error as one line: its own message if the user can fix it, else with its type."""
    text = explain(error, "doctor") or f"{type(error).__name__}: {error}"
    return text.strip().splitlines()[0]


def main(path: Path) -> None:
    """Run as one rank of the job in this file."""
    die_with_parent()
    job = json.loads(path.read_text())
    folder = Path(job["folder"])
    log = os.open(folder / f"log_{rank()}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):  # keep warnings of libraries out of the checklist
        os.dup2(log, stream)
    work: Callable[[], None] = partial(communicate, job["accelerator"], folder, job["patience"])
    if job["config"] is not None:
        work = partial(train_a_little, parse(job["config"]), folder)
    try:
        work()
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        leave(error, _line(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
