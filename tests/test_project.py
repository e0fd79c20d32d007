"""The project that `qnmixer.new` writes: its notebook runs, and it is what its user owns. Its tests: `test_wheel`."""

import importlib
import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from qnmixer import new
from qnmixer.train import train

from .conftest import environment
from .public import PRIVATE
from .test_notebooks import code_cells
from .warm import Warm

TEMPLATE = new.TEMPLATE


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects") / "nice_ct"
    new.new(folder)
    return folder


def test_it_is_short_with_no_name_of_the_template_and_nothing_private_and_its_notebook_has_no_outputs(
    project: Path,
) -> None:
    assert [path for path in project.rglob("*") if "my_ct" in path.name] == []
    texts = {path: path.read_text() for path in project.rglob("*") if path.is_file()}
    assert sum(len(text.splitlines()) for text in texts.values()) < 700
    foreign = rf"my_ct|my-ct|QNMIXER|_HERE|{PRIVATE.pattern}"
    assert [path for path, text in texts.items() if re.search(foreign, text)] == []
    assert '"qnmixer[train,dicom] @ file://' in texts[project / "pyproject.toml"]
    assert 'name = "nice-ct"' in texts[project / "pyproject.toml"]
    (path,) = project.rglob("*.ipynb")
    code = code_cells(path)
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)


BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.mark.slow
def test_its_wheel_trains_it_from_any_folder(project: Path, tmp_path: Path, warm: Warm) -> None:
    """Without a pyproject.toml that names its experiment, and with a folder of options that is typed."""
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(project, source)
    built = warm.run("-c", BUILD, str(tmp_path), cwd=source, env=environment())
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (tmp_path / "other" / "loss").mkdir(parents=True)
    (tmp_path / "other" / "loss" / "huge.yaml").write_text("_target_: qnmixer.losses.l1\n")
    words = ["--config-dir", "other", "loss=huge", "--cfg", "job"]
    path = environment(PYTHONPATH=f"{site}{os.pathsep}{new.PACKAGE.parent}")
    done = warm.run("-m", "nice_ct.train", *words, cwd=tmp_path, env=path)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert (config["model"]["_target_"], config["fit"]) == ("nice_ct.network.MyNetwork", "nice_ct.fit.fit")
    assert config["loss"]["_target_"] == "qnmixer.losses.l1"


SPLIT = """
from qnmixer.lightning import Split

class Smooth(Split):
    def __init__(self, weight, **others):
        super().__init__(**others)
        self.weight = weight

    def training_step(self, batch, batch_idx):
        image, losses = self.prediction(self.measure(batch, "train"))
        return (batch["weight"] * (losses + self.weight * image.diff(dim=-1).abs().mean((1, 2, 3)))).mean()
"""


def test_a_module_of_its_own_trains_without_truth(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On sinograms alone, with its own network and fit."""
    project = Path(shutil.copytree(project, tmp_path / "nice_ct"))
    (project / "src" / "nice_ct" / "smooth.py").write_text(SPLIT)
    (project / "scans").mkdir()
    bump = np.tile(100 * np.hanning(24), (8, 1))
    for k in range(3):
        np.save(project / "scans" / f"{k}.npy", bump + k)
    monkeypatch.syspath_prepend(project / "src")
    monkeypatch.chdir(project)
    words = ["data=sinograms", "data.root=scans", "data.unit=value", "monitor=val/residual", "trainer.max_steps=1"]
    words += ["data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24", "geometry.detector_pitch=40"]
    words += ["data.num_workers=0", "trainer.accelerator=cpu", "test_after_training=false", "hydra.run.dir=smooth"]
    trained = train(*words, "module=split", "module._target_=nice_ct.smooth.Smooth", "+module.weight=0.1")
    assert trained.best > 0
    module = importlib.import_module("nice_ct.smooth").Smooth.load_from_checkpoint(trained.checkpoint)
    assert module.hparams == {"parts": 2, "weight": 0.1}
    assert type(module.network).__module__ == "nice_ct.network"


@pytest.mark.slow
def test_it_trains_and_resumes_and_its_notebook_shows_the_run(project: Path, warm: Warm) -> None:
    """By its command, from its own folder, with nothing but KEY=VALUE."""

    sources = f"{project / 'src'}{os.pathsep}{new.PACKAGE.parent}"  # on the path, as an installed project is

    def python(*words: str) -> str:
        done = warm.run(*words, cwd=project, env=environment(PYTHONPATH=sources))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    tiny = ["data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24", "geometry.detector_pitch=40"]
    tiny += ["data.n_train=8", "data.n_held_out=2", "data.num_workers=0", "trainer.val_every_n_steps=2"]
    said = python("-m", "nice_ct.train", *tiny, "trainer.max_steps=2", "trainer.accelerator=cpu")
    assert "experiment=mine, model=nice_ct.network.MyNetwork" in said
    assert re.search(r"picture: \S+/evaluation/picture.png\n", said)
    python("-m", "nice_ct.train", "resume=latest", "trainer.max_steps=4")
    (record,) = project.glob("runs/*/*/results.json")
    assert (json.loads(record.read_text())["steps"], json.loads(record.read_text())["status"]) == (4, "done")
    (path,) = project.rglob("*.ipynb")
    script = "import os; os.chdir('notebooks')\n" + "\n".join("".join(cell["source"]) for cell in code_cells(path))
    assert "| Mine |" in python("-c", f"import matplotlib; matplotlib.use('Agg')\n{script}")
