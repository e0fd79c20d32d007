"""Install the environment of a clone, with the build of torch for this machine.

python .ci/install.py TORCH   what `make install` runs

It runs before anything is installed: it imports the standard library, and one file of qnmixer, which does so too.
"""

import platform
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "src" / "qnmixer"))  # the last: it hides no other module

from torch_builds import (
    CHOICES,
    TORCH,
    NoBuildError,
    choose,
    described,
    installed_build,
    is_on_pypi,
    pinned,
    visible_gpus,
)


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
    return choose(gpus), f"{described(gpus)}, driver {gpus[0].driver}" if gpus else "no NVIDIA GPU here"


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
