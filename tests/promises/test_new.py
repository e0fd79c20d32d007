"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

The command `new`: a project of one's own, which takes no place of files, and whose training step is the user's.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from qnmixer import new
from qnmixer.torch_builds import INDEX, TORCH

from ..conftest import TINY as COMMON
from ..conftest import metrics
from .commands import Command, weights

TINY = [word for word in COMMON if not word.startswith(("model.n_mixer", "trainer.max"))]
MINE = [*TINY, "data.n_train=8", "data.n_held_out=2", "trainer.max_steps=2", "optimizer=sgd", "schedule=constant"]
GROUPS = (
    "callbacks", "datamodule", "evaluation", "geometry", "logger", "metrics", "noise", "optimizer", "schedule",
    "strategy", "trainer",
)  # fmt: skip
"""The groups of which a project has one example only to copy."""


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["qnmixer-new", *words])
    new.main()


def test_a_project_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "a folder" / "mine"
    run(monkeypatch, str(folder))
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    package = {f"src/mine/{name}.py" for name in ("__init__", "data", "fit", "losses", "module", "network", "train")}
    options = {f"{group}/mine" for group in (*GROUPS, "experiment", "loss", "model", "module")}
    options |= {"data/bodies", "loss/edges"}
    assert files == package | {f"src/mine/conf/{name}.yaml" for name in options} | {
        ".github/workflows/ci.yml", ".gitignore", "Makefile", "README.md", "notebooks/look.ipynb", "pyproject.toml",
        "tests/test_mine.py", "wandb_sweep.yaml",
    }  # fmt: skip
    sweep = yaml.safe_load((folder / "wandb_sweep.yaml").read_text())
    assert sweep["program"] == "mine.train"
    assert all(f"src/mine/conf/loss/{name}.yaml" in files for name in sweep["parameters"]["loss"]["values"])
    assert capsys.readouterr().out.endswith(f"cd '{folder}' && make train\n")


@pytest.mark.parametrize(("words", "message"), [
    (["here"], "exists and is not empty: give a new folder"),
    ([], "give the name of one new folder: qnmixer-new my_ct"),
    (["a", "b"], "give the name of one new folder: qnmixer-new my_ct"),
    (["--force"], "give the name of one new folder: qnmixer-new my_ct"),
    (["my-ct"], "my-ct cannot be the name of a Python package: give letters, digits and _, as my_ct"),
    (["2d"], "2d cannot be the name of a Python package: give letters, digits and _, as my_ct"),
    (["class"], "class cannot be the name of a Python package: give letters, digits and _, as my_ct"),
    (["statistics"], "there is a module statistics already: give another name, as my_statistics"),
    (["torch"], "there is a module torch already: give another name, as my_torch"),
    (["elsewhere/qnmixer"], "there is a module qnmixer already: give another name, as my_qnmixer"),
    (["hydra_core"], "there is a module hydra_core already: give another name, as my_hydra_core"),
])  # fmt: skip
def test_nothing_is_written_but_into_one_new_folder(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "conf").write_text("mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"^error: .*{message}$"):
        run(monkeypatch, *words)
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "conf"]


ORIGINS = {
    "qnmixer[train,dicom] @ file:///a/b": {"url": "file:///a/b", "dir_info": {}},
    "qnmixer[train,dicom] @ file:///a/b.whl": {"url": "file:///a/b.whl", "archive_info": {"hash": "sha256=1"}},
    "qnmixer[train,dicom] @ git+https://a.b/c@1f": {
        "url": "https://a.b/c", "vcs_info": {"vcs": "git", "commit_id": "1f"},
    },
    "qnmixer[train,dicom] @ git+https://a.b/c@1f#subdirectory=d": {
        "url": "https://a.b/c", "vcs_info": {"vcs": "git", "commit_id": "1f"}, "subdirectory": "d",
    },
}  # fmt: skip
"""What pip would write, by what a project then has."""
DEPENDENCIES = """
import sys
from pathlib import Path
site, *origins = sys.argv[1:]
sys.path.insert(0, site)
from qnmixer.new import dependency
print(dependency())
for origin in origins:
    Path(site, "qnmixer-9.9.dist-info", "direct_url.json").write_text(origin)
    print(dependency())
"""


def test_a_project_names_the_library_as_it_was_installed(tmp_path: Path) -> None:
    """By a Python that finds a copy of the package."""
    site = tmp_path / "site"
    shutil.copytree(new.PACKAGE, site / "qnmixer", ignore=shutil.ignore_patterns("weights", "__pycache__"))
    (site / "qnmixer-9.9.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: qnmixer\nVersion: 9.9\n"
    (site / "qnmixer-9.9.dist-info" / "METADATA").write_text(metadata)
    words = [sys.executable, "-c", DEPENDENCIES, str(site), *map(json.dumps, ORIGINS.values())]
    process = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert process.stdout.splitlines() == ["qnmixer[train,dicom]==9.9", *ORIGINS], process.stderr


@pytest.mark.parametrize(("version", "expected"), [
    (f"{TORCH}+cpu", f"torch=={TORCH}+cpu --index-url {INDEX}/cpu"),
    (f"{TORCH}+cu126", f"torch=={TORCH}+cu126 --index-url {INDEX}/cu126"),
    (TORCH, f"torch=={TORCH}"),  # PyPI's
    ("2.99.0a0+git1f", ""),
])  # fmt: skip
def test_a_project_has_this_build_of_torch_and_is_linked_to_this_clone(
    version: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By what its Makefile would run."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("qnmixer.torch_builds.version", lambda _: version)
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    new.new(tmp_path / "mine")
    process = subprocess.run(
        ["make", "-n", "install"], cwd=tmp_path / "mine", capture_output=True, text=True, check=True
    )
    arguments = re.findall(r"pip install --quiet --disable-pip-version-check (.*)", process.stdout)
    clone = new.PACKAGE.parents[1].as_uri()
    assert arguments == [*filter(None, [expected]), '-e ".[dev]"', f"--no-deps -e {clone}"]


@pytest.mark.slow
def test_its_training_step_is_the_users(tmp_path: Path, command: Command) -> None:
    """On one device and on two."""
    folder = tmp_path / "mine"
    new.new(folder)
    path = {"PYTHONPATH": str(folder / "src")}
    assert command(folder, "train", *MINE, "hydra.run.dir=before", **path).code == 0
    two_devices = ["data.batch_size=1", "strategy=ddp", "trainer.devices=2", "hydra.run.dir=two"]
    assert command(folder, "train", *MINE, *two_devices, **path).code == 0
    ddp_weights = weights(folder / "two")
    for name, tensor in weights(folder / "before").items():
        torch.testing.assert_close(ddp_weights[name], tensor, rtol=1e-5, atol=1e-7)
    source = folder / "src" / "mine" / "module.py"
    loss_line = 'return (batch["weight"] * self.loss(image, batch["image"])).mean()'
    assert loss_line in source.read_text()
    source.write_text(source.read_text().replace(loss_line, loss_line.replace("return", "return 10 *")))
    assert command(folder, "train", *MINE, "hydra.run.dir=run", **path).code == 0
    before, after = (metrics(folder / run) for run in ("before", "run"))
    assert after["train/loss"][0] == pytest.approx(10 * before["train/loss"][0], rel=1e-5)
    assert after["val/loss"] == pytest.approx(before["val/loss"], rel=0.5)  # other weights, but the same measure

    evaluate = ["run=run", "evaluation.n_pictures=1", "hydra.run.dir=evaluated"]
    stranger = command(folder, "evaluate", *evaluate, **path, XDG_CONFIG_HOME=str(tmp_path))
    assert stranger.error.endswith("add trust=mine.network")
    assert command(folder, "evaluate", *evaluate, **path).code == 0
    assert "| Mine |" in (folder / "evaluated" / "table.md").read_text()
