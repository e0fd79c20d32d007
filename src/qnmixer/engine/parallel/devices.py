"""The accelerator and the number of devices of a run on this machine, and torch.compile for the blocks of a network."""

import math
import os
import re
import shutil
from dataclasses import replace
from typing import Any

import torch

from qnmixer.engine.config.rules import validate
from qnmixer.engine.config.run import Config
from qnmixer.errors import ConfigError
from qnmixer.machine import THREADS, n_cores
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.torch_builds import NoBuildError, visible_gpus

# The devices of a run


def resolve_devices(config: Config) -> Config:
    """Fill in the accelerator and the number of devices. Raises ConfigError for what this machine does not have."""
    trainer = config.trainer
    device = choose_device(trainer.accelerator, "trainer.accelerator")
    check_precision(device, trainer.precision)
    on_cuda = device.type == "cuda"
    if config.compile and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):  # GPUs need it too
        raise ConfigError("compile=true needs a C++ compiler: install g++, or leave out compile")
    devices = trainer.devices
    if devices is None:
        if config.strategy.name != "single" and not on_cuda:
            raise ConfigError(
                f"strategy={config.strategy.name} on a CPU needs a number of processes: give trainer.devices=4, say"
            )
        devices = 1 if config.strategy.name == "single" else torch.cuda.device_count()
    if on_cuda and devices > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.devices={devices}, but torch sees {torch.cuda.device_count()} here: lower it, or try "
            "trainer.accelerator=cpu"
        )
    resolved = replace(config, trainer=replace(trainer, devices=devices, accelerator="cuda" if on_cuda else "cpu"))
    validate(resolved)
    return resolved


def choose_device(accelerator: str, key: str = "accelerator") -> torch.device:
    """The device of an accelerator. `auto` means the CPU only on a machine without an NVIDIA GPU.

    From here on float32 products are exact on this device; training may allow TF32 later. On a CPU torch has no more
    threads than it has cores. Raises ConfigError, which names the key, for a GPU that does not exist or that
    this torch cannot use.
    """
    allow_tf32(False)
    if THREADS not in os.environ:  # torch starts a thread for each core of the machine, also in a container with few
        torch.set_num_threads(min(torch.get_num_threads(), n_cores()))
    if accelerator == "cpu":
        return torch.device("cpu")
    if (problem := gpu_problem()) is not None:
        raise ConfigError(f"{key}={accelerator}, but {problem}, or use {key}=cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if accelerator != "auto":
        raise ConfigError(f"{key}={accelerator}, but torch sees no CUDA device here: use {key}=cpu")
    return torch.device("cpu")


def gpu_problem() -> str | None:
    """Why torch cannot use the GPU of this machine, and how to fix it. None: no problem, or no GPU."""
    if torch.cuda.is_available():
        if torch.version.cuda is None:  # ROCm names its architectures differently
            return None
        built = torch.cuda.get_arch_list()
        made_for = sorted(int(re.sub(r"\D", "", name)) for name in built)
        major, minor = torch.cuda.get_device_capability(0)
        # Machine code (sm) runs on GPUs of its own major version, and PTX (compute) on all later ones.
        latest = math.inf if any(name.startswith("compute_") for name in built) else made_for[-1] // 10
        if made_for[0] <= 10 * major + minor and major <= latest:
            return None
        why = f"has no kernels for a GPU of compute capability {major}.{minor} ({', '.join(built)})"
    else:
        try:
            if not visible_gpus():
                return None
        except NoBuildError as error:
            return str(error)
        why = "cannot use the GPU that nvidia-smi shows"
    return f"torch {torch.__version__} {why}: make install TORCH=auto installs the build for it"


def check_precision(device: torch.device, precision: str) -> None:
    """Raise ConfigError for a precision that the device does not support. torch would emulate bf16 on a V100."""
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bf16-mixed" and not has_bf16:
        name = torch.cuda.get_device_name()
        raise ConfigError(f"trainer.precision={precision}, but {name} has no bf16: use trainer.precision=16-mixed")


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid TF32: GPUs then round the factors of float32 products and convolutions to 10 bits instead of 23.

    torch's default is no for products and yes for convolutions. "32" would then mean something else on each GPU.
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


# torch.compile


def compile_blocks(network: UnrolledNetwork[Any]) -> None:
    """Compile the blocks of a network, each at its first call. Raises ConfigError if the network has none.

    Between the blocks are the physics and the latent vectors. Blocks are compiled in place: their weights keep their
    names, so ddp, fsdp and recomputation work as before. All iterations share the code of a block: a few graphs serve
    any T.

    The whole network as one graph was tried, with torch 2.13 on a CPU. torch unrolls the T iterations, so the time to
    compile grows with T, and a step is no faster than with compiled blocks. One graph cannot serve all iterations,
    because each has its own weights and more pairs in H.
    """
    blocks = network.blocks()
    if not blocks:
        raise ConfigError(f"compile=true, but {network.title} has no blocks() to compile: leave it out")
    for block in blocks:
        # In place: torch.compile(block) would put `_orig_mod.` into every name of a checkpoint.
        block.compile()
