"""Find the build of torch that has kernels for this machine's GPUs. `make install`, training and doctor use it.

This file runs before anything is installed: it imports the standard library only, and nothing of qnmixer.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

TORCH = "2.13.0"
"""The version of requirements.lock. torch plans no cu126 from 2.15 on: a newer version would end V100 and Pascal."""

INDEX = "https://download.pytorch.org/whl"


@dataclass(frozen=True)
class Build:
    """One build of torch: the architectures that it has kernels for, and the oldest NVIDIA driver that runs it."""

    name: str
    driver: str
    architectures: tuple[str, ...]
    """As torch.cuda.get_arch_list() names them: sm_70 is machine code, compute_120 is PTX, which newer GPUs run too."""


_CU130, _CU126 = ("cu130", "580"), ("cu126", "525.60.13")
# The newest CUDA comes first: the first build that fits is taken. Architectures: pytorch/pytorch PR 182849;
# drivers: NVIDIA's release notes. Training asks the installed torch itself (get_arch_list).
BUILDS = {
    "x86_64": (
        Build(*_CU130, ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")),
        Build(*_CU126, ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")),
    ),
    "aarch64": (
        Build(*_CU130, ("sm_80", "sm_90", "sm_100", "sm_110", "sm_120", "compute_120")),
        Build(*_CU126, ("sm_80", "sm_90")),
    ),
}
ON_PYPI = "cu130"
"""The build on PyPI for Linux. PyPI also has the only build for macOS, which is for the CPU."""

CHOICES = (ON_PYPI, "cu126", "cpu")


class NoBuildError(Exception):
    """No build of torch fits this machine. The message is one line: what is wrong and what to change."""


@dataclass(frozen=True)
class GPU:
    """One NVIDIA GPU: its compute capability, as (7, 0), and its driver version; None if the driver is not known."""

    capability: tuple[int, int]
    driver: str | None

    def __str__(self) -> str:
        return f"compute capability {self.capability[0]}.{self.capability[1]}"


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether a build for these architectures runs on a GPU of this compute capability.

    Machine code runs on its own minor version and on later ones of the same major version. PTX runs on all later
    versions. A name that ends in a letter is for one GPU (a) or one family (f) only.
    """
    for name in architectures:
        digits = re.sub(r"\D", "", name)
        made_for = int(digits[:-1]), int(digits[-1])
        if name.endswith("a"):
            runs = capability == made_for
        elif name.startswith("compute_") and not name.endswith("f"):
            runs = capability >= made_for
        else:
            runs = capability[0] == made_for[0] and capability[1] >= made_for[1]
        if runs:
            return True
    return False


def visible_gpus() -> list[GPU]:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES allows; none without nvidia-smi.

    Raises NoBuildError if nvidia-smi fails or does not know the compute capability.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    gpus = []
    for line in _query("compute_cap,driver_version"):
        capability, _, driver = line.partition(",")
        if not re.fullmatch(r"\d+\.\d+", capability.strip()):
            raise NoBuildError(f"nvidia-smi prints {line!r}, which has no compute capability: update the driver")
        major, minor = capability.strip().split(".")
        gpus.append(GPU((int(major), int(minor)), driver.strip() or None))
    # With equal GPUs it does not matter which of them are visible.
    if visible is None or len(set(gpus)) < 2:
        return gpus
    return _chosen(gpus, visible.split(","))


def _query(fields: str) -> list[str]:
    """What nvidia-smi prints for each GPU."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return []
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoBuildError(f"nvidia-smi fails ({error}): repair the driver") from None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if "No devices were found" in done.stdout + done.stderr:
        return []
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())[:200] or f"exit code {done.returncode}"
        raise NoBuildError(f"nvidia-smi fails ({said}): repair or update the driver")
    return lines


def _chosen(gpus: list[GPU], visible: list[str]) -> list[GPU]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by number or UUID; all of them if the order is not known."""
    words = [word.strip() for word in visible]
    if all(word.isdigit() for word in words):
        # CUDA numbers the fastest GPU first by default, but nvidia-smi numbers by bus.
        by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        return [gpus[int(word)] for word in words if int(word) < len(gpus)] if by_bus else gpus
    if not all(word.startswith("GPU-") for word in words):
        return gpus
    uuids = _query("uuid")
    return [gpu for gpu, uuid in zip(gpus, uuids, strict=True) if uuid.startswith(tuple(words))] or gpus


def choose(gpus: Sequence[GPU]) -> str:
    """The build that has kernels for all these GPUs and runs with their driver; "cpu" without GPUs.

    Raises NoBuildError if there is none.
    """
    if not gpus:
        return "cpu"
    builds = BUILDS.get(platform.machine(), BUILDS["x86_64"])
    fitting = [build for build in builds if all(runs_on(gpu.capability, build.architectures) for gpu in gpus)]
    described = ", ".join(sorted({str(gpu) for gpu in gpus}))
    if not fitting:
        raise NoBuildError(
            f"no build of torch {TORCH} has kernels for {described} together: leave some GPUs out, with "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID and their numbers by nvidia-smi in CUDA_VISIBLE_DEVICES"
            if len(set(gpus)) > 1
            else f"no build of torch {TORCH} has kernels for this GPU ({described})"
        )
    for build in fitting:
        if all(gpu.driver is None or _numbers(gpu.driver) >= _numbers(build.driver) for gpu in gpus):
            return build.name
    raise NoBuildError(
        f"the NVIDIA driver {gpus[0].driver} is too old for torch {TORCH} on this GPU ({described}), which needs "
        f"{fitting[-1].driver} or newer: update the driver"
    )


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))


def fix(gpus: Sequence[GPU]) -> str:
    """The command that installs the build for these GPUs, or the reason why no build fits."""
    try:
        build = choose(gpus)
    except NoBuildError as error:
        return str(error)
    return f"make install TORCH={build}, or pip install {' '.join(_pinned(build))}"


def _pinned(build: str) -> list[str]:
    return [f"torch=={TORCH}+{build}", "--index-url", f"{os.environ.get('TORCH_INDEX') or INDEX}/{build}"]


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
    if sys.platform == "darwin" and (platform.machine() != "arm64" or asked.startswith("cu")):
        raise NoBuildError(f"torch {TORCH} on macOS needs Apple silicon, and has no CUDA")
    if asked not in ("", "auto", *CHOICES):
        raise NoBuildError(f"TORCH={asked} is no build of torch {TORCH}")
    if asked not in ("", "auto"):
        return asked, f"TORCH={asked} asks for it"
    if not asked and (kept := installed_build()):
        return kept, "kept; TORCH=auto chooses by the GPUs again"
    gpus = [] if sys.platform == "darwin" else visible_gpus()
    build = choose(gpus)
    if not gpus:
        return build, "no NVIDIA GPU here" if sys.platform != "darwin" else "macOS has one build"
    return build, f"{', '.join(sorted({str(gpu) for gpu in gpus}))}, driver {gpus[0].driver}"


# Packages that some builds of torch bring and others do not.
_OF_TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)")


def _without_torch(lock: str) -> Iterator[str]:
    """The lines of a lock file without torch and the packages that its builds bring."""
    skip = False
    for line in lock.splitlines(keepends=True):
        if not line.startswith((" ", "#")):
            skip = _OF_TORCH.fullmatch(line.partition("==")[0]) is not None
        if not skip:
            yield line


def install(build: str, lock: Path) -> None:
    """Install this build of torch, the lock file and the project into the environment of this Python.

    Hashes are checked, except for builds that PyPI does not have. Raises CalledProcessError if pip fails.
    """
    before = installed_build()
    if before not in (None, build):  # the two builds would overwrite each other's CUDA libraries
        names = {name for found in distributions() if _OF_TORCH.fullmatch(name := found.metadata["Name"].lower())}
        _pip("uninstall", *sorted(names))
    locked = Path(sys.prefix) / "requirements.txt"
    on_pypi = build == ON_PYPI or sys.platform == "darwin"
    text = lock.read_text()
    locked.write_text(text if on_pypi else "".join(_without_torch(text)))
    _pip("install", "--require-hashes", "--no-deps", "-r", str(locked))
    if not on_pypi:
        _pip("install", *_pinned(build))
    _pip("install", "--no-deps", "--no-build-isolation", "-e", ".")


def _pip(action: str, *arguments: str) -> None:
    """Run uv if it is installed, else pip."""
    # --default-index, because the variable UV_DEFAULT_INDEX would override --index-url.
    for_uv = ["--default-index" if argument == "--index-url" else argument for argument in arguments]
    try:
        subprocess.run(["uv", "pip", action, "--quiet", "--python", sys.executable, *for_uv], check=True)
    except FileNotFoundError:
        yes = ["--yes"] if action == "uninstall" else []
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", action, *yes, *arguments]
        subprocess.run(command, check=True)


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
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {Path(error.cmd[0]).name} could not install torch {TORCH}, build {build}: see above")


if __name__ == "__main__":
    main()
