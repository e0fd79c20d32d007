"""Rehearse training steps on fake CUDA tensors: shapes and devices are CUDA's, there is no data, no driver, no GPU.

    python -m tests.cuda.rehearsal JOBS.json   # a list of lists of overrides; prints a line of JSON for each

Lightning's Trainer runs two steps of the config's network, memory mode, precision and noise, by the project's own
module. In the last it counts, from the transfer of its batch: waits of the host for the device, float64 and foreign
devices, peak bytes against the plan. It works with torch's CPU build and g++.

It does not see cuDNN's workspaces, time, or what values decide.
"""

import copy
import json
import logging
import sys
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qnmixer.engine.build import build_module
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import Config, override, parse
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.dataset import EpochSampler
from qnmixer.engine.memory.modes import apply_memory_mode
from qnmixer.engine.memory.plan import Planner
from qnmixer.engine.parallel.strategies import build_precision
from qnmixer.engine.reconstructor import sample_measurement
from qnmixer.engine.training.callbacks import build_callbacks
from qnmixer.module import ReconstructionModule
from qnmixer.physics import FanBeamProjector

from .fake_device import CUDA0, FakeAccelerator, FakeDevice, pretend_cuda

_SILENT = ("detach", "alias", "lift_fresh", "_unsafe_view", "is_pinned", "pin_memory", "_pin_memory")
_WAITING = ("nonzero", "masked_select", "unique_dim", "_unique2", "equal")  # their shapes are read from the device
_PLANNERS: dict[str, Planner] = {}


@dataclass
class Rehearsal:
    """What the last step of a config took."""

    waits: dict[str, int]  # of the host for the device, by operator
    float64: dict[str, int]
    foreign: dict[str, int]  # operators with tensors of the host, or state that is not on the device
    peak: int  # bytes
    planned: float


class Watch(TorchDispatchMode):
    """Counts waits, float64, foreign devices, and bytes alive on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.in_step = True
        self._alive: dict[int, Any] = {}
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self.peak = self.bytes
        self.waits: Counter[str] = Counter()
        self.float64: Counter[str] = Counter()
        self.foreign: Counter[str] = Counter()

    def hold(self, tensor: Tensor) -> None:
        """Count the bytes of a tensor for as long as its storage lives; CUDA's allocator rounds them up to 512."""
        storage = tensor.untyped_storage()
        if tensor.device.type == "cuda" and (key := storage._cdata) not in self._alive:
            size = storage.nbytes()
            self._alive[key] = weakref.finalize(storage, self._free, key, size)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def _free(self, key: int, size: int) -> None:
        del self._alive[key]
        self.bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        taken = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = str(func.overloadpacket).replace("aten.", "")
        if name == "_local_scalar_dense":
            is_bool, on_device = taken[0].dtype == torch.bool, taken[0].device.type == "cuda"
            if on_device:
                self._wait(f".item() in {_caller()}")
            if on_device or (is_bool and isinstance(taken[0], FakeTensor)):
                return True if is_bool else 0.0  # is finite; no infinity was found
        result = func(*args, **kwargs)
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for t in made:
            self.hold(t)
        devices = {t.device.type for t in taken + made}
        if not self.in_step or func.is_view or func.namespace == "prim" or name in _SILENT or "cuda" not in devices:
            return result
        if name.removeprefix("new_").startswith("empty"):
            return result
        if "cpu" in devices and name in ("_to_copy", "copy_"):
            if not kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2]):
                self._wait(f"{name} in {_caller()}")
        elif any(t.ndim for t in taken + made if t.device.type == "cpu"):
            self.foreign[f"{name} in {_caller()}"] += 1
        elif name in _WAITING:
            self._wait(f"{name} in {_caller()}")
        if any(t.dtype == torch.float64 and t.device.type == "cuda" for t in made):
            self.float64[f"{name} in {_caller()}"] += 1
        return result

    def _wait(self, what: str) -> None:
        if self.in_step:
            self.waits[what] += 1


def _caller() -> str:
    """The innermost file of qnmixer, or of torch's GradScaler, that asks for an operator."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/qnmixer/" in file or file.endswith("torch/amp/grad_scaler.py"):
            return file.rpartition("/qnmixer/")[2]
        frame = frame.f_back
    return "autograd"


class _LastStep(L.Callback):
    """Lets the watch count the last step only."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 < trainer.max_steps:
            self.watch.restart()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.watch.in_step = False


def rehearse(overrides: list[str]) -> Rehearsal:
    """Two steps of a config; the second, as it was counted."""
    config = _config(*overrides)
    key = repr((config.geometry, config.data.image_size))
    planner = _PLANNERS.setdefault(key, _PLANNERS.get(key) or Planner(config))  # with norms, which need real numbers
    planned = planner.estimate(config).peak
    mode, watch = FakeTensorMode(allow_non_fake_inputs=True), Watch()
    data = _data(config, 2)  # real tensors: the host reads numbers of samples
    projector = copy.deepcopy(planner.projector)
    with mode:
        module = _module(config, mode, projector)
        for tensor in [*module.parameters(), *module.buffers()]:
            watch.hold(tensor)
    t = config.trainer
    callbacks = [*build_callbacks(config.callbacks), _LastStep(watch)]
    with mode, watch:
        trainer = L.Trainer(
            strategy=FakeDevice(CUDA0, FakeAccelerator()), plugins=[build_precision(config, "cuda")], max_steps=2,
            gradient_clip_val=t.gradient_clip_val, log_every_n_steps=t.log_every_n_steps, callbacks=callbacks,
            limit_val_batches=0, logger=DummyLogger(), enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(module, datamodule=data)
    state = [value for of in trainer.optimizers[0].state.values() for value in of.values()]
    state += [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters() if p.grad is not None)]
    if elsewhere := sum(x.device != CUDA0 for x in state if x.ndim):  # optimizers count their steps on the host
        watch.foreign["weights, gradients or optimizer state"] = elsewhere
    return Rehearsal(
        dict(watch.waits),
        dict(watch.float64),
        dict(watch.foreign),
        watch.peak,
        planned,
    )


@cache
def _composed(*overrides: str) -> Config:
    return parse(compose("train", [*overrides]))


def _config(*overrides: str) -> Config:
    """The config of a command line. Memory modes and precisions share a composition, which takes as long as a step."""
    last = [word for word in overrides if word.startswith(("memory=", "trainer.precision="))]
    return override(_composed(*(word for word in overrides if word not in last)), last)


def _module(config: Config, mode: FakeTensorMode, projector: FanBeamProjector) -> ReconstructionModule:
    """The module of a config, made on the device."""
    for part in projector.modules():
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = mode.from_tensor(value).to(CUDA0)
    with CUDA0:
        module = build_module(config, projector)
    apply_memory_mode(module.network, config.memory)
    return module


def _data(config: Config, n_batches: int) -> SliceDataModule:
    """Batches like those of the loader, in host memory."""
    b, size, fine = config.data.batch_size, config.data.image_size, config.data.simulation_factor
    batch = {"image": torch.rand(b, 1, size, size), "hu_offset": torch.zeros(b), "hu_scale": torch.ones(b)}
    batch |= {"fine": torch.rand(b, 1, fine * size, fine * size)} if fine > 1 else {}
    if (measure := sample_measurement(config)) is not None:
        samples = [{"sample": k} | {name: value[k] for name, value in batch.items()} for k in range(b)]
        batch["sinogram"] = torch.stack([measure("train", sample) for sample in samples])
        batch.pop("fine", None)
    batch |= {"weight": torch.ones(b), "sample": torch.arange(b), "name": ["fake"] * b}

    class Loader:
        """Not a list, which Lightning would take for one of loaders."""

        sampler = EpochSampler(64, shuffle=True, batch_size=b)

        def __len__(self) -> int:
            return n_batches

        def __iter__(self) -> Iterator[Any]:
            return iter([batch] * n_batches)

    class Data(SliceDataModule):
        def prepare_data(self) -> None:
            pass

        def setup(self, stage: str | None = None) -> None:
            pass

        def train_dataloader(self) -> Any:
            return Loader()

    return Data(config.data)


def main() -> None:
    """Print what steps take: a line of JSON for each list of overrides in a JSON file."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    pretend_cuda()
    for overrides in json.loads(Path(sys.argv[1]).read_text()):
        try:
            found = asdict(rehearse(overrides))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
