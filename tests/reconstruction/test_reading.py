import copy
import pickle
import random
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.limits import within_limits

from qnmixer.data.splits import PARTS
from qnmixer.errors import CheckpointError
from qnmixer.measurement.build import build_geometry, build_network
from qnmixer.reconstruction.checkpoints import Checkpoint, encode, load_run, resumable
from qnmixer.reconstruction.pretrained import Outline, load
from qnmixer.reconstruction.weights import CHECKPOINT_KEY, RUN_KEY, find_checkpoint

from ..conftest import TINY, config_of, other_config, tiny_module
from ..promises.test_resuming import assert_equal
from ..saved import checkpoint_of


@pytest.fixture
def checkpoint() -> dict[str, Any]:
    """That of a small network, for tests to change."""
    return checkpoint_of(tiny_module())


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        _ = Checkpoint(find_checkpoint(path)).config
    message = str(error.value)
    assert "\n" not in message
    assert str(path) in message
    return message


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("touch hacked",)


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_code_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.ckpt"
    if protocol == "torch":
        torch.save({"state_dict": {}, CHECKPOINT_KEY: Malicious()}, path)
    else:
        path.write_bytes(pickle.dumps(Malicious()))
    assert "use one that qnmixer.train wrote" in refusal(path)
    assert not (tmp_path / "hacked").exists()


def test_checkpoints_of_other_programs(tmp_path: Path) -> None:
    contents: list[object] = [
        {"state_dict": {}, "epoch": 3}, {"model": {}}, {CHECKPOINT_KEY: 3, "state_dict": {}}, [1, 2], torch.zeros(3),
        {CHECKPOINT_KEY: {"format": 1, "config": {}}}, {CHECKPOINT_KEY: {"format": 1}, "state_dict": {}},
    ]  # fmt: skip
    of_ours = [(config, {}) for config in (None, [1, 2], "text")] + [({}, state) for state in (None, [1, 2], {"a": 3})]
    contents += [{CHECKPOINT_KEY: {"format": 1, "config": config}, "state_dict": state} for config, state in of_ours]
    for content in contents:
        torch.save(content, tmp_path / "a.ckpt")
        assert "another program" in refusal(tmp_path / "a.ckpt")


def test_a_folder_may_move_before_a_run_is_resumed(tmp_path: Path) -> None:
    config = config_of(*TINY, "data=numpy", "data.root=/old")
    checkpoint: dict[str, object] = {"state_dict": {}}
    checkpoint[CHECKPOINT_KEY] = {"format": 1, "config": config.plain()}
    torch.save(checkpoint, tmp_path / "a.ckpt")
    for change, refused in (({"root": "/new", "num_workers": 1}, False), ({"split": "all"}, True)):
        now = config.changed(data=config.data.changed(**change))
        with pytest.raises(CheckpointError, match="split=random, not all") if refused else nullcontext():
            resumable(now, tmp_path / "a.ckpt")


def damaged(content: bytes, number: int) -> bytes:
    """The same with one bit turned over; of every tenth one is cut, and one has a block of zeros."""
    rng, changed = random.Random(number), bytearray(content)
    if number % 10 == 8:
        return content[: (30, 1000, len(content) // 2, len(content) - 1, rng.randrange(len(content)))[number // 10]]
    if number % 10 == 9:
        first = rng.randrange(len(content))
        changed[first : first + 512] = bytes(len(changed[first : first + 512]))
    else:
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_damage_is_reported_or_changes_nothing(tmp_path: Path, kind: str) -> None:
    """Also in what only resume reads, such as the state of the optimizer. 50 times, seeded."""
    module, path = tiny_module(), tmp_path / f"a.{kind}"
    if kind == "safetensors":
        path.write_bytes(encode(module.config, module.state_dict()))
    else:
        torch.save(checkpoint_of(module) | {"optimizer_states": {"momentum": torch.rand(5000)}}, path)
    whole = load(path)
    content, told = path.read_bytes(), list[str]()
    for number in range(50):
        path.write_bytes(damaged(content, number))
        with within_limits():
            try:
                _ = Checkpoint(path).config
            except CheckpointError as error:
                told.append(str(error))
            else:
                assert_equal(load(path), whole)
        if number % 10 == 8:
            assert told[-1] == f"{path} cannot be read (it is not whole): it is damaged or no checkpoint"
    assert len(told) > (40 if kind == "safetensors" else 15)
    assert not any("\n" in line for line in told)


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path: Path, checkpoint: dict[str, Any]) -> None:
    """torch.load unpacks what is compressed: of 3 MB it would make 3 GB."""
    torch.save(checkpoint | {"more": torch.zeros(1000)}, tmp_path / "plain.ckpt")
    with zipfile.ZipFile(tmp_path / "plain.ckpt") as plain, zipfile.ZipFile(tmp_path / "a.ckpt", "w") as packed:
        for entry in plain.infolist():
            packed.writestr(entry, plain.read(entry), zipfile.ZIP_DEFLATED)
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["more"].shape == (1000,)
    assert "larger when unpacked" in refusal(tmp_path / "a.ckpt")


@pytest.mark.parametrize("record", [
    3,
    {"split": "text"},
    {"split": {part: {"patients": torch.ones(2), "slices": torch.ones(2)} for part in PARTS}},
    {"split": {part: {"patients": torch.ones(1, 2).long(), "slices": torch.ones(2).long()} for part in PARTS}},
], ids=str)  # fmt: skip
def test_an_unreadable_record_of_a_split_is_refused(tmp_path: Path, checkpoint: dict[str, Any], record: object) -> None:
    torch.save(checkpoint | {RUN_KEY: record}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"a\.ckpt has a record of its training patients that cannot be read"):
        _ = Checkpoint(tmp_path / "a.ckpt").split


def test_weights_of_another_type_are_refused(tmp_path: Path, checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"] = {name: it.to(torch.complex64) for name, it in checkpoint["state_dict"].items()}
    torch.save(checkpoint, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"a\.ckpt has complex64 weights"):
        load_run(tmp_path / "a.ckpt")


def test_a_config_that_somebody_made_is_refused_before_anything_is_built(
    tmp_path: Path, checkpoint: dict[str, Any]
) -> None:
    good, path = copy.deepcopy(checkpoint), tmp_path / "a.ckpt"
    odd: dict[str, list[object]] = {
        "geometry": [[1, 2]], "model": [None], "data": ["numpy"], "noise": [{"_target_": 3}], "seed": ["${evil:1}"],
        "geometry.n_detectors": [1_000_000_000], "geometry.n_views": [20_000], "model.n_iterations": [1_000_000_000],
        "model.channels": [100_000], "data.image_size": [65_536], "model.codec": [{"a": [None]}, "${model.codec}"],
        "model.gates": [3],
    }  # fmt: skip
    for key, values in odd.items():
        for value in values:
            checkpoint = copy.deepcopy(good)
            section, _, name = f"config.{key}".rpartition(".")
            place = checkpoint[CHECKPOINT_KEY]
            for part in section.split("."):
                place = place[part]
            place[name] = value
            torch.save(checkpoint, path)
            message = refusal(path)
            assert "another version of qnmixer" in message
            assert key in message


@pytest.mark.parametrize("overrides", [
    "model.n_iterations=1000 model.channels=1024 model.n_mixer_layers=1000 model.shared_regularizer=false",
    "data.image_size=256 model.patch_size=256 model.channels=1024",  # 60 TB at once
    "model=learn model.n_iterations=2 model.channels=1024",
])  # fmt: skip
def test_a_network_that_is_larger_than_its_file_is_not_built(tmp_path: Path, overrides: str) -> None:
    """The config of a small file may ask for terabytes. The file says that it has them: they are views of a number."""
    config = other_config(*overrides.split())
    plain = config.plain()
    state = {"network.weight": torch.zeros(1).expand(10**12)}
    if "learn" in overrides:  # all the tensors that its config has
        with torch.device("meta"):
            network = build_network(config, Outline(build_geometry(config)))
        state = {f"network.{name}": torch.zeros(1).expand(p.shape) for name, p in network.state_dict().items()}
    torch.save({CHECKPOINT_KEY: {"format": 1, "config": plain}, "state_dict": state}, tmp_path / "a.ckpt")
    with within_limits(), pytest.raises(CheckpointError, match="do not fit its own config") as error:
        load_run(tmp_path / "a.ckpt")
    assert "\n" not in str(error.value)


def test_the_matrices_of_a_scan_wait_until_the_weights_fit(tmp_path: Path, checkpoint: dict[str, Any]) -> None:
    """The config of a small file may have image_size=2048: the matrices take 1 GB, and 20 s."""
    checkpoint[CHECKPOINT_KEY]["config"]["data"]["image_size"] = 2048
    torch.save(checkpoint, tmp_path / "a.ckpt")
    with within_limits(memory=2**28), pytest.raises(CheckpointError, match="do not fit its own config"):
        load_run(tmp_path / "a.ckpt")
