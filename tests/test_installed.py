"""What a base installation can do, and the one line where an extra is missing. Its packages are hidden here."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import qnmixer
from qnmixer.errors import CheckpointError, ConfigError, GeometryError
from qnmixer.installed import PACKAGES
from qnmixer.reconstruction.checkpoints import encode, load_run
from qnmixer.reconstruction.pretrained import load_network
from qnmixer.reconstruction.reconstructor import Reconstructor, on_scan
from qnmixer.reconstruction.weights import CHECKPOINT_KEY
from qnmixer.settings.options import options
from qnmixer.steps import config_of

from .conftest import PHANTOMS, TINY, environment, python
from .heavy import path_hiding
from .limits import within_limits
from .pages import ROOT
from .warm import Warm

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HYDRAS = ["hydra_plugins.hydra_optuna_sweeper"]
NAMES = {"hydra": "hydra-core", "yaml": "PyYAML", "gdcm": "python-gdcm", "PIL": "Pillow"}
"""Packages whose distributions have another name."""


def test_the_base_is_small_and_every_extra_brings_its_packages() -> None:
    assert len(PROJECT["dependencies"]) <= 1 + 6
    for extra, packages in PACKAGES.items():
        brought = {re.split(r"[<>=!]", it)[0] for it in PROJECT["optional-dependencies"][extra]}
        assert {NAMES.get(package, package) for package in packages} <= brought


BASE = """
import sys, torch, qnmixer
from qnmixer.models import LEARN
from qnmixer.physics import FanBeamGeometry, FanBeamProjector, FieldNoise
x = torch.from_numpy(qnmixer.phantom(16, seed=1, part="test", index=0))[None, None].clamp_min(-1000) / 1000 + 1
A = FanBeamProjector(FanBeamGeometry.paper(n_views=8, image_size=16))
LEARN(A, n_iterations=1)(FieldNoise()(A(x), [(1, 2, 3)])).sum().backward()
network = qnmixer.load_pretrained(n_views=48)
print(type(network).__name__, network.projector.geometry.n_views)

from qnmixer.data import NumpyReader, PhantomSource
for name in ("DeepLesionReader", "DicomReader", "MixedSource"):
    try:
        exec(f"from qnmixer.data import {name}")
    except ImportError as error:
        print(error)
assert sys.excepthook is sys.__excepthook__
from qnmixer.data import SliceDataModule
"""


@pytest.mark.slow
def test_physics_models_and_trained_networks_need_the_base_only_and_slices_are_an_import_error(tmp_path: Path) -> None:
    """Of a program, whose hook for errors stays its own."""
    hidden = {package for packages in PACKAGES.values() for package in packages}
    done = python(tmp_path, "-c", BASE, PYTHONPATH=path_hiding(tmp_path, hidden))
    line, cures, name, *refusals = done.stdout.splitlines()
    assert name == "QNMixer 48"
    assert line.startswith("the network was trained with geometry.n_views=64, not 48: its step sizes follow the scan, ")
    assert cures.startswith("data steps spread: ")
    assert done.returncode == 1
    heading, *_, uncaught = done.stderr.splitlines()
    assert heading == "Traceback (most recent call last):"  # and nothing before it
    assert uncaught.startswith("qnmixer.installed.NotInstalled: ")
    refusals.append(uncaught.partition(": ")[2])
    for name, line in zip(["DeepLesionReader", "DicomReader", "MixedSource", "SliceDataModule"], refusals, strict=True):
        assert line.startswith(f"qnmixer.data.{name} needs ")
        assert line.endswith('which is not installed: pip install "qnmixer[train]"')


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "words"), [
    ("train", ["qnmixer.train"]),
    ("train", ["qnmixer.new", "mine"]),
    pytest.param("train", ["qnmixer.compare"], marks=pytest.mark.extras),
    ("dicom", ["qnmixer.train", "data=dicom", "data.root=."]),
    ("dicom", ["qnmixer.evaluate", "run=pretrained", "data=dicom", "data.root=."]),
    ("dicom", ["qnmixer.reconstruct", "run=pretrained", "input=.", "output=out"]),
    ("tensorboard", ["qnmixer.train", "logger=[csv,tensorboard]"]),
    ("mlflow", ["qnmixer.train", "logger=mlflow"]),
    ("hub", ["qnmixer.evaluate", "run=hf://mine/own"]),
    ("search", ["qnmixer.train", "-m", "hydra/sweeper=search", "seed=1,2"]),
], ids=str)  # fmt: skip
def test_without_an_extra_a_command_is_one_line(tmp_path: Path, cold: Warm, extra: str, words: list[str]) -> None:
    path = path_hiding(tmp_path, PACKAGES.get(extra, HYDRAS))
    if extra in ("train", "search"):  # which the server has loaded
        done = python(tmp_path, "-m", *words, PYTHONPATH=path)
    else:
        done = cold.run("-m", *words, cwd=tmp_path, env=environment(PYTHONPATH=path))
    assert (done.returncode, done.stdout) == (1, "")
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["sitecustomize.py"]
    (line,) = done.stderr.splitlines()
    assert line.endswith(f'which is not installed: pip install "qnmixer[{extra}]"')


@pytest.mark.long
def test_data_without_dicom_trains(tmp_path: Path) -> None:
    words = ["-m", "qnmixer.train", *TINY, *PHANTOMS, "hydra.run.dir=run"]
    done = python(tmp_path, *words, PYTHONPATH=path_hiding(tmp_path, PACKAGES["dicom"][:2]))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_script_of_a_command_without_an_extra_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "qnmixer-train").write_text("from qnmixer.train import main\nmain()\n")
    done = python(tmp_path, "qnmixer-train", PYTHONPATH=path_hiding(tmp_path, PACKAGES["train"]))
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith("error: this part of qnmixer needs ")


SCAN = [word for word in TINY if not word.startswith("model.")]
SMALL = {
    "fbp": [], "fbpconvnet": ["channels=4", "depth=3"], "itnet": ["channels=4", "depth=2", "n_iterations=2"],
    "regformer": ["channels=6", "window_size=4", "n_iterations=2"],
}  # fmt: skip
"""Arguments of small networks; of the others two iterations of four channels."""


@pytest.mark.parametrize("name", [name for name in options("model") if name != "tv"])
def test_a_file_gives_the_same_network_with_the_base_and_with_all(tmp_path: Path, name: str) -> None:
    words = [f"model.{word}" for word in SMALL.get(name, ["channels=4", "n_iterations=2"])]
    _, path = save(tmp_path, f"model={name}", *words)
    assert_same(load_network(path), load_run(path).network)


def save(folder: Path, *words: str) -> tuple[Reconstructor, Path]:
    """A network with random weights, and its weights file."""
    module = Reconstructor(config_of(*words, *SCAN))
    (folder / "a.safetensors").write_bytes(encode(module.config, module.state_dict()))
    return module, folder / "a.safetensors"


def assert_same(network: Any, whole: Any) -> None:
    """Two networks of the same class give the same images of the same scan."""
    assert type(network) is type(whole)
    assert network.projector.geometry == whole.projector.geometry
    assert network.projector.fbp_filter == whole.projector.fbp_filter
    y = torch.rand(1, 1, whole.projector.geometry.n_views, 24)
    with torch.no_grad():
        assert torch.equal(network(y), whole(y))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Reconstructor, Path]:
    """A small network of the default, and its weights file."""
    return save(tmp_path, "model=qn_mixer", "model.channels=4", "model.n_iterations=2")


def test_what_needs_more_than_the_base_is_left_to_the_whole(tmp_path: Path) -> None:
    """Total variation needs the noise of its run, and a part of one's own its trust."""
    path = tmp_path / "a.safetensors"
    for words in (["model=tv"], ["model=qn_mixer", "model.channels=4"]):
        module = Reconstructor(config_of(*words, *SCAN))
        if words[0] == "model=qn_mixer":
            module.config.model.__pydantic_extra__["regularizer"] = {"_target_": "my_file.Net", "_partial_": True}
        path.write_bytes(encode(module.config, module.state_dict()))
        assert load_network(path) is None


@pytest.mark.parametrize(("section", "key", "value"), [
    ("model", "n_iterations", 10**9), ("model", "n_iterations", "2"), ("model", "codec", "other"),
    ("model", "strange", 1), ("model", "_target_", "qnmixer.models.Nothing"), ("model", "channels", 1024),
    ("data", "image_size", 65536), ("geometry", "n_views", 10**9), ("geometry", "beam", [1]),
])  # fmt: skip
def test_a_file_that_somebody_made_is_refused_in_a_line(saved: Any, section: str, key: str, value: Any) -> None:
    module, path = saved[0], saved[1].with_suffix(".ckpt")
    config = module.config.plain()
    config[section][key] = value
    torch.save({CHECKPOINT_KEY: {"config": config}, "state_dict": module.state_dict()}, path)
    with within_limits(), pytest.raises(CheckpointError) as error:
        qnmixer.load_pretrained(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changes", [
    {}, {"n_views": 8}, {"n_views": 6}, {"fbp_filter": "hann"}, {"angle_span": 3.5, "first_angle": None},
], ids=str)  # fmt: skip
def test_another_scan_is_the_same_with_the_base_and_with_all(
    saved: tuple[Reconstructor, Path], changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    trained, path = saved
    network = load_network(path, **changes)
    line = capsys.readouterr().out
    whole = on_scan(trained, trained.config.changed(geometry=trained.config.geometry.changed(**changes))).network
    assert capsys.readouterr().out == line
    assert bool(line) == (changes not in ({}, {"n_views": 8}))
    assert_same(network, whole)


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"views": 6}, ConfigError, "geometry has no key views: did you mean n_views"),
    ({"n_views": 6.5}, ConfigError, "geometry.n_views=6.5 must be a whole number"),
    ({"n_views": True}, ConfigError, "geometry.n_views=True must be a whole number"),
    ({"beam": 3}, ConfigError, "geometry.beam=3 must be text"),
    ({"beam": "cone"}, GeometryError, "beam='cone'"),
    ({"fbp_filter": "best"}, ConfigError, "best"),
    ({"n_views": 10**9}, GeometryError, "n_views"),
    ({"field_of_view": float("nan")}, GeometryError, "pixel_size"),
    ({"source_to_axis": 1.0}, GeometryError, "source_to_axis"),
])  # fmt: skip
def test_a_scan_that_is_none_is_one_line(saved: Any, changes: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)) as refused:
        load_network(saved[1], **changes)
    assert "\n" not in str(refused.value)
