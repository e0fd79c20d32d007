"""Parts for Lightning, for scripts with `L.Trainer(…)` and for projects. A run puts the same parts together.

docs/library.md has a script. Names from here, from `qnmixer`, `qnmixer.models`, `qnmixer.physics` and `qnmixer.steps`
are public: CHANGELOG.md names every change of them.
"""

from typing import Any, Literal

import qnmixer.needs_train  # noqa: F401

from qnmixer.data.batch import Batch, to_hu
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.evaluation.metrics import psnr, rmse, ssim, ssim_percent
from qnmixer.measurement.measurement import Measurement
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.models import UnrolledNetwork
from qnmixer.module import Equivariant, ReconstructionModule, Split
from qnmixer.module.base import RunModule
from qnmixer.parallel.ddp import DDPStrategy
from qnmixer.parallel.fsdp import FSDPStrategy
from qnmixer.parallel.pipeline import PipelineStrategy
from qnmixer.physics import FanBeamGeometry
from qnmixer.runs.loggers import MetricsFile, WandbRun
from qnmixer.settings.run import section
from qnmixer.settings.sections import MemoryConfig
from qnmixer.training.callbacks import EMA, IteratePictures, MemoryMonitor
from qnmixer.training.checkpointing import Checkpointing

__all__ = [
    "EMA",
    "Batch",
    "Checkpointing",
    "DDPStrategy",
    "Equivariant",
    "FSDPStrategy",
    "IteratePictures",
    "Measurement",
    "MemoryMonitor",
    "MetricsFile",
    "PipelineStrategy",
    "ReconstructionModule",
    "RunModule",
    "SliceDataModule",
    "Split",
    "WandbRun",
    "memory_mode",
    "psnr",
    "rmse",
    "slices",
    "ssim",
    "ssim_percent",
    "to_hu",
]


def memory_mode(network: UnrolledNetwork[Any], mode: Literal["keep", "recompute", "offload"]) -> None:
    """Change what happens to the graph of a network's iterations until the backward pass, in place, before training.

    Args:
        network: as it was built.
        mode: keep the graph, recompute each iteration in the backward pass, or offload the graph to the host. The
            gradients are bit-identical.
    """
    apply_memory_mode(network, MemoryConfig(name=mode))


def slices(source: str, *, geometry: FanBeamGeometry | None = None, **keys: Any) -> SliceDataModule:
    """The LightningDataModule of a source of slices.

    Args:
        source: phantoms, dicom, numpy, or another option of `data=`; or a class of yours, as "my_ct.data.Bodies".
        geometry: the scan, which slices at their true size and measured sinograms need.
        keys: of `data`, such as image_size, batch_size and root. The others have the values of conf/data.

    Raises ConfigError for an option or a key that does not exist, or for a value out of bounds.
    """
    if "." in source:
        source, keys = "custom", {"_target_": source, **keys}
    return SliceDataModule(section("data", source, **keys), geometry=geometry)
