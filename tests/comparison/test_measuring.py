"""A comparison of one job of a tiny network, written here, on folders of slices."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from qnmixer.engine.build import build_module
from qnmixer.engine.config.commands import parse_compare
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.data import FolderData
from qnmixer.engine.config.run import parse, to_plain
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.phantoms import phantom
from qnmixer.engine.reports.terminal import Console
from qnmixer.extras.comparison.compare import compare
from qnmixer.extras.comparison.methods import Comparison
from qnmixer.weights import CHECKPOINT_KEY, RUN_KEY

from ..conftest import TINY


def write_patient(folder: Path, number: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "slice.npy", phantom(16, seed=0, part="test", index=number))


@dataclass
class Sweep:
    """A sweep of one job, and the folder of slices that the job was trained on."""

    folder: Path
    slices: Path
    patients: dict[str, list[str]]  # by part: folders below `slices`

    def compare(self, root: Path) -> Comparison:
        words = ["accelerator=cpu", "tests=[mine]", "+sets.mine=['data=numpy','data.num_workers=0']", f"root={root}"]
        return compare(parse_compare(compose("compare", words)), [self.folder], Console(quiet=True))


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    folder, slices = tmp_path / "sweep", tmp_path / "ct"
    for number in range(4):
        write_patient(slices / f"patient{number}", number)
    overrides = [*TINY, "data=numpy", f"data.root={slices}"]
    module = build_module(parse(compose("train", overrides)))
    data = SliceDataModule(module.config.data)
    data.setup()
    ours = {"format": 1, "config": to_plain(module.config)}
    (folder / "0" / "checkpoints").mkdir(parents=True)
    torch.save(
        {"state_dict": module.state_dict(), CHECKPOINT_KEY: ours, RUN_KEY: {"split": data.split.record}},
        folder / "0" / "checkpoints" / "best.ckpt",
    )
    (folder / "0" / "results.json").write_text(json.dumps({"status": "done", "seconds": 1.0, "steps": 4}))
    described = {"overrides": [], "varying": [], "jobs": {"0": overrides}}
    (folder / "sweep.json").write_text(json.dumps(described))
    parts = {part: [its.source.name(k) for k in range(len(its.source))] for part, its in data.parts.items()}
    return Sweep(folder, slices, {part: [name.partition("/")[0] for name in names] for part, names in parts.items()})


def test_a_folder_is_tested_whole_and_training_slices_are_named(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the run's own folder only the test patient is."""
    for number, patient in enumerate("ab"):
        write_patient(tmp_path / "others" / patient, 10 + number)
    found = sweep.compare(tmp_path / "others")
    ours, fbp = found.methods if found.methods[0].jobs else reversed(found.methods)
    assert found.notes == []
    for method in (ours, fbp):
        (scores,) = method.measured["mine"].values()
        assert [score.slice for score in scores] == ["a/slice.npy", "b/slice.npy"]
        assert (method.cost["parameters"] > 0) == (method is ours)
    (first, second) = found.slices["mine"].values()
    for of in (first, second):
        assert [method.name for method in of.methods] == [method.name for method in reversed(found.methods)]
        assert len(next(method.iterates for method in of.methods if method.name == ours.name)) == 3

    (scores,) = sweep.compare(sweep.slices).methods[0].measured["mine"].values()
    assert [score.slice.partition("/")[0] for score in scores] == sweep.patients["test"]
    patient = sweep.slices / sweep.patients["train"][0]
    monkeypatch.setattr(FolderData, "own_range", True)
    found = sweep.compare(patient)
    assert found.notes == [
        "mine: data range of each reference, SSIM as skimage's",
        "mine, QN-Mixer: 1 of the slices were used in training: the scores are too good",
    ]
