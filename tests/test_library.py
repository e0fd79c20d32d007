"""`import qnmixer` in a user's program."""

import json
from pathlib import Path

import pytest
import torch

import qnmixer
from qnmixer.errors import CheckpointError, ConfigError, GeometryError, PluginError
from qnmixer.models import QNMixer
from qnmixer.reconstruction.checkpoints import encode
from qnmixer.reconstruction.reconstructor import Reconstructor
from qnmixer.train import train

from .conftest import PHANTOMS, TINY, other_config, tiny_config


def test_the_shipped_network_comes_with_its_scan(capsys: pytest.CaptureFixture[str]) -> None:
    network = qnmixer.load_pretrained()
    assert isinstance(network, QNMixer)
    assert not network.training
    geometry = network.projector.geometry
    assert (geometry.n_views, geometry.n_detectors, geometry.image_size) == (64, 512, 256)
    assert geometry.image_size * geometry.pixel_size == pytest.approx(400)
    # On another scan. With λ_t as trained it diverges here, to −100 dB.
    x = torch.from_numpy(qnmixer.phantom(256, seed=0, part="test", index=0))[None, None].clamp(-1000, 2000)
    x = (x + 1000) / 3000
    network = qnmixer.load_pretrained(n_views=48, passes=1)
    assert "geometry.n_views=64, not 48: its step sizes follow" in capsys.readouterr().out
    y = network.projector(x)
    with torch.no_grad():
        errors = [(image - x).square().mean() for image in (network(y), network.projector.fbp(y))]
    assert 10 * torch.log10(errors[1] / errors[0]) > 10


def test_an_empty_batch_is_refused_in_one_line() -> None:
    network = Reconstructor(tiny_config()).network
    for call, size in ((network, (8, 24)), (network.projector.fbp, (8, 24)), (network.projector, (16, 16))):
        with pytest.raises(GeometryError, match=r"an empty batch: give 1 .* or more"):
            call(torch.zeros(0, 1, *size))


def test_a_class_of_somebody_is_imported_only_if_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "somebodys.py").write_text("")
    path = tmp_path / "theirs.safetensors"
    config = other_config("model=learn")
    config.model.target = "somebodys.Network"
    path.write_bytes(encode(config, {"weight": torch.zeros(1)}))
    with pytest.raises(PluginError, match=r"add trust=somebodys$"):
        qnmixer.load_pretrained(str(path))
    with pytest.raises(PluginError, match="there is no Network in"):
        qnmixer.load_pretrained(str(path), trust=["somebodys"])


def test_train_returns_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained = train(*TINY, *PHANTOMS, "hydra.run.dir=runs/mine")
    record = json.loads((trained.folder / "results.json").read_text())
    assert (trained.folder, trained.monitor) == (tmp_path / "runs" / "mine", "val/psnr")
    assert trained.checkpoint == trained.folder / "checkpoints" / "best.ckpt"
    assert record["best"] == {trained.monitor: trained.best}
    assert record["overrides"] == [*TINY, *PHANTOMS]
    assert (trained.folder / ".hydra" / "overrides.yaml").is_file()
    assert qnmixer.load_pretrained(trained.folder).n_iterations == 2
    with pytest.raises(CheckpointError, match="is done"):
        train("resume=runs/mine")

    hydra, steps = trained.folder / ".hydra", f"trainer.max_steps={2 * record['steps']}"
    before = {path.name: path.read_bytes() for path in hydra.iterdir()}
    with pytest.raises(CheckpointError, match="resume= needs the same settings"):
        train("resume=runs/mine", steps, "model.channels=8")
    assert {path.name: path.read_bytes() for path in hydra.iterdir()} == before
    train("resume=runs/mine", steps)
    assert steps in (hydra / "overrides.yaml").read_text()
    assert [path.name for path in trained.folder.glob(".hydra*")] == [".hydra"]


def test_train_refuses_as_the_command_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for word, message in (("--multirun", "qnmixer.train -m$"), ("optimizer.lrr=1", "did you mean optimizer.lr")):
        with pytest.raises(ConfigError, match=message):
            train(word)
    assert not [*tmp_path.iterdir()]
