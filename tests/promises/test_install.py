"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

`make install` on simulated machines. Makefile and pip are real; nvidia-smi and the package index are stand-ins.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest

from qnmixer.torch_builds import GPU, TORCH, fix

from ..nvidia import fake_nvidia_smi

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("install")]

PATH = "/usr/bin:/bin"  # without uv
V100, A100, RTX_5090 = "7.0, 580.65.06", "8.0, 580.65.06", "12.0, 580.65.06"

# Builds the project itself without setuptools, which a new environment does not have on every Python.
BACKEND = """
import os, shutil
def build_editable(folder, config_settings=None, metadata_directory=None):
    return os.path.basename(shutil.copy("mini/mini-1.0-py3-none-any.whl", folder))
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "mini"
version = "1.0"
"""


def add_wheel(index: Path, name: str, version: str, *, needs: tuple[str, ...] = (), file: str = "") -> str:
    """Put a tiny package into an index, which is a folder. Returns its digest."""
    stem = name.replace("-", "_")
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{stem}-{version}-py3-none-any.whl", f"{stem}-{version}.dist-info"
    requirements = "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(file or f"{stem}.py", f"{name} {version}")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirements}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    links = [f'<a href="{wheel_path.name}">{wheel_path.name}</a>' for wheel_path in sorted(folder.glob("*.whl"))]
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with this Makefile, an empty environment, and two indexes: PyPI's, and torch's with one a build."""
    root = tmp_path_factory.mktemp("install")
    project, pypi = root / "project", root / "pypi"
    (project / "src" / "qnmixer").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", project)
    shutil.copy(ROOT / "src" / "qnmixer" / "torch_builds.py", project / "src" / "qnmixer")
    (project / "pyproject.toml").write_text(PYPROJECT)
    (project / "backend.py").write_text(BACKEND)
    add_wheel(project, "mini", "1.0")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", project / ".venv"], check=True)
    (site,) = project.glob(".venv/lib/python*/site-packages")
    # Not import pip: it takes setuptools' distutils from this process, and torch.compile needs that
    package = Path(str(distribution("pip").locate_file("pip")))
    for path in (package, *package.parent.glob("pip-*.dist-info")):  # venv would take seconds to install it
        shutil.copytree(path, site / path.name)
    cuda, file = "nvidia-cudnn-cu13", "nvidia/cudnn.txt"
    lock = {
        f"torch=={TORCH}": add_wheel(pypi, "torch", TORCH, needs=(cuda, "filelock")),
        f"{cuda}==9.20": add_wheel(pypi, cuda, "9.20", file=file),
        "filelock==3.13": add_wheel(pypi, "filelock", "3.13"),
    }
    add_wheel(pypi, "filelock", "4.0")  # newer than the lock, and not to be taken
    lines = [f"{name} \\\n    --hash=sha256:{digest}\n    # via torch\n" for name, digest in lock.items()]
    (project / "requirements.lock").write_text("".join(lines))
    for build, needs in {"cpu": (), "cu126": ("nvidia-cudnn-cu12",), "cu130": (cuda,)}.items():
        add_wheel(root / "whl" / build, "torch", f"{TORCH}+{build}", needs=(*needs, "filelock"))
        add_wheel(root / "whl" / build, "filelock", "4.0")
    add_wheel(root / "whl" / "cu126", "nvidia-cudnn-cu12", "9.20", file=file)
    return root


class Machine:
    """A copy of the project on a machine of its own."""

    def __init__(self, template: Path, folder: Path) -> None:
        shutil.copytree(template / "project", folder / "project", symlinks=True)
        self.project, self.bin = folder / "project", folder / "bin"
        self.bin.mkdir()
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "CUDA_"))}
        self.environment = variables | {
            "PATH": f"{self.bin}:{PATH}",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": (template / "pypi").as_uri(),
            "TORCH_INDEX": (template / "whl").as_uri(),
        }

    def run(self, command: str, *, fails: bool = False) -> str:
        """Run a shell command in the project. Returns what it said."""
        command = command.replace("make install", f"make install PYTHON={sys.executable}")
        process = subprocess.run(
            ["sh", "-c", command], cwd=self.project, capture_output=True, text=True, env=self.environment, timeout=120
        )
        assert (process.returncode != 0) == fails, f"{process.stdout}\n{process.stderr}"
        assert "Traceback" not in process.stderr
        return process.stdout + process.stderr

    def packages(self) -> dict[str, str]:
        (site,) = self.project.glob(".venv/lib/python*/site-packages")
        names = [folder.name.removesuffix(".dist-info").split("-") for folder in site.glob("*.dist-info")]
        versions = {name: version for name, version in names if name not in ("pip", "setuptools")}
        if "nvidia" in os.listdir(site):
            versions["cudnn"] = (site / "nvidia" / "cudnn.txt").read_text()
        return versions


@pytest.fixture
def machine(template: Path, tmp_path: Path) -> Callable[..., Machine]:
    def make(*gpus: str) -> Machine:
        host = Machine(template, tmp_path)
        if gpus:
            fake_nvidia_smi(host.bin, *gpus)
        elif shutil.which("nvidia-smi", path=PATH):  # that of the machine that runs this test
            fake_nvidia_smi(host.bin, "No devices were found", code=6)
        return host

    return make


COMMON = {"filelock": "3.13", "mini": "1.0"}
CPU = COMMON | {"torch": f"{TORCH}+cpu"}
CU126 = COMMON | {"torch": f"{TORCH}+cu126", "nvidia_cudnn_cu12": "9.20", "cudnn": "nvidia-cudnn-cu12 9.20"}
CU130 = COMMON | {"torch": TORCH, "nvidia_cudnn_cu13": "9.20", "cudnn": "nvidia-cudnn-cu13 9.20"}


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has one build")
@pytest.mark.parametrize(("gpus", "build", "reason"), [
    ([V100] * 4, "cu126", "compute capability 7.0, driver 580.65.06"),
    pytest.param([A100], "cu130", "compute capability 8.0, driver 580.65.06", marks=pytest.mark.long),
    ([], "cpu", "no NVIDIA GPU here"),
], ids=["V100", "A100", "none"])  # fmt: skip
def test_each_machine_gets_its_build(gpus: list[str], build: str, reason: str, machine: Callable[..., Machine]) -> None:
    """More machines: tests/test_torch_builds.py."""
    host = machine(*gpus)
    assert f"torch {TORCH}, build {build}: {reason}\n" in host.run("make install")
    assert host.packages() == {"cpu": CPU, "cu126": CU126, "cu130": CU130}[build]
    assert "Nothing to be done" in host.run("make install")


def test_a_machine_without_a_build_is_refused_in_a_line(machine: Callable[..., Machine]) -> None:
    host = machine(V100, RTX_5090)
    (line,) = [line for line in host.run("make install", fails=True).splitlines() if line.startswith("error: ")]
    assert "no build of torch" in line
    assert line.endswith("To choose by hand: make install TORCH=cu130|cu126|cpu")
    assert host.packages() == {}
    host.run("make install", fails=True)  # it is not taken for done
    assert "build cpu: TORCH=cpu asks for it" in host.run("make install TORCH=cpu")
    assert host.packages() == CPU


@pytest.mark.long
def test_the_fix_installs_a_build_that_the_next_install_keeps(machine: Callable[..., Machine]) -> None:
    """Both of its commands; and nothing stays of the build before."""
    host = machine(V100)
    index = host.environment["TORCH_INDEX"]
    make, _, pip = fix([GPU((7, 0), "535.104.05")]).partition(", or ")
    pip = pip.replace("https://download.pytorch.org/whl", index).replace("pip", ".venv/bin/python -m pip", 1)
    host.run("make install TORCH=cpu")
    host.run(make)
    assert host.packages() == CU126
    host.run(f".venv/bin/python -m pip install -q torch=={TORCH}+cpu --index-url {index}/cpu")
    host.run(pip)
    assert host.packages() == CU126
    fake_nvidia_smi(host.bin, A100)  # as on another node, with the same files
    mtime = (host.project / ".venv" / ".installed").stat().st_mtime + 10
    os.utime(host.project / "pyproject.toml", (mtime, mtime))  # as a pull does: what is installed is now older
    assert "build cu126: kept" in host.run("make install")
    assert host.packages() == CU126
    host.run("make install TORCH=auto")
    assert host.packages() == CU130


def test_a_package_that_is_not_the_locked_one_is_refused(machine: Callable[..., Machine]) -> None:
    host = machine()
    lock = host.project / "requirements.lock"
    name = "filelock==3.13 \\\n    --hash=sha256:"
    lock.write_text(lock.read_text().replace(name, f"{name}0")[:-1])
    assert "error: " in host.run("make install", fails=True)
    assert "filelock" not in host.packages()


def test_the_steps_of_the_dockerfile_install(machine: Callable[..., Machine]) -> None:
    host = machine()
    (step,) = re.findall(r"^RUN (.*)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    (default,) = re.findall(r"^ARG TORCH=(.*)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    host.run(f"TORCH={default}; {step}")
    assert host.packages() == CU130
