"""One line of the checklist, and the checks of the machine that run nothing."""

import platform
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from qnmixer.engine.config import Config
from qnmixer.engine.config.named import averages_weights
from qnmixer.engine.config.run import batch_of_replica
from qnmixer.engine.memory.footprint import MIB
from qnmixer.engine.memory.plan import Planner
from qnmixer.engine.reconstructor import Reconstructor, build_projector

_CHECKPOINTS = 3  # best, last, and one that is being written


@dataclass(frozen=True)
class Check:
    """One line of the checklist. `mend` says how to fix a FAIL, and is empty otherwise."""

    name: str
    status: Literal["PASS", "FAIL", "SKIP"]
    found: str
    mend: str = ""

    def line(self) -> str:
        """The line of the table."""
        return f"{self.status}  {self.name:<15}{self.found}{self.mend and '. Fix: '}{self.mend}"


def check_versions(problem: tuple[str, str] | None, gpu: str | None) -> Check:
    """Check that this torch can use the GPUs of this machine.

    Args:
        problem: of `gpu_problem()`: what is wrong, and the fix.
        gpu: name of the first GPU that torch sees; None: the run is on the CPU.
    """
    found = f"python {platform.python_version()}, torch {torch.__version__}, lightning {version('lightning')}"
    if problem is not None:
        return Check("versions", "FAIL", f"{found}: {problem[0]}", f"{problem[1]}, or trainer.accelerator=cpu")
    if gpu is not None:
        return Check("versions", "PASS", f"{found}, CUDA {torch.version.cuda}, driver {_driver()}: built for {gpu}")
    return Check("versions", "SKIP", f"{found} on a CPU, which needs no kernels for an architecture")


def check_precision(precision: str, card: str | None, bf16: bool) -> Check:
    """Check that a GPU supports the precision. `card` None: a CPU, which supports all."""
    if card is not None and precision == "bf16-mixed" and not bf16:
        return Check(
            "precision", "FAIL", f"bf16-mixed on {card}, which has no bf16", "trainer.precision=16-mixed, or 32"
        )
    return Check("precision", "PASS", f"{precision} on {card or 'the CPU'}")


def check_backend(config: Config, nccl: bool, gloo: bool) -> Check:
    """Check that this torch has the library by which these devices communicate."""
    if config.trainer.devices == 1:
        return Check("backend", "SKIP", "a single device needs no communication")
    name, there = ("nccl", nccl) if config.trainer.accelerator == "cuda" else ("gloo", gloo)
    if there:
        return Check("backend", "PASS", name)
    return Check(
        "backend", "FAIL", f"this torch has no {name}", "install torch from pytorch.org on Linux, or strategy=single"
    )


def shared_memory_needed(config: Config) -> int:
    """Bytes of batches that all data workers of a node prepare, in training and validation."""
    data, geometry = config.data, config.geometry
    workers = (config.trainer.devices or 1) * data.num_workers
    values = data.image_size**2
    if data.measured or config.noise.name != "none":  # with its sinogram, as the workers draw the noise
        values += geometry.n_views * geometry.n_detectors
    elif data.simulation_factor > 1:  # with a finer image, to simulate from
        values += (data.simulation_factor * data.image_size) ** 2
    return workers * data.prefetch_factor * (batch_of_replica(config) + data.batch_size) * 4 * values


def check_shared_memory(free: int | None, needed: int) -> Check:
    """Check that /dev/shm has room for this number of bytes. `free` None: there is no /dev/shm."""
    name = "shared memory"
    if free is None:
        return Check(name, "SKIP", "this system has no /dev/shm")
    found = f"data workers need {_size(needed)} of /dev/shm, {_size(free)} are free"
    if free >= needed:
        return Check(name, "PASS", found)
    return Check(name, "FAIL", found, "docker run --shm-size=8g (or --ipc=host), or lower data.num_workers")


def checkpoint_bytes(config: Config) -> int:
    """Bytes of weights, of their mean if there is one, and of the optimizer state."""
    projector = build_projector(config)
    weights = sum(tensor.nbytes for tensor in Reconstructor(config, projector).state_dict().values())
    sets = 2 if averages_weights(config.callbacks) else 1
    return sets * weights + int(Planner(config, projector).optimizer_state(config))


def check_disk(free: int | None, checkpoint: int, folder: Path) -> Check:
    """Check that a few checkpoints fit. None: the system does not report free space."""
    if free is None:
        return Check("disk", "SKIP", f"this system does not report the free space in {folder}")
    found = f"{_CHECKPOINTS} checkpoints are {_size(_CHECKPOINTS * checkpoint)}, {_size(free)} are free in {folder}"
    if free >= _CHECKPOINTS * checkpoint:
        return Check("disk", "PASS", found)
    return Check("disk", "FAIL", found, "free some space, or another folder (hydra.run.dir=…)")


def _driver() -> str | None:
    """Version of the NVIDIA driver, if there is one."""
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        return found[0] if (found := re.findall(r"\b\d{3}\.[\d.]+\b", text)) else "of unknown version"
    return None


def free_bytes(path: Path) -> int | None:
    """Free bytes on the disk of a path; None: the system does not report them."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def existing(path: Path) -> Path:
    """The nearest parent folder that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _size(n_bytes: float) -> str:
    return f"{n_bytes / MIB:,.0f} MiB" if n_bytes < 1024 * MIB else f"{n_bytes / 1024 / MIB:,.1f} GiB"
