"""Find the build of torch that has kernels for this machine's GPUs. `make install`, training and doctor use it.

This file runs before anything is installed: it imports the standard library only, and nothing of qnmixer.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
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
        raise NoBuildError(f"no build of torch {TORCH} has kernels for {_described(gpus)}")
    driver = gpus[0].driver  # one for all of them
    for build in fitting:
        if not driver or _numbers(driver) >= _numbers(build.driver):
            return build.name
    raise NoBuildError(
        f"the NVIDIA driver {driver} is too old for torch {TORCH} on this GPU ({_described(gpus)}), which needs "
        f"{fitting[-1].driver} or newer: update the driver"
    )


def _described(gpus: Sequence[GPU]) -> str:
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


def decide(asked: str) -> tuple[str, str]:
    """Choose the build to install. Returns it with the reason.

    Args:
        asked: a build; "auto" chooses by the GPUs; "" takes the installed build, or chooses by the GPUs if there is
            none.

    Raises NoBuildError if the build does not exist, or none fits.
    """
    if asked not in ("", "auto", *CHOICES):
        raise NoBuildError(f"TORCH={asked} is no build of torch {TORCH}")
    if sys.platform == "darwin":
        if platform.machine() != "arm64" or asked.startswith("cu"):
            raise NoBuildError(f"torch {TORCH} on macOS needs Apple silicon, and has no CUDA")
        return "cpu", "macOS has one build"
    if asked in CHOICES:
        return asked, f"TORCH={asked} asks for it"
    if not asked and (build := installed_build()):
        return build, "kept; TORCH=auto chooses by the GPUs again"
    gpus = visible_gpus()
    return choose(gpus), f"{_described(gpus)}, driver {gpus[0].driver}" if gpus else "no NVIDIA GPU here"


# Packages that some builds of torch bring and others do not.
_OF_TORCH = r"(torch|triton|nvidia-[^=\s]*|cuda-[^=\s]*)"


def install(build: str, lock: Path) -> None:
    """Install this build of torch, the lock file and the project into the environment of this Python.

    Hashes are checked, except for builds that PyPI does not have. Raises CalledProcessError if pip fails.
    """
    if installed_build() not in (None, build):  # the two builds would overwrite each other's CUDA libraries
        names = {distribution.metadata["Name"].lower() for distribution in distributions()}
        _pip("uninstall", "--yes", *sorted(name for name in names if re.fullmatch(_OF_TORCH, name)))
    on_pypi = is_on_pypi(build)
    text, locked = lock.read_text(encoding="utf-8"), Path(sys.prefix) / "requirements.txt"
    if not on_pypi:
        text = re.sub(rf"^{_OF_TORCH}==.*\n( .*\n)*", "", text, flags=re.MULTILINE)
    locked.write_text(text, encoding="utf-8")
    _pip("install", "--require-hashes", "--no-deps", "-r", str(locked))
    if not on_pypi:
        _pip("install", *pinned(build))
    _pip("install", "--no-deps", "--no-build-isolation", "-e", ".")


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def main() -> None:
    """Choose the build, print the choice, and install it. The argument is TORCH of the Makefile."""
    try:
        build, why = decide(sys.argv[1])
        print(f"torch {TORCH}, build {build}: {why}", flush=True)
        install(build, Path("requirements.lock"))
    except NoBuildError as error:
        sys.exit(f"error: {error}. To choose by hand: make install TORCH={'|'.join(CHOICES)}")
    except KeyboardInterrupt:
        sys.exit(130)
    except subprocess.CalledProcessError:
        sys.exit(f"error: pip could not install torch {TORCH}, build {build}: see above")


if __name__ == "__main__":
    main()
