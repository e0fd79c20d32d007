"""The ranks of `qnmixer.doctor`: each talks to the others, trains a few real steps, and writes a report."""

import faulthandler
import gc
import os
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor, nn

from qnmixer.data.dataset import EpochSampler
from qnmixer.errors import RankFailed
from qnmixer.files import atomic_file
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.module.build import build_data_module, build_module
from qnmixer.parallel.gather import gather
from qnmixer.runs.loggers import build_loggers
from qnmixer.runs.processes.process import is_rank, rank, world_size
from qnmixer.runs.run import Run
from qnmixer.settings.run import Config
from qnmixer.training.callbacks import build_callbacks
from qnmixer.training.steps import build_trainer
from qnmixer.training.worker import launch_ranks

STEPS = 6
"""Optimizer steps."""

PATIENCE = 180
"""A rank that makes no progress for so many seconds hangs."""

# Of the loss in half precision. Training starts at 2^16, where more first steps would be skipped.
_SCALE = 2.0**12
_MESSAGE = 2**22  # numbers, 16 MiB
_NOTE = "doctor: "  # begins the line of a note in a rank's log


@dataclass
class Report:
    """What one rank found."""

    talks: bool = False  # with the other ranks
    shares: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # samples of train and val, with weights
    lengths: dict[str, int] = field(default_factory=dict)  # slices of train and val
    gradients: dict[str, Tensor] = field(default_factory=dict)  # before clipping, of the first step, if it is finite
    in_float64: dict[str, Tensor] = field(default_factory=dict)  # the same, where the device and the network can
    not_finite: str | None = None  # a gradient or loss that is not finite
    manual: bool = False  # the module optimizes by itself
    held: list[tuple[int, int]] = field(default_factory=list)  # after each step: tensors with a graph, and bytes

    def write(self, folder: Path) -> None:
        """Write the report for `read_report`."""
        with atomic_file(folder / f"report_{rank()}.pt") as stream:  # another rank's death may end this one here
            torch.save(vars(self), stream)


def read_report(folder: Path, number: int) -> Report:
    """The report of a rank; an empty one if it wrote none."""
    path = folder / f"report_{number}.pt"
    return Report(**torch.load(path, weights_only=True)) if path.exists() else Report()


def run_ranks(config: Config, folder: Path, n: int) -> None:
    """Run `examine` on n ranks, as training runs `fit`. Each writes its report into the folder.

    Raises RankFailed, which names the rank, if a rank fails or hangs. All ranks are stopped then.
    """
    examining = config.changed(fit=f"{__name__}.{examine.__name__}")
    try:
        launch_ranks(examining, Run(folder), folder, n, ask_to_stop=lambda: False)
    except RankFailed as error:
        for log in sorted(folder.glob("log_*.txt")):
            output, hangs, _ = log.read_text(encoding="utf-8", errors="replace").partition("Timeout (")
            if hangs:
                number, doing = log.stem.removeprefix("log_"), output.rpartition(_NOTE)[2].splitlines()[0]
                raise RankFailed(f"rank {number}: no progress for {PATIENCE} s in {doing}") from error
        raise


def note(doing: str) -> None:
    """Note in the log of a rank what it does from now on. If no other note follows in time, the rank ends."""
    if is_rank():
        print(f"{_NOTE}{doing}", flush=True)
        faulthandler.dump_traceback_later(PATIENCE, exit=True)


def examine(config: Config, run: Run) -> float:
    """Talk to the other ranks, if there are any, then train a few steps, and write a report into the run folder.

    `config` must come from `resolve_devices`. Raises the errors of training, after it wrote the report.
    """
    report = Report()
    if is_rank():  # keep warnings of libraries out of the checklist
        log = os.open(run.folder / f"log_{rank()}.txt", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
    try:
        if world_size() > 1:
            communicate(config.trainer.accelerator)
            report.talks = True
            report.write(run.folder)  # a rank may be killed later
        train_a_little(report, config, run.folder, STEPS)
        if config.trainer.precision == "32" and _has_room_for_float64(config.trainer.accelerator):
            exact = Report()
            with suppress(Exception):  # code of a user may need float32, in which the same step has passed
                train_a_little(exact, config, run.folder, n_steps=1, in_float64=True)
                report.in_float64 = exact.gradients
        if dist.is_initialized():
            note("leaving")
            dist.destroy_process_group()
    finally:
        faulthandler.cancel_dump_traceback_later()
        report.write(run.folder)
    return 0.0


def communicate(accelerator: str) -> None:
    """Sum numbers over all ranks, and train a linear layer with ddp. The process group stays, for training.

    Raises RankFailed for a wrong result.
    """
    device = torch.device("cpu")
    if accelerator == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    note("joining the process group")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=30))

    note("all-reduce")
    message = torch.full((_MESSAGE,), float(rank() + 1), device=device)
    dist.all_reduce(message)
    expected = world_size() * (world_size() + 1) / 2
    if not (message == expected).all():
        raise RankFailed(f"a wrong all-reduce, {float(message.min())} to {float(message.max())} instead of {expected}")

    note("training a linear layer")
    # Different weights on each rank: they become equal only if ddp really broadcasts them.
    torch.manual_seed(rank())
    layer = nn.parallel.DistributedDataParallel(nn.Linear(4, 1).to(device))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(8, 4, device=device)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in layer.parameters()])
    of_rank_0 = weights.clone()
    dist.broadcast(of_rank_0, 0)
    if not torch.equal(weights, of_rank_0):
        raise RankFailed("weights differ from rank 0 after three steps of ddp")


def _has_room_for_float64(accelerator: str) -> bool:
    """Whether every rank's device has twice the memory that its steps took."""
    if accelerator != "cuda":
        return True
    has_room = 2 * torch.cuda.max_memory_allocated() < torch.cuda.mem_get_info()[1]
    answer = torch.tensor(has_room, dtype=torch.int32, device="cuda")
    if dist.is_initialized():
        dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer)


def train_a_little(report: Report, config: Config, folder: Path, n_steps: int, in_float64: bool = False) -> None:
    """Run a few steps of a config as training runs them. Raises its errors."""
    steps = {"max_steps": n_steps, "max_epochs": None, "log_every_n_steps": n_steps}
    no_validation = {"val_every_n_steps": None, "limit_val_batches": 0}  # not checked: no run of a user is without one
    trainer_config = config.trainer.model_copy(update=steps | no_validation)
    run = config.changed(trainer=trainer_config, logger={}, finetune=None, resume=None)
    note("building the network")
    module, callbacks = untrained(run), [Probe(report), *build_callbacks(run.callbacks, run.metrics)]
    trainer = build_trainer(run, folder, callbacks, build_loggers(run, folder, []))
    if in_float64:
        trainer.strategy.precision_plugin = DoublePrecision()
    data = build_data_module(run)
    report.manual = not module.automatic_optimization
    note("starting to train")
    try:
        trainer.fit(module, datamodule=data)
    except FloatingPointError as error:
        report.not_finite = report.not_finite or str(error)
        raise


class Probe(Callback):
    """Stores the gradients of the first step, the samples of an epoch on this rank, and what memory holds."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count the samples of an epoch without loading them."""
        for part, loader in (("train", trainer.train_dataloader), ("val", trainer.datamodule.val_dataloader())):
            if not isinstance(getattr(loader, "sampler", None), EpochSampler):  # of a user
                continue
            # The samplers' numbers are enough: loading an epoch of CT would take minutes.
            self.report.shares[part] = [(pick.n, pick.weight) for batch in loader.batch_sampler for pick in batch]
            self.report.lengths[part] = len(loader.dataset)
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            scaler.load_state_dict(scaler.state_dict() | {"scale": _SCALE})

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the progress."""
        note("steps of the network")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Store the gradients of the first step, and look for a gradient that is not finite."""
        report, parameter_ids = self.report, {id(p) for group in optimizer.param_groups for p in group["params"]}
        # Of each optimizer in its turn: another one's may be left from a backward pass before.
        named = [(name, p.grad) for name, p in pl_module.named_parameters() if id(p) in parameter_ids]
        # For fsdp this is a collective, so every rank must get here, also one that needs no gradients.
        gradients = {name: gather(gradient) for name, gradient in named if gradient is not None}
        bad_names = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
        step, scaled = len(report.held) + 1, getattr(trainer.precision_plugin, "scaler", None) is not None
        if bad_names and not (scaled and step < STEPS):  # a GradScaler may skip the first steps, but not the last
            report.not_finite = f"the gradient of {bad_names[0]} is not finite in step {step}"
        if step == 1 and not bad_names:
            report.gradients |= {name: gradient.detach().cpu().clone() for name, gradient in gradients.items()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the tensors at the end of an optimizer step."""
        if trainer.global_step > len(self.report.held):
            self.report.held.append(held(pl_module.device))


def held(device: torch.device) -> tuple[int, int]:
    """The tensors that hold a graph, and the bytes in all tensors. Both are exact, unlike the memory of a process."""
    gc.collect()  # garbage in cycles would look like a leak
    # isinstance would ask each object for its __class__, which a dead weak proxy answers with an error.
    tensors = [value for value in gc.get_objects() if issubclass(type(value), Tensor) and value.layout is torch.strided]
    n_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else sum(tensor.nbytes for tensor in tensors)
    return sum(tensor.grad_fn is not None for tensor in tensors), n_bytes


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
