"""Files that qnmixer wrote before its classes had public names."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qnmixer.module import ReconstructionModule
from qnmixer.reconstruction.checkpoints import encode, load_run, read_checkpoint
from qnmixer.reconstruction.weights import CHECKPOINT_KEY, SHIPPED
from qnmixer.settings.compose import compose
from qnmixer.settings.plugins import with_public_names
from qnmixer.settings.run import parse

from ..public import PRIVATE

OF_BEFORE = Path(__file__).with_name("of_36f56d30.ckpt")
"""Written by commit 36f56d30: two steps of the smallest network on phantoms, with callbacks=ema."""


@pytest.mark.parametrize("path", [OF_BEFORE, SHIPPED], ids=lambda path: path.suffix)
def test_they_load(path: Path) -> None:
    config, _ = read_checkpoint(path)
    assert not PRIVATE.search(json.dumps(config.plain()))
    network = load_run(path).network
    geometry = network.projector.geometry
    assert network(torch.zeros(1, 1, geometry.n_views, geometry.n_detectors)).isfinite().all()


def test_files_of_today_name_what_is_public(tiny_module: Callable[..., ReconstructionModule]) -> None:
    module = tiny_module("callbacks=ema", "logger=[csv,wandb]", "metrics=rmse_hu")
    module.settings["data"] = parse(compose("train", ["data=dicom", "data.root=."])).data.plain()
    checkpoint = {"state_dict": module.state_dict(), "epoch": 1}
    module.on_save_checkpoint(checkpoint)
    settings = json.dumps(checkpoint[CHECKPOINT_KEY])
    assert "qnmixer.lightning.EMA" in settings
    assert "qnmixer.data.DicomReader" in settings
    assert not PRIVATE.search(settings)
    assert not PRIVATE.search(encode(module.config, module.state_dict()).decode("utf-8", "replace"))


def test_names_of_before_are_renamed_at_any_depth() -> None:
    before = {
        "data": {"sources": {"slices": {"_target_": "qnmixer.engine.data.numpy_files.NumpyReader", "root": None}}}
    }
    after = {"data": {"sources": {"slices": {"_target_": "qnmixer.data.NumpyReader", "root": None}}}}
    assert with_public_names(before) == after
