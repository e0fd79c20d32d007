"""The accelerator and the number of devices of a run on this machine, and torch.compile for the blocks of a network."""

import os
import re
import shutil
from collections.abc import Sequence
from typing import Any

import torch

from qnmixer.errors import ConfigError
from qnmixer.machine import THREADS, n_cores
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.settings.run import Config, validate
from qnmixer.torch_builds import GPU, NoBuildError, fix, visible_gpus


def resolve_devices(config: Config) -> Config:
    """Fill in the accelerator and the number of devices. Raises ConfigError for what this machine does not have."""
    trainer = config.trainer
    device = choose_device(trainer.accelerator, "trainer.accelerator")
    on_cuda = device.type == "cuda"
    if config.compile:
        check_compiler()
    devices: int | list[int] | str | None = trainer.devices
    is_open = trainer.per_node is None and config.strategy.is_parallel
    if not on_cuda and (devices == -1 or isinstance(devices, list) or is_open):  # as in Lightning
        raise ConfigError(f"trainer.devices={devices} on a CPU is no number of processes: give trainer.devices=4, say")
    if trainer.per_node is None:
        devices = torch.cuda.device_count() if config.strategy.is_parallel or devices == -1 else 1
    gpu_numbers = devices if isinstance(devices, list) else [*range(int(devices or 1))]
    if on_cuda and max(gpu_numbers) >= torch.cuda.device_count():
        raise ConfigError(
            f"trainer.devices={devices}, but torch sees {torch.cuda.device_count()} here: lower it, or try "
            "trainer.accelerator=cpu"
        )
    if on_cuda and (problem := gpu_problem(gpu_numbers)) is not None:
        raise _unusable(trainer.accelerator, "trainer.accelerator", problem)
    check_precision(device, trainer.precision)
    resolved = config.changed(trainer=trainer.changed(devices=devices, accelerator="cuda" if on_cuda else "cpu"))
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
        raise _unusable(accelerator, key, problem)
    if torch.cuda.is_available():
        return torch.device("cuda")
    if accelerator != "auto":
        raise ConfigError(f"{key}={accelerator}, but torch sees no CUDA device here: use {key}=cpu")
    return torch.device("cpu")


def _unusable(accelerator: str, key: str, problem: str) -> ConfigError:
    return ConfigError(f"{key}={accelerator}, but {problem}, or use {key}=cpu")


def gpu_problem(devices: Sequence[int] = (0,)) -> str | None:
    """Why torch cannot use some GPUs of this machine, and how to fix it. None: no problem, or no GPU."""
    version = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        if torch.version.cuda is None:  # ROCm names its architectures differently
            return None
        gpus = [GPU(torch.cuda.get_device_capability(n)) for n in devices]
        arch_list = torch.cuda.get_arch_list()
        foreign = [gpu for gpu in gpus if not runs_on(gpu.capability, arch_list)]
        if not foreign:
            return None
        return f"{version} has no kernels for a GPU of {foreign[0]} ({', '.join(arch_list)}): {fix(gpus)}"
    try:
        gpus = visible_gpus()
    except NoBuildError as error:
        return f"{version} sees no CUDA device: {error}"
    if not gpus:
        return None
    why = "is built for the CPU and cannot" if torch.version.cuda is None else "cannot"
    return f"{version} {why} use the GPU here ({gpus[0]}, driver {gpus[0].driver}): {fix(gpus)}"


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether a torch for these architectures, such as sm_86 or compute_120, runs on a GPU of this compute capability.

    Machine code (sm) runs on its own minor version and on later ones of the same major version. PTX (compute) runs on
    all later versions.
    """
    for name in architectures:
        made_for = divmod(int(re.sub(r"\D", "", name)), 10)
        if capability >= made_for and (name.startswith("compute_") or capability[0] == made_for[0]):
            return True
    return False


def check_precision(device: torch.device, precision: str) -> None:
    """Raise ConfigError for a precision that the device does not support."""
    if precision == "bf16-mixed" and device.type == "cuda" and not has_bf16():
        name = torch.cuda.get_device_name()
        raise ConfigError(f"trainer.precision={precision}, but {name} has no bf16: use trainer.precision=16-mixed")


def has_bf16() -> bool:
    """Whether the GPU has units for bf16. On other GPUs torch would emulate it."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid TF32: GPUs then round the factors of float32 products and convolutions to 10 bits instead of 23.

    torch's default is no for products and yes for convolutions. "32" would then mean something else on each GPU.
    """
    # The old switches set the new ones (fp32_precision) too. If only the new ones are set, Lightning 2.6 and inductor
    # fail when they read the old ones (seen with torch 2.13). torch 2.6 to 2.8 have no new ones.
    # torch will retire the old ones.
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def check_compiler() -> None:
    """Raise ConfigError if there is no C++ compiler, which torch.compile needs for a GPU too."""
    compilers = [os.environ.get("CXX") or ("cl" if os.name == "nt" else "g++"), "clang++"]
    if not any(map(shutil.which, compilers)):
        raise ConfigError(
            f"compile=true needs a C++ compiler, but {compilers[0]} is not installed: install one, or leave out compile"
        )


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
