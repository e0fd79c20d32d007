"""`import qnmixer` in somebody's own program."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import qnmixer
from qnmixer.checkpoints.weights_file import encode
from qnmixer.config import Config
from qnmixer.errors import CheckpointError, PluginError
from qnmixer.models import QNMixer
from qnmixer.reconstructor import Reconstructor


def test_the_shipped_network_comes_with_its_scan() -> None:
    network = qnmixer.load_pretrained()
    assert isinstance(network, QNMixer)
    assert not network.training
    geometry = network.projector.geometry
    assert (geometry.n_views, geometry.n_detectors, geometry.image_size) == (64, 512, 256)
    assert geometry.image_size * geometry.pixel_size == pytest.approx(400)


def test_weights_of_ones_own_come_back(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Reconstructor(tiny_config())
    path = tmp_path / "mine.safetensors"
    path.write_bytes(encode(module.config, module.state_dict()))
    network = qnmixer.load_pretrained(path)
    y = network.projector(torch.rand(2, 1, 16, 16))
    assert y.shape == (2, 1, 8, 24)
    assert torch.equal(network(y), module.network(y))


def test_a_class_of_somebody_is_imported_only_if_trusted(
    other_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "somebodys.py").write_text("")
    path = tmp_path / "theirs.safetensors"
    config = other_config("model=custom", "model._target_=somebodys.Network")
    path.write_bytes(encode(config, {"weight": torch.zeros(1)}))
    with pytest.raises(PluginError, match=r"add trust=somebodys$"):
        qnmixer.load_pretrained(str(path))
    with pytest.raises(PluginError, match="there is no Network in"):
        qnmixer.load_pretrained(str(path), trust=["somebodys"])


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^no run folder at .*nothing"):
        qnmixer.load_pretrained(tmp_path / "nothing")
