import json
import re
from copy import deepcopy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from qnmixer.errors import CheckpointError, DataError, PluginError
from qnmixer.module import ReconstructionModule
from qnmixer.reconstruction import weights
from qnmixer.reconstruction.checkpoints import Checkpoint, encode, load_run, load_weights, resumable
from qnmixer.reconstruction.pretrained import decode, digest_of_weights
from qnmixer.reconstruction.weights import CHECKPOINT_KEY, PRETRAINED, SHIPPED, check_weights, find_checkpoint
from qnmixer.settings.data import MixedData
from qnmixer.settings.plugins import module_of
from qnmixer.settings.run import parse

from ..conftest import config_of, tiny_module
from ..public import PRIVATE
from .test_reading import refusal


def write(module: ReconstructionModule, path: Path) -> Path:
    path.write_bytes(encode(module.config, module.state_dict()))
    return path


@pytest.fixture
def module() -> ReconstructionModule:
    """Weights unlike those that a new network has."""
    module = tiny_module("geometry.n_views=6", "noise=field")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.01)
    return module


def test_a_network_comes_back_as_it_was(module: ReconstructionModule, tmp_path: Path) -> None:
    path = write(module, tmp_path / "a.safetensors")
    again = load_run(path)
    assert again.config == module.config.changed(callbacks={}, logger={})
    y = module.projector(torch.rand(2, 1, 16, 16))
    assert torch.equal(again(y), module(y))
    assert encode(module.config, again.state_dict()) == path.read_bytes()
    tensors = safetensors.torch.load_file(path)  # what any other program would read
    assert set(tensors) == set(module.state_dict())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()[CHECKPOINT_KEY])["config"]["model"]["_target_"] == "qnmixer.models.QNMixer"
    digest = digest_of_weights(module.state_dict())
    assert digest_of_weights(again.state_dict()) == digest
    with torch.no_grad():
        next(again.parameters()).add_(0.01)
    assert digest_of_weights(again.state_dict()) != digest


FOLDER = [
    "data=dicom", "data.root=/home/secret/ct", "data.cache_dir=/home/secret/cache", "data.include='*/secret/*'",
    "data.split=explicit", "data.train_patients=[secret1]", "data.val_patients=[secret2]",
    "data.test_patients=[secret3]", "finetune=/home/secret/run", "logger=wandb", "logger.wandb.entity=secret",
]  # fmt: skip
CUSTOM = ["data=custom", "data._target_=collections.Counter", "+data.root=/home/secret", "resume=/secret"]

MIXED = [
    "data=mixed", "data.sources.slices.root=/home/secret", "data.sources.slices.split=explicit",
    "+data.sources.slices.val_patients=[secret]",
    "+data.sources.mine={share: 0, name: custom, _target_: collections.Counter, place: /secret}",
]  # fmt: skip


@pytest.mark.parametrize("overrides", [FOLDER, CUSTOM, MIXED], ids=["folder", "custom", "mixed"])
def test_nothing_of_the_machine_or_the_patients_goes_along(overrides: list[str], tmp_path: Path) -> None:
    config = config_of(*overrides, "data.image_size=32", "data.hu_max=1500")
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode(config, {}))
    assert b"secret" not in path.read_bytes()
    again = Checkpoint(path).config
    assert (again.data.name, again.data.image_size, again.data.hu_max) == (config.data.name, 32, 1500)
    assert (again.model, again.geometry, again.noise) == (config.model, config.geometry, config.noise)
    assert parse(again.plain()) == again
    if isinstance(config.data, MixedData):
        assert again.data.shares == config.data.shares
        assert again.data.sources["slices"]["split"] == "explicit"


@pytest.mark.parametrize("target", ["os.system", "qnmixer.physics.FanBeamProjector"])
def test_what_a_file_names_is_looked_at_before_it_is_called(tmp_path: Path, target: str) -> None:
    plain = config_of().plain()
    plain["model"]["_target_"] = plain["optimizer"]["_target_"] = plain["loss"]["_target_"] = target
    torch.save({CHECKPOINT_KEY: {"config": plain}, "state_dict": {}}, tmp_path / "a.ckpt")
    if not target.startswith("qnmixer."):
        with pytest.raises(PluginError, match=f"which is not part of qnmixer: .* add trust={module_of(target)}"):
            load_run(tmp_path / "a.ckpt")
    with pytest.raises((PluginError, CheckpointError), match=r"is not a subclass of qnmixer\.models\.UnrolledNetwork"):
        load_run(tmp_path / "a.ckpt", trust=[module_of(target)])


def test_files_of_other_programs(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for metadata in (None, {"format": "pt"}, {CHECKPOINT_KEY: "3"}, {CHECKPOINT_KEY: "{}"}):
        safetensors.torch.save_file({"weight": torch.zeros(3)}, path, metadata)
        assert "another program: use one that qnmixer.export wrote" in refusal(path)
    safetensors.torch.save_file({"weight": torch.zeros(3)}, path, {CHECKPOINT_KEY: "{"})
    assert "cannot be read" in refusal(path)


def test_a_run_starts_from_it_none_resumes(module: ReconstructionModule, tmp_path: Path) -> None:
    path, other = write(module, tmp_path / "a.safetensors"), tiny_module("noise=none", "geometry.n_views=6")
    load_weights(other, path)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), module.parameters(), strict=True))
    with pytest.raises(CheckpointError, match=r"without the optimizer state .* finetune="):
        resumable(module.config, path)


FURTHER = "step_sizes.2, step_sizes.3, details.2.*, details.3.*, trust.1, trust.2"
CHANGED = {
    "false model.n_iterations=4": f"new: {FURTHER}",
    "repeat model.n_iterations=4": f"the last iteration again: {FURTHER}",
    "false model.n_iterations=1": "left out: details.1.*, step_sizes.1, trust.*",
    "false model.hessian=identity data.image_size=32": "left out: trust.*",
    "false model.detail_channels=8": "of another shape: regularizers.0.expansion.*, details.0.first.*",
}


@pytest.mark.parametrize("words", CHANGED)
def test_a_changed_network_starts_from_the_weights_that_fit(
    module: ReconstructionModule, tmp_path: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, (strict, *overrides) = write(module, tmp_path / "a.safetensors"), words.split()
    other = tiny_module("geometry.n_views=12", *overrides)
    with pytest.raises(CheckpointError, match="load what fits with finetune_strict=false"):
        load_weights(other, path)
    before, saved = deepcopy(other.network.state_dict()), module.network.state_dict()
    load_weights(other, path, "repeat" if strict == "repeat" else False)
    n_loaded, n_all = 0, 0
    factor = float(other.network.step_sizes[0][0].detach() / module.network.step_sizes[0][0].detach())
    assert factor == pytest.approx(other.projector.safe_step_size() / module.projector.safe_step_size(), rel=1e-3)
    for name, value in other.network.state_dict().items():
        further = re.fullmatch(r"(details|step_sizes|trust)\.[123](.*)", name) if strict == "repeat" else None
        old = name if further is None else f"{further[1]}.{0 if further[1] == 'trust' else 1}{further[2]}"
        fits = old in saved and saved[old].shape == value.shape
        expected = saved[old] * (factor if name.startswith("step_sizes") else 1) if fits else before[name]
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
        n_all, n_loaded = n_all + value.numel(), n_loaded + fits * value.numel()
    share, *lists, scan = capsys.readouterr().out.splitlines()
    assert share.endswith(f" % of the weights ({n_loaded:,} of {n_all:,}) are those of {path}")
    assert [line for line in lists if line.startswith(f"  {CHANGED[words]}")], lists
    assert f"n_views=6, not 12: its step sizes follow the scan, × {factor:.4g}" in scan
    other.network = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match="has no weight that fits this network by name and shape"):
        load_weights(other, path, False)


def test_pretrained_is_what_the_package_ships(
    module: ReconstructionModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights, "SHIPPED", tmp_path / "shipped.safetensors")
    with pytest.raises(CheckpointError, match=r"ships no weights \(shipped.safetensors is missing\): give a run"):
        check_weights("run", PRETRAINED)
    write(module, weights.SHIPPED)
    check_weights("run", PRETRAINED)
    assert load_run(PRETRAINED).config == module.config.changed(callbacks={}, logger={})
    with pytest.raises(CheckpointError, match="no run folder at pretrained"):
        load_run(Path(f"./{PRETRAINED}"))
    Path(PRETRAINED).mkdir()
    check_weights("run", f"./{PRETRAINED}")
    with pytest.raises(CheckpointError, match="pretrained has no checkpoints"):
        load_run(f"./{PRETRAINED}")
    with pytest.raises(DataError, match=r"finetune=elsewhere does not exist: .* the word pretrained"):
        check_weights("finetune", "elsewhere")


def test_files_name_what_is_public(module: ReconstructionModule) -> None:
    """A checkpoint with most kinds of targets in it, a weights file, and the weights that are shipped."""
    trained = tiny_module("callbacks=ema", "logger=[csv,wandb]", "metrics=rmse_hu")
    trained.settings["data"] = config_of("data=dicom", "data.root=.").data.plain()
    checkpoint = {"state_dict": trained.state_dict(), "epoch": 1}
    trained.on_save_checkpoint(checkpoint)
    settings = json.dumps(checkpoint[CHECKPOINT_KEY])
    assert "qnmixer.lightning.EMA" in settings
    assert "qnmixer.data.DicomReader" in settings
    exported, shipped = encode(module.config, {}).decode(errors="replace"), json.dumps(decode(SHIPPED)[CHECKPOINT_KEY])
    assert [PRIVATE.findall(text) for text in (settings, exported, shipped)] == [[], [], []]


@pytest.mark.skipif(not SHIPPED.is_file(), reason="no weights are shipped")
def test_what_is_shipped_is_for_256_pixels_and_64_views_and_has_its_card() -> None:
    config, state = (file := Checkpoint(find_checkpoint(PRETRAINED))).config, file.state
    assert (config.model.name, config.data.image_size, config.geometry.n_views) == ("qn_mixer", 256, 64)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())
    text = SHIPPED.with_suffix(".md").read_text()
    assert f"`{SHIPPED.name}`: {sum(tensor.numel() for tensor in state.values()):,} parameters" in text
    assert "## Where it fails" in text
