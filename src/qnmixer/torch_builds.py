"""Find the build of torch that has kernels for this machine's GPUs. `make install`, training and doctor use it.

.ci/install.py needs it before anything is installed: it imports the standard library only, and nothing of qnmixer.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

TORCH = "2.13.0"
"""The version of requirements.lock. torch plans no cu126 from 2.15 on: a newer version would end V100 and Pascal."""

INDEX = "https://download.pytorch.org/whl"

ON_PYPI = "cu130"  # the build on PyPI for Linux. PyPI also has the only build for macOS, which is for the CPU


class NoBuildError(Exception):
    """No build of torch fits this machine. The message is one line: what is wrong and what to change."""


class Build(NamedTuple):
    """One build of torch: the oldest NVIDIA driver that runs it, and the compute capabilities that it has kernels for.

    These go from `lowest` to before `end`.
    """

    name: str
    driver: str
    lowest: tuple[int, int]
    end: tuple[int, int]


# The newest CUDA comes first: the first build that fits is taken. Architectures: pytorch/pytorch PR 182849, of x86 and
# ARM together; drivers: NVIDIA's release notes. Training asks the installed torch itself (get_arch_list).
BUILDS = (
    Build("cu130", "580", (7, 5), (99, 0)),  # its PTX runs on all later GPUs
    Build("cu126", "525.60.13", (5, 0), (10, 0)),
)
CHOICES = (*(build.name for build in BUILDS), "cpu")


class GPU(NamedTuple):
    """One NVIDIA GPU: its compute capability, as (7, 0), and its driver version; "" if the driver is not known."""

    capability: tuple[int, int]
    driver: str = ""

    def __str__(self) -> str:
        return f"compute capability {self.capability[0]}.{self.capability[1]}"


def visible_gpus() -> list[GPU]:
    """The NVIDIA GPUs of this machine; none without nvidia-smi, or if CUDA_VISIBLE_DEVICES hides all.

    Raises NoBuildError if nvidia-smi fails or does not know the compute capability.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return []
    command = ["nvidia-smi", "--query-gpu=compute_cap,driver_version", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return []
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoBuildError(f"nvidia-smi fails ({error}): repair the driver") from None
    output = " ".join((process.stdout + process.stderr).split())
    if "No devices were found" in output:
        return []
    rows = re.findall(r"^ *(\d+)\.(\d+), *(\S*) *$", process.stdout, re.MULTILINE)
    if process.returncode or not rows:
        raise NoBuildError(f"nvidia-smi names no compute capability ({output[:200]}): repair or update the driver")
    return [GPU((int(major), int(minor)), driver) for major, minor, driver in rows]


def choose(gpus: Sequence[GPU]) -> str:
    """The build that has kernels for all these GPUs and runs with their driver; "cpu" without GPUs.

    Raises NoBuildError if there is none.
    """
    if not gpus:
        return "cpu"
    fitting = [build for build in BUILDS if all(build.lowest <= gpu.capability < build.end for gpu in gpus)]
    if not fitting:
        raise NoBuildError(f"no build of torch {TORCH} has kernels for {described(gpus)}")
    driver = gpus[0].driver  # one for all of them
    for build in fitting:
        if not driver or _numbers(driver) >= _numbers(build.driver):
            return build.name
    raise NoBuildError(
        f"the NVIDIA driver {driver} is too old for torch {TORCH} on this GPU ({described(gpus)}), which needs "
        f"{fitting[-1].driver} or newer: update the driver"
    )


def described(gpus: Sequence[GPU]) -> str:
    """The compute capabilities of some GPUs, each once."""
    return ", ".join(sorted({str(gpu) for gpu in gpus}))


def _numbers(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)]


def fix(gpus: Sequence[GPU]) -> str:
    """The command that installs the build for these GPUs, or the reason why no build fits."""
    try:
        build = choose(gpus)
    except NoBuildError as error:
        return str(error)
    return f"make install TORCH={build}, or pip install {' '.join(pinned(build))}"


def pinned(build: str) -> list[str]:
    """The arguments of pip that install this build, also in place of another."""
    return [f"torch=={TORCH}+{build}", "--index-url", f"{os.environ.get('TORCH_INDEX') or INDEX}/{build}"]


def is_on_pypi(build: str) -> bool:
    """Whether pip finds this build without another index."""
    return build == ON_PYPI or sys.platform == "darwin"


def installed_build() -> str | None:
    """The installed build of torch, if it is one of the builds in this file."""
    try:
        release, _, local = version("torch").partition("+")
    except PackageNotFoundError:
        return None
    build = local or ("cpu" if sys.platform == "darwin" else ON_PYPI)
    return build if release == TORCH and build in CHOICES else None
