"""Counts the operators of a training step: what a GPU launches, and what costs a small image its time.

    python -m tests.operators experiment=demo memory=recompute       # any overrides of qnmixer.train

The Trainer runs two steps on the CPU, with the real module, clipping and optimizer; the second is counted, from the
transfer of its batch. Views and empty tensors launch nothing. The count does not depend on the size of the image.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from qnmixer.config import parse
from qnmixer.config.compose import compose
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.parallel.strategies import build_precision
from qnmixer.training.module import ReconstructionModule

SMALL_IMAGES = ["data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24", "geometry.detector_pitch=40"]
"""A scan that takes a moment; its operators are those of a large one."""
_SILENT = ("detach", "alias", "lift_fresh", "_unsafe_view", "_local_scalar_dense")
# The last is a read; what a GPU would read of an optimizer's step is on the host.
_PHASES = ("forward", "backward", "optimizer")


class Operators(TorchDispatchMode):
    """Counts operators by phase and by file of qnmixer, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.by_place: Counter[tuple[str, str]] = Counter()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        silent = name in _SILENT or name.removeprefix("new_").startswith("empty")
        if self.phase in _PHASES and not (silent or func.is_view or func.namespace == "prim"):
            self.by_place[self.phase, _place()] += 1
            self.by_name[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return self.by_name.total()


def _place() -> str:
    """The innermost file of qnmixer that asks for an operator; in backward that of the forward operator."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        before, found, file = frame.f_code.co_filename.rpartition("/qnmixer/")
        if found and not before.endswith("tests"):
            return file
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    for line in reversed(node.metadata.get("traceback_", ()) if node else ()):
        if match := re.search(r'File ".*/qnmixer/([^"]+)"', line):
            return match[1]
    return "torch"


class _Phases(L.Callback):
    """Tells the counter where the step is; it begins at the end of the first."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        operators.phase = "before"

    def on_train_batch_start(self, *_: Any) -> None:
        torch.set_anomaly_enabled(True, False)  # so that each node of autograd knows where it was made

    def on_before_backward(self, *_: Any) -> None:
        self._go("backward")

    def on_after_backward(self, *_: Any) -> None:
        self._go("optimizer")

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, n: int
    ) -> None:
        self.operators.phase = "forward" if n == 0 else "after"

    def _go(self, phase: str) -> None:
        if self.operators.phase in _PHASES:
            self.operators.phase = phase


@contextmanager
def _foreach_on_a_cpu() -> Iterator[None]:
    """Have clipping and optimizers treat all weights at once, as they do by themselves on a GPU."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    name = "_get_foreach_kernels_supported_devices"
    own = getattr(optimizer, name)
    for module in (optimizer, _foreach_utils):
        setattr(module, name, lambda: ["cpu", *own()])
    try:
        yield
    finally:
        for module in (optimizer, _foreach_utils):
            setattr(module, name, own)


def count_step(*overrides: str) -> Operators:
    """The operators of the second training step of a config."""
    config = parse(compose("train", list(overrides)))
    module, b, size = ReconstructionModule(config), config.data.batch_size, config.data.image_size
    apply_memory_mode(module.network, config.memory)
    batch = {"image": torch.rand(b, 1, size, size), "weight": torch.ones(b), "sample": torch.arange(b)}
    batch |= {"hu_offset": torch.zeros(b), "hu_scale": torch.ones(b), "name": ["random"] * b}

    class Data(SliceDataModule):
        def prepare_data(self) -> None:
            pass

        def setup(self, stage: str) -> None:
            pass

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader([batch] * 2, batch_size=None)

    operators, t = Operators(), config.trainer
    with torch.autograd.set_detect_anomaly(False), _foreach_on_a_cpu(), operators:  # set back at the end
        trainer = L.Trainer(
            accelerator="cpu", devices=1, plugins=[build_precision(config, "cpu")], max_steps=2,
            gradient_clip_val=t.gradient_clip_val, log_every_n_steps=t.log_every_n_steps, limit_val_batches=0,
            callbacks=[_Phases(operators)], logger=DummyLogger(), enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, datamodule=Data(config.data))
    return operators


def main() -> None:
    """Print the operators of a config by file and by name."""
    operators = count_step(*SMALL_IMAGES, *sys.argv[1:])
    table = {place: [operators.by_place[phase, place] for phase in _PHASES] for _, place in operators.by_place}
    total = [sum(column) for column in zip(*table.values(), strict=True)]
    print(f"{'':36}" + "".join(f"{phase:>10}" for phase in (*_PHASES, "all")))
    for place, row in [*sorted(table.items(), key=lambda item: -sum(item[1])), ("all", total)]:
        print(f"{place:36}" + "".join(f"{n:10,}" for n in (*row, sum(row))))
    print("most called:", ", ".join(f"{name} {n}" for name, n in operators.by_name.most_common(25)))


if __name__ == "__main__":
    main()
