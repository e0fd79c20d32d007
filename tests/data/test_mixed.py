"""Several sources in one training: shares, order, splits, and the same samples whatever runs them."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.errors import HydraException

from qnmixer.engine.checkpoints.reading import read_checkpoint
from qnmixer.engine.checkpoints.weights_file import encode
from qnmixer.engine.cli import explain
from qnmixer.engine.config import parse, to_plain
from qnmixer.engine.config.commands import parse_plan
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.data import AsTrained, FolderData, MixedData, check_data
from qnmixer.engine.config.run import section
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.mixed import counts_of
from qnmixer.engine.evaluation.slices import as_trained, kind_of, other_slices
from qnmixer.errors import CheckpointError, ConfigError, DataError, PluginError
from qnmixer.extras.model_card import _slices

N_PATIENTS, N_EACH = 5, 2


def ct(root: Path, offset: int = 0, n_patients: int = N_PATIENTS) -> Path:
    """Slices of 40 × 40, each of its own value, and for each patient a stack."""
    root.mkdir()
    for k in range(n_patients):
        values = offset + 100.0 * k + np.arange(N_EACH)
        stack = np.full((N_EACH, 40, 40), -1000, np.float32)
        stack[:, 8:32, 8:24] = values[:, None, None]
        np.save(root / f"{root.name}{k}.npy", stack)
    return root


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Overrides: two folders and phantoms."""
    return [
        "data=mixed", "data.sources.slices.name=numpy", f"data.sources.slices.root={ct(tmp_path / 'a')}",
        "data.sources.slices.share=0.5", "data.sources.phantoms.share=0.3",
        f"+data.sources.more={{share: 0.2, name: numpy, root: {ct(tmp_path / 'b', 700)}}}",
    ]  # fmt: skip


def mixed(overrides: list[str], *more: str, **arguments: Any) -> SliceDataModule:
    usual = ["data.image_size=16", "data.num_workers=0", "model.patch_size=4"]
    data = parse(compose("train", [*overrides, *usual, *more])).data
    check_data(data)
    return SliceDataModule(data, **arguments)


def epoch(data: SliceDataModule, number: int) -> list[Any]:
    loader: Any = data.train_dataloader()
    loader.sampler.set_epoch(number)
    return list(loader)


def source_of(name: str) -> str:
    return "phantoms" if "phantom" in name else name[0]


def test_an_epoch_has_the_first_source_once_and_of_the_others_their_shares(folders: list[str]) -> None:
    data, seen = mixed(folders), []
    n = 3 * N_EACH  # training slices of each folder: two of five patients validate and test
    for number in range(5):
        names = [batch["name"][0] for batch in epoch(data, number)]
        assert Counter(map(source_of, names)) == {"a": n, "phantoms": 4, "b": 2}  # 0.5, 0.3 and 0.2 of twelve
        assert len(set(names)) == 2 * n
        seen += names
    counts = Counter(seen)
    assert {counts[name] for name in counts if source_of(name) in "a"} == {5}
    assert len([name for name in counts if source_of(name) == "phantoms"]) == 20  # new ones every epoch
    assert sorted(counts[name] for name in counts if source_of(name) == "b") == [1, 1, 2, 2, 2, 2]  # each in turn
    assert mixed(folders).describe() == (
        "data=mixed, 16 × 16: train 12 slices an epoch (0.5 slices: 6 of 6 slices of 3 patients; 0.3 phantoms: "
        "4 new ones; 0.2 more: 2 of 6 slices of 3 patients), val 2 slices of 1 patient, test 2 slices of 1 patient"
    )


@pytest.mark.parametrize(
    ("shares", "lengths", "counts"),
    [
        ([0.8, 0.2], [100, 7], [100, 25]),
        ([0.7, 0.3], [122, 1000], [122, 52]),
        ([0.0, 1.0], [50, 30], [0, 30]),
        ([1.0], [3], [3]),
        ([1 / 3, 1 / 3, 1 / 3], [1, 9, 9], [1, 1, 1]),
    ],
)
def test_counts(shares: list[float], lengths: list[int], counts: list[int]) -> None:
    assert counts_of(shares, lengths) == counts


def test_a_source_with_fewer_slices_than_its_share_is_gone_through_again(folders: list[str], tmp_path: Path) -> None:
    few = f"data.sources.slices.root={ct(tmp_path / 'c', n_patients=3)}"
    data = mixed(folders, few, "data.sources.slices.share=0.1", "data.sources.more.share=0.6")
    names = [batch["name"][0] for batch in epoch(data, 1)]
    assert Counter(map(source_of, names)) == {"c": 2, "phantoms": 6, "b": 12}
    assert set(Counter(name for name in names if name[0] == "b").values()) == {2}


def test_first_slices_are_of_all_sources(folders: list[str]) -> None:
    names = [batch["name"][0] for batch in mixed(folders, first=6).train_dataloader()]
    assert Counter(map(source_of, names)) == {"a": 3, "phantoms": 2, "b": 1}


def test_few_training_slices_are_the_same_in_every_epoch(folders: list[str]) -> None:
    data = mixed(folders, "data.train_slices=5")
    first, later = (sorted(batch["name"][0] for batch in epoch(data, number)) for number in (0, 3))
    assert first == later
    assert len(first) == 5


def test_each_source_keeps_its_split(folders: list[str]) -> None:
    """The same patients as it has alone; none is in two parts."""
    data = mixed(folders, "data.evaluate_on=null", "+data.sources.more.val_fraction=0.4")
    patients: dict[str, set[str]] = {"train": set(), "val": set(), "test": set()}
    for part, seen in patients.items():
        for number in range(3):
            loader: Any = data.loader(part)
            loader.sampler.set_epoch(number)
            seen |= {name.partition(".npy")[0] for batch in loader for name in batch["name"] if "phantom" not in name}
    assert {part: len(seen) for part, seen in patients.items()} == {"train": 5, "val": 3, "test": 2}
    assert not patients["train"] & patients["val"]
    assert not (patients["train"] | patients["val"]) & patients["test"]
    root = next(value for value in folders if "slices.root" in value).partition("=")[2]
    alone = SliceDataModule(section("data", "numpy", root=root, image_size=16, num_workers=0, seed=data.config.seed))
    for part, seen in patients.items():
        assert {name.partition(".npy")[0] for batch in alone.loader(part) for name in batch["name"]} == {
            name for name in seen if name[0] == "a"
        }


@pytest.mark.parametrize(
    ("word", "kinds", "kind"),
    [("slices", {"a"}, "numpy"), ("phantoms", {"phantoms"}, "phantoms"), ("null", {"a", "b", "phantoms"}, "mixed")],
)
def test_what_is_measured_on(folders: list[str], word: str, kinds: set[str], kind: str) -> None:
    data = mixed(folders, f"data.evaluate_on={word}", "data.sources.phantoms.n_val=3")
    names = [name for batch in data.val_dataloader() for name in batch["name"]]
    assert {source_of(name) for name in names} == kinds
    assert len(set(names)) == len(names)
    assert kind_of(data.config) == kind


def test_a_source_for_validation_alone(folders: list[str]) -> None:
    data = mixed(folders, *(f"data.sources.{name}" for name in ("slices.share=0", "phantoms.share=1", "more.share=0")))
    assert {source_of(batch["name"][0]) for batch in epoch(data, 0)} == {"phantoms"}
    assert {source_of(batch["name"][0]) for batch in data.val_dataloader()} == {"a"}


def test_the_same_samples_however_they_are_shared_out(folders: list[str]) -> None:
    """Workers change no bit of them; turns follow (seed, sample), and so do those of the finer grid."""
    words = ("data.augment=true", "data.simulation_factor=2", "data.batch_size=4")
    alone, again, helped = mixed(folders, *words), mixed(folders, *words), mixed(folders, *words, "data.num_workers=2")
    plain = mixed(folders, *words, "data.augment=false")
    turned = 0
    for one, other, straight in zip(epoch(alone, 2), epoch(helped, 2), epoch(plain, 2), strict=True):
        assert one["name"] == other["name"] == straight["name"]
        for key in ("image", "fine", "sample"):
            assert torch.equal(one[key], other[key])
        assert one["fine"].shape == (4, 1, 32, 32)
        for i, n in enumerate(one["sample"].tolist()):
            assert torch.equal(again.dataset("train")[n]["image"], one["image"][i])
            pairs = zip(symmetries(straight["image"][i]), symmetries(straight["fine"][i]), strict=True)
            assert any(torch.equal(a, one["image"][i]) and torch.equal(b, one["fine"][i]) for a, b in pairs)
            turned += not torch.equal(straight["image"][i], one["image"][i])
    assert turned > 4
    val = [next(iter(data.val_dataloader()))["image"] for data in (alone, plain)]
    assert torch.equal(*val)


def symmetries(image: torch.Tensor) -> list[torch.Tensor]:
    turned = [torch.rot90(image, k, dims=(-2, -1)) for k in range(4)]
    return turned + [it.flip(-1) for it in turned]


BAD = {
    "data.sources.slices.share=0.7": r"shares of data.sources \(slices 0.7, phantoms 0.3, more 0.2\) add up to 1.2",
    "data.sources.slices.share=0.1": r"shares of data.sources \(.*\) add up to 0.6",
    "data.sources.slices.share=-0.1": r"data.sources.slices.share=-0.1 is not a share: give a number from 0 to 1",
    "data.sources.slices.share=most": r"data.sources.slices.share=most is not a share",
    "~data.sources.slices.share": r"data.sources.slices.share=None is not a share",
    "data.sources.slices.name=dicm": r"data.sources.slices.name=dicm is not known: did you mean dicom\?",
    "data.sources.slices.name=mixed": r"data.sources.slices.name=mixed is not known: choose deeplesion, dicom",
    "data.sources.slices.splitt=all": r"data.sources.slices.splitt",
    "data.sources.slices.split=alll": r"data.sources.slices.split=alll is not known: did you mean all\?",
    "data.sources.slices=3": r"data.sources.slices",
    "data.sources.slices.image_size=8": r"image_size is the same for all sources: give it as data.image_size",
    "data.evaluate_on=slice": r"data.evaluate_on=slice: did you mean slices\?, or null",
    "data.simulation_factor=3": r"data.simulation_factor=3 is too large: give 2 or less \(data.sources.phantoms",
    "data.sources.more.name=custom": r"data.sources.more._target_ has no value",
    "data.sources.more.root=/nowhere": r"data.sources.more.root=/nowhere",
    "data.sources.slices.root=null": r"data=numpy needs data.root=FOLDER.*\(data.sources.slices\)",
    "data.sources.slices.split=all": r"no slices for train with data.split=all.*\(data.sources.slices\)",
    "data.sources.slices.split=explicit data.sources.slices.val_patients=[x]": r"val_patients=x.*\(data.sources",
}


@pytest.mark.parametrize("words", BAD)
def test_what_makes_no_sense_is_one_line(folders: list[str], words: str) -> None:
    added = [f"+{word}" if word.startswith(("data.sources.slices.im", "data.sources.slices.splitt")) else word
             for word in words.split()]  # fmt: skip
    with pytest.raises((ConfigError, DataError), match=BAD[words]) as raised:
        mixed(folders, *added).setup()
    assert "\n" not in str(raised.value)


def test_a_share_of_nothing_is_refused(folders: list[str]) -> None:
    shares = [f"data.sources.{name}.share={share}" for name, share in
              (("slices", 0.99), ("phantoms", 0.01), ("more", 0))]  # fmt: skip
    with pytest.raises(DataError, match=r"phantoms.share=0.01 gives no slice in an epoch of 6: raise it"):
        mixed(folders, *shares).setup()


def test_one_folder_is_not_split_twice(folders: list[str], tmp_path: Path) -> None:
    for root in (tmp_path / "a", tmp_path):
        with pytest.raises(ConfigError, match=r"data.sources.more.root=.* has slices of data.sources.slices too"):
            mixed(folders, f"data.sources.more.root={root}")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["data=mixed", "data.sources.slices.splt=all"], "did you mean data.sources.slices.split?"),
        (["data.sources.slices.root=/ct"], "choose data=mixed, or add it to a source of your own as +data.sources"),
    ],
)
def test_a_misspelt_key_of_a_source(words: list[str], line: str) -> None:
    with pytest.raises(HydraException) as raised:
        compose("train", words)
    assert line in str(explain(raised.value, "train"))


def test_a_plan_needs_no_folder() -> None:
    config = parse_plan(compose("plan", ["data=mixed", "data.batch_size=3"]))
    assert config.run.data.batch_size == 3


def test_an_own_source_is_found_and_trusted_by_its_key(folders: list[str], tmp_path: Path) -> None:
    own = "+data.sources.mine={share: 0, name: custom, _target_: nowhere.Slices, year: 2016}"
    with pytest.raises(PluginError, match=r"data.sources.mine._target_=nowhere.Slices, but there is no module"):
        mixed(folders, own)
    data = mixed(folders, own.replace("nowhere.Slices", "collections.Counter")).config
    changed = AsTrained(_target_=None, root=None, simulation_factor=None, disc=None)
    with pytest.raises(PluginError, match=r"names data.sources.mine._target_=collections.Counter.*trust=collections"):
        as_trained(str(tmp_path), changed, data)
    assert as_trained(str(tmp_path), changed, data, ["collections"]) == data
    with pytest.raises(CheckpointError, match=r"data.root=/a is for a run on one folder, but .* with data=mixed"):
        as_trained(str(tmp_path), replace(changed, root="/a"), data, ["collections"])


def test_an_evaluation_of_its_folder_keeps_its_split(folders: list[str], tmp_path: Path) -> None:
    trained = parse(compose("train", [*folders, "+data.sources.more.split=all", "data.image_size=32"]))
    for folder, split in (("a", "random"), ("b", "all"), ("c", "all")):
        slices = section("data", "numpy", root=str(tmp_path / folder), simulation_factor=2)
        data, own = other_slices(slices, trained, [])
        assert own == (folder != "c")
        assert isinstance(data, FolderData)
        assert (data.split, data.simulation_factor, data.image_size) == (split, 2, 32)


def test_weights_files_name_no_folder_or_patient(folders: list[str], tmp_path: Path) -> None:
    secret = ["data.sources.more.root=/home/secret", "data.sources.slices.root=/secret", "+data.sources.mine="
              "{share: 0, name: custom, _target_: collections.Counter, root: /secret}",
              "data.sources.slices.split=explicit", "data.sources.slices.val_patients=[secret]"]  # fmt: skip
    config = parse(compose("train", [*folders, *secret]))
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode(config, {}))
    assert b"secret" not in path.read_bytes()
    training = _slices(config)
    assert training.startswith("50 % slices from files, data=numpy")
    assert "30 % phantoms drawn by this program, 256 × 256, new ones every epoch; 85 %" in training
    again, _ = read_checkpoint(path)
    assert isinstance(config.data, MixedData)
    assert isinstance(again.data, MixedData)
    assert again.data.shares == config.data.shares
    assert again.data.sources["slices"]["split"] == "explicit"
    assert parse(to_plain(again)) == again
