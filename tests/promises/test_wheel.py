"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

The wheel in an empty folder: commands with their configs, the library, a project of the user.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qnmixer.settings.options import CONF

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "data.image_size=32", "geometry.n_detectors=48", "geometry.detector_pitch=20", "model.n_iterations=2",
    "model.channels=8", "data.num_workers=0", "data.n_train=8", "logger=csv",
]  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]
Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git would commit, so that nothing left in build/ gets into it."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    (source / "conf" / "local").mkdir()
    (source / "conf" / "local" / "default.yaml").write_text("# this machine's own\n")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (path,) = folder.glob("*.whl")
    return path


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert process.returncode == 0, process.stderr


def environment() -> dict[str, str]:
    """Without the checkout, which pip would take for an installation."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def run(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(command, *arguments, cwd=folder): a command of an environment that has the wheel, and no checkout."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip("--python", str(venv / "bin" / "python"), "install", "--no-deps", str(wheel))
    (packages,) = venv.glob("lib/*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # as a path: an editable qnmixer is not

    def run(command: str, *arguments: str, cwd: Path) -> str:
        words = [str(venv / "bin" / command), *arguments]
        process = subprocess.run(words, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=300)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    return run


def test_the_wheel_has_all_configs_but_this_machines(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("qnmixer/conf/")]
    paths = [path.relative_to(CONF) for path in CONF.rglob("*.yaml") if path.parent.name != "local"]
    assert sorted(names) == sorted(f"qnmixer/conf/{path}" for path in paths)


@pytest.mark.long  # in CI make dist does so
def test_commands_run_in_an_empty_folder(run: Run, tmp_path: Path) -> None:
    sizes = [*TINY, "data.n_val=2", "data.n_test=2"]
    run("qnmixer-train", "experiment=demo", "trainer.max_steps=5", *sizes, "hydra.run.dir=run", cwd=tmp_path)
    assert (tmp_path / "run" / "evaluation" / "table.md").is_file()
    np.save(tmp_path / "slice.npy", np.full((64, 64), -1000, np.float32))  # air
    run("qnmixer-reconstruct", "run=pretrained", "input=slice.npy", "output=out", cwd=tmp_path)
    assert (tmp_path / "out" / "slice.npy").is_file()


@pytest.mark.long
def test_a_project_of_ones_own_trains(run: Run, tmp_path: Path) -> None:
    run("qnmixer-new", "mine", cwd=tmp_path)
    assert re.search(r'"qnmixer\[train,dicom\] @ file://\S+\.whl"', (tmp_path / "mine" / "pyproject.toml").read_text())
    python = run("python", "-c", "import sys; print(sys.executable)", cwd=tmp_path).strip()
    pip("--python", python, "install", "--no-deps", "--no-build-isolation", "-e", str(tmp_path / "mine"))
    overrides = ["trainer.max_steps=2", *TINY, "test_after_training=false", "hydra.run.dir=run"]
    run("python", "-m", "mine.train", *overrides, cwd=tmp_path / "mine")
    assert (tmp_path / "mine" / "run" / "checkpoints" / "best.ckpt").is_file()
    makefile = (tmp_path / "mine" / "Makefile").read_text()
    (command,) = re.findall(r"^test:.*\n\t\$\(BIN\)/python (.*)", makefile, re.MULTILINE)
    assert "7 passed" in run("python", *command.split(), "-v", cwd=tmp_path / "mine")


MORE = """
import sys
assert (image.shape, sinogram.shape, reconstruction.shape) == ((1, 1, 256, 256), (1, 1, 64, 512), (1, 1, 256, 256))
error, of_fbp = (float((x - image).square().mean()) for x in (reconstruction, network.projector.fbp(sinogram)))
assert error < 0.05 * of_fbp
print(qnmixer.__file__, {'lightning', 'hydra'} & {*sys.modules})
"""


def test_ten_lines_of_plain_pytorch(run: Run, tmp_path: Path) -> None:
    ten_lines, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), re.DOTALL)
    assert len([line for line in ten_lines.splitlines() if line]) <= 10  # fewer do as much
    last_line = run("python", "-c", ten_lines + MORE, cwd=tmp_path).splitlines()[-1]
    assert re.fullmatch(r"\S+/site-packages/qnmixer/__init__.py set\(\)", last_line)
