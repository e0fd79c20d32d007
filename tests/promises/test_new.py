"""Promise 1: Two commands. One-line errors with the way out. Ctrl-C, SIGTERM, SLURM: a checkpoint, and how to go on.

The command `new`: a project of one's own, which takes no place of files, and whose training step is the user's.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qnmixer import new

from ..conftest import TINY as COMMON
from ..conftest import metrics
from .commands import Command

TINY = [word for word in COMMON if not word.startswith(("model.n_mixer", "trainer.max"))]
HELD = ["data.n_train=8", "data.n_held_out=2"]
MINE = ["--config-dir", "conf", "experiment=mine", *TINY, *HELD, "trainer.max_steps=2"]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["qnmixer-new", *words])
    new.main()


def test_a_project_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "a folder" / "mine"
    run(monkeypatch, str(folder))
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    package = {f"src/mine/{name}.py" for name in ("__init__", "data", "fit", "losses", "module", "network", "train")}
    options = ("data/bodies", "experiment/mine", "loss/edges", "loss/mine", "model/mine", "module/mine")
    assert found == package | {f"conf/{name}.yaml" for name in options} | {
        ".github/workflows/ci.yml", ".gitignore", "Makefile", "README.md", "notebooks/look.ipynb", "pyproject.toml",
        "tests/test_mine.py",
    }  # fmt: skip
    assert capsys.readouterr().out.endswith(f"cd '{folder}' && make train\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
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
    ],
)
def test_nothing_is_written_but_into_one_new_folder(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "conf").write_text("mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"^error: .*{message}$"):
        run(monkeypatch, *words)
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "conf"]


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ({"url": "file:///a/b", "dir_info": {}}, "file:///a/b"),
        ({"url": "file:///a/b.whl", "archive_info": {"hash": "sha256=1"}}, "file:///a/b.whl"),
        ({"url": "https://a.b/c", "vcs_info": {"vcs": "git", "commit_id": "1f"}}, "git+https://a.b/c@1f"),
        (
            {"url": "https://a.b/c", "vcs_info": {"vcs": "git", "commit_id": "1f"}, "subdirectory": "d"},
            "git+https://a.b/c@1f#subdirectory=d",
        ),
        (None, None),
    ],
    ids=["folder", "wheel", "git", "subfolder", "version"],
)
def test_a_project_names_the_library_as_it_was_installed(
    origin: dict | None, expected: str | None, tmp_path: Path
) -> None:
    """By a Python that finds a copy of the package, and what pip would write about it."""
    site = tmp_path / "site"
    shutil.copytree(new.PACKAGE, site / "qnmixer", ignore=shutil.ignore_patterns("weights", "__pycache__"))
    about = site / "qnmixer-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: qnmixer\nVersion: 9.9\n")
    if origin is not None:
        (about / "direct_url.json").write_text(json.dumps(origin))
    (site / "qnmixer" / "weights").mkdir()
    shutil.copy(new.PACKAGE / "weights" / "__init__.py", site / "qnmixer" / "weights")
    code = f"import sys; sys.path.insert(0, {str(site)!r}); from qnmixer.new import dependency; print(dependency())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == (f"qnmixer[train,dicom] @ {expected}" if expected else "qnmixer[train,dicom]==9.9"), (
        done.stderr
    )


@pytest.mark.slow
def test_its_training_step_is_the_users_and_goes_on(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "mine"
    new.new(folder)
    path = {"PYTHONPATH": str(folder / "src")}
    assert command(folder, "train", *MINE, "hydra.run.dir=before", **path).code == 0
    step = folder / "src" / "mine" / "module.py"
    plain = 'return (batch["weight"] * self.loss(image, batch["image"])).mean()'
    assert plain in step.read_text()
    step.write_text(step.read_text().replace(plain, plain.replace("return", "return 10 *")))
    assert command(folder, "train", *MINE, "hydra.run.dir=run", **path).code == 0
    before, after = (metrics(folder / run) for run in ("before", "run"))
    assert after["train/loss"][0] == pytest.approx(10 * before["train/loss"][0], rel=1e-5)
    assert after["val/loss"] == pytest.approx(before["val/loss"], rel=0.5)  # other weights, but the same measure

    assert command(folder, "train", "resume=run", "trainer.max_steps=3", **path).code == 0  # the run is this user's
    assert len(metrics(folder / "run")["train/loss"]) == 3
    evaluate = ["run=run", "hydra.run.dir=evaluated"]
    stranger = command(folder, "evaluate", *evaluate, **path, XDG_CONFIG_HOME=str(tmp_path))
    assert stranger.error.endswith("add trust=mine.network")
    assert command(folder, "evaluate", *evaluate, **path).code == 0
    assert "| Mine |" in (folder / "evaluated" / "table.md").read_text()
