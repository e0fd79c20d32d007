"""One line of the checklist, and what is checked of the machine by looking at it, before anything runs."""

import platform
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from qnmixer.config import Config
from qnmixer.config.run import batch_of_replica
from qnmixer.memory.footprint import MIB
from qnmixer.memory.plan import Planner
from qnmixer.reconstructor import Reconstructor, build_projector

_CHECKPOINTS = 3  # best, last, and the one being written


@dataclass(frozen=True)
class Check:
    """One line of the checklist; `mend` says what to do about a FAIL, and is empty otherwise."""

    name: str
    status: Literal["PASS", "FAIL", "SKIP"]
    found: str
    mend: str = ""

    def line(self) -> str:
        """As the table has it."""
        return f"{self.status}  {self.name:<15}{self.found}{self.mend and '. Mend: '}{self.mend}"


@dataclass(frozen=True)
class Card:
    """One GPU: name, and compute capability (7, 0)."""

    name: str
    capability: tuple[int, int]


def check_versions(cards: Sequence[Card], built: Sequence[str], cuda: str | None, accelerator: str) -> Check:
    """Whether this torch has code for these cards.

    Args:
        cards: those that torch sees.
        built: torch.cuda.get_arch_list(), as in sm_70 (machine code) and compute_90 (PTX, for newer cards too).
        cuda: the version torch was built for; None: for the CPU.
        accelerator: what was asked for.
    """
    found = f"python {platform.python_version()}, torch {torch.__version__}, lightning {version('lightning')}"
    driver = _driver()
    for card in cards:
        if not runs_on(card.capability, built):
            arch = f"sm_{card.capability[0]}{card.capability[1]}"
            older = card.capability < min(_capability(name) for name in built)
            index = ("cu126" if cuda != "12.6" else "cu118") if older else "cu128"
            return Check(
                "versions",
                "FAIL",
                f"{found}: {card.name} is {arch}, which this torch is not built for ({', '.join(built)})",
                f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}, a build "
                f"for an {'older' if older else 'newer'} CUDA",
            )
    if cards:
        return Check("versions", "PASS", f"{found}, CUDA {cuda}, driver {driver}: built for {cards[0].name}")
    if accelerator != "cpu" and driver is not None:
        why = "is built for the CPU" if cuda is None else f"cannot use it with CUDA {cuda}"
        index = "cu126" if cuda is None else "cu118"
        return Check(
            "versions",
            "FAIL",
            f"{found}: there is an NVIDIA driver ({driver}), but torch {why}",
            f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}, or a newer "
            "driver; or trainer.accelerator=cpu",
        )
    return Check("versions", "SKIP", f"{found}; a CPU has no architecture to be missed")


def runs_on(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Whether some architecture of a build runs on a card of this compute capability.

    Machine code runs on its own minor version and later ones of the same major, PTX on everything later; what ends
    in a letter is for that one card (a) or family (f) alone.
    """
    for name in built:
        made_for = _capability(name)
        if name.endswith("a"):
            runs = capability == made_for
        elif name.startswith("compute_") and not name.endswith("f"):
            runs = capability >= made_for
        else:
            runs = capability[0] == made_for[0] and capability[1] >= made_for[1]
        if runs:
            return True
    return False


def check_precision(precision: str, card: str | None, bf16: bool) -> Check:
    """Whether a card (None: the CPU, which takes all) has the arithmetic that was asked for."""
    if card is not None and precision == "bf16-mixed" and not bf16:
        return Check(
            "precision", "FAIL", f"bf16-mixed on {card}, which has no bf16", "trainer.precision=16-mixed, or 32"
        )
    return Check("precision", "PASS", f"{precision} on {card or 'the CPU'}")


def check_backend(config: Config, nccl: bool, gloo: bool) -> Check:
    """Whether this torch has what devices of the kind talk by."""
    if config.trainer.devices == 1:
        return Check("backend", "SKIP", "one device talks to nobody")
    name, there = ("nccl", nccl) if config.trainer.accelerator == "cuda" else ("gloo", gloo)
    if there:
        return Check("backend", "PASS", name)
    return Check(
        "backend", "FAIL", f"this torch has no {name}", "install torch from pytorch.org on Linux, or strategy=single"
    )


def shared_memory_needed(config: Config) -> int:
    """Bytes of batches that all data workers of a node hold ready, of training and validation."""
    workers = (config.trainer.devices or 1) * config.data.num_workers
    image = 4 * config.data.image_size**2
    return workers * config.data.prefetch_factor * (batch_of_replica(config) + config.data.batch_size) * image


def check_shared_memory(free: int | None, needed: int) -> Check:
    """Whether /dev/shm (None: there is none) holds so many bytes."""
    name = "shared memory"
    if free is None:
        return Check(name, "SKIP", "this system has no /dev/shm")
    found = f"data workers need {_size(needed)} of /dev/shm, {_size(free)} are free"
    if free >= needed:
        return Check(name, "PASS", found)
    return Check(name, "FAIL", found, "docker run --shm-size=8g (or --ipc=host), or lower data.num_workers")


def checkpoint_bytes(config: Config) -> int:
    """Bytes of weights and optimizer state."""
    projector = build_projector(config)
    weights = Reconstructor(config, projector).state_dict().values()
    return sum(tensor.nbytes for tensor in weights) + int(Planner(config, projector).optimizer_state(config))


def check_disk(free: int | None, checkpoint: int, folder: Path) -> Check:
    """Whether a few checkpoints fit; None: the system does not tell."""
    if free is None:
        return Check("disk", "SKIP", f"this system does not say what is free in {folder}")
    found = f"{_CHECKPOINTS} checkpoints are {_size(_CHECKPOINTS * checkpoint)}, {_size(free)} are free in {folder}"
    if free >= _CHECKPOINTS * checkpoint:
        return Check("disk", "PASS", found)
    return Check("disk", "FAIL", found, "free some space, or another folder (hydra.run.dir=…)")


def _capability(name: str) -> tuple[int, int]:
    """(9, 0) of sm_90, compute_90 or sm_90a."""
    digits = re.sub(r"\D", "", name)
    return int(digits[:-1]), int(digits[-1])


def _driver() -> str | None:
    """Version of the NVIDIA driver, if there is one."""
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        return found[0] if (found := re.findall(r"\b\d{3}\.[\d.]+\b", text)) else "of unknown version"
    return None


def free_bytes(path: Path) -> int | None:
    """Bytes that are free where path is; None: the system does not tell."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _size(n_bytes: float) -> str:
    return f"{n_bytes / MIB:,.0f} MiB" if n_bytes < 1024 * MIB else f"{n_bytes / 1024 / MIB:,.1f} GiB"
