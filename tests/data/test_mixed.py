"""Several sources in one training: shares, order, splits, and the same samples whatever runs them."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.folders import check_data
from qnmixer.errors import CheckpointError, ConfigError, DataError, PluginError
from qnmixer.evaluation.evaluate import evaluated_source
from qnmixer.evaluation.evaluate_run import as_trained
from qnmixer.reconstruction.sections import AsTrained
from qnmixer.settings.data import MixedData
from qnmixer.settings.run import section

N_PATIENTS, N_EACH = 5, 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders a and b, and c with fewer patients: a stack for each, whose slices have each their own value."""
    root = tmp_path_factory.mktemp("mixed")
    for name, offset, n_patients in (("a", 0, N_PATIENTS), ("b", 700, N_PATIENTS), ("c", 0, 3)):
        (root / name).mkdir()
        for k in range(n_patients):
            stack = np.full((N_EACH, 40, 40), -1000, np.float32)
            stack[:, 8:32, 8:24] = offset + 100 * k + np.arange(N_EACH)[:, None, None]
            np.save(root / name / f"{name}{k}.npy", stack)
    return root


def config_of(root: Path, changes: dict[str, dict[str, Any]] | None = None, **keys: Any) -> MixedData:
    """Two folders and phantoms. `changes`: other keys of sources."""
    phantoms = {"name": "phantoms", "share": 0.3, "n_val": 32, "n_test": 64, "anatomy_share": 0.85}
    sources: dict[str, dict[str, Any]] = {
        "slices": {"share": 0.5, "name": "numpy", "root": str(root / "a")},
        "phantoms": phantoms,
        "more": {"share": 0.2, "name": "numpy", "root": str(root / "b")},
    }
    for name, its in (changes or {}).items():
        sources[name] = sources.get(name, {}) | its
    data = section("data", "mixed", sources=sources, **{"image_size": 16, "num_workers": 0} | keys)
    check_data(data)
    return data


def mixed(root: Path, changes: dict[str, dict[str, Any]] | None = None, **keys: Any) -> SliceDataModule:
    return SliceDataModule(config_of(root, changes, **keys))


def epoch(data: SliceDataModule, number: int) -> list[Any]:
    loader: Any = data.train_dataloader()
    loader.sampler.set_epoch(number)
    return list(loader)


def source_of(name: str) -> str:
    return "phantoms" if "phantom" in name else name[0]


def test_an_epoch_has_the_first_source_once_and_of_the_others_their_shares(root: Path) -> None:
    data, seen = mixed(root), []
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
    assert data.describe() == (
        "data=mixed, 16 × 16: train 12 slices, val 2 slices of 1 patient, test 2 slices of 1 patient"
    )


def test_few_slices_are_of_all_sources_and_gone_through_again(root: Path) -> None:
    data = mixed(root, {"slices": {"root": str(root / "c"), "share": 0.1}, "more": {"share": 0.6}})
    names = [batch["name"][0] for batch in epoch(data, 1)]
    assert Counter(map(source_of, names)) == {"c": 2, "phantoms": 6, "b": 12}
    assert set(Counter(name for name in names if name[0] == "b").values()) == {2}  # it has fewer than its share


def test_a_source_without_a_share_may_be_for_validation_alone(root: Path) -> None:
    shares = {"slices": {"share": 0.0}, "phantoms": {"share": 1.0, "n_val": 3}, "more": {"share": 0}}
    data = mixed(root, shares)
    assert {source_of(batch["name"][0]) for batch in data.val_dataloader()} == {"a"}
    assert evaluated_source(data.config).name == "numpy"
    assert {source_of(data.dataset("train").source.name(k)) for k in range(4)} == {"phantoms"}


def test_workers_change_no_sample(root: Path) -> None:
    """Nor those of the finer grid."""
    keys: dict[str, Any] = {"augment": True, "simulation_factor": 2, "batch_size": 4}
    alone, helped = mixed(root, **keys), mixed(root, **keys | {"num_workers": 2})
    for one, other in zip(epoch(alone, 2), epoch(helped, 2), strict=True):
        assert one["name"] == other["name"]
        assert all(torch.equal(one[key], other[key]) for key in ("image", "fine", "sample"))
        assert one["fine"].shape == (4, 1, 32, 32)


BAD: dict[str, tuple[dict[str, dict[str, Any]], dict[str, Any]]] = {
    r"shares of data.sources \(slices 0.7, phantoms 0.3, more 0.2\) must add up to 1": ({"slices": {"share": 0.7}}, {}),
    r"data.sources.slices.name=dicm is not known: choose deeplesion, dicom": ({"slices": {"name": "dicm"}}, {}),
    r"image_size is the same for all sources: give it as data.image_size": ({"slices": {"image_size": 8}}, {}),
    r"data.evaluate_on=slice is no source: give one of data.sources": ({}, {"evaluate_on": "slice"}),
    r"no slices for train with data.split=all.*or share=0 \(data.sources.slices\)": ({"slices": {"split": "all"}}, {}),
    r"phantoms.share=0.01 gives no slice in an epoch of 6: raise it": (
        {"slices": {"share": 0.99}, "phantoms": {"share": 0.01}, "more": {"share": 0}}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("says", BAD)
def test_what_makes_no_sense_is_one_line(root: Path, says: str) -> None:
    changes, keys = BAD[says]
    with pytest.raises((ConfigError, DataError), match=says):
        mixed(root, changes, **keys).setup()


def test_one_folder_is_not_split_twice(root: Path) -> None:
    for folder in (root / "a", root):
        with pytest.raises(ConfigError, match=r"data.sources.more.root=.* has slices of data.sources.slices too"):
            mixed(root, {"more": {"root": str(folder)}})


def test_an_own_source_is_found_and_trusted_by_its_key(root: Path, tmp_path: Path) -> None:
    own = {"share": 0, "name": "custom", "_target_": "collections.Counter", "year": 2016}
    data = config_of(root, {"mine": own})
    changed = AsTrained(_target_=None, root=None, simulation_factor=None, disc=None)
    with pytest.raises(PluginError, match=r"names data.sources.mine._target_=collections.Counter.*trust=collections"):
        as_trained(str(tmp_path), changed, data)
    assert as_trained(str(tmp_path), changed, data, ["collections"]) == data
    with pytest.raises(CheckpointError, match=r"data.root=/a is for a run on one folder, but .* with data=mixed"):
        as_trained(str(tmp_path), changed.changed(root="/a"), data, ["collections"])
