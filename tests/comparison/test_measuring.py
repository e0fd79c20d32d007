"""A comparison of one job of a tiny network, written here, on folders of slices."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from qnmixer.engine.build import build_module
from qnmixer.engine.config import parse, to_plain
from qnmixer.engine.config.commands import parse_compare
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.data import FolderData
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.phantoms import phantom
from qnmixer.engine.reconstructor import build_geometry
from qnmixer.extras.comparison import compare as measuring
from qnmixer.extras.comparison.compare import _identity, compare
from qnmixer.extras.comparison.methods import Comparison
from qnmixer.extras.comparison.report import tables_of
from qnmixer.weights import CHECKPOINT_KEY, RUN_KEY

from ..conftest import TINY
from ..sets import write_lodopab


def write_patient(folder: Path, number: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "slice.npy", phantom(16, seed=0, part="test", index=number))


@dataclass
class Sweep:
    """A sweep of one job, and the folder of slices that the job was trained on."""

    folder: Path
    slices: Path
    patients: dict[str, list[str]]  # by part: folders below `slices`

    def compare(self, root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Comparison, str]:
        words = ["accelerator=cpu", "tests=[mine]", "+sets.mine=['data=numpy','data.num_workers=0']", f"root={root}"]
        found = compare(parse_compare(compose("compare", words)), [self.folder], self.folder / "out", Console())
        return found, " ".join(capsys.readouterr().out.split())


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    monkeypatch.setattr(measuring, "git_commit", lambda: "the same")  # whatever is edited meanwhile
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
    described = {"overrides": [], "varying": [], "git_commit": None, "jobs": {"0": overrides}}
    (folder / "sweep.json").write_text(json.dumps(described))
    parts = {part: [its.source.name(k) for k in range(len(its.source))] for part, its in data.parts.items()}
    return Sweep(folder, slices, {part: [name.partition("/")[0] for name in names] for part, names in parts.items()})


def test_scores_are_measured_again_when_the_slices_change(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = tmp_path / "others"
    write_patient(others / "a", 10)
    write_patient(others / "b", 11)

    def psnrs(of: Path, *words: str) -> list[float]:
        comparison, said = sweep.compare(of, capsys)
        assert all(word in said for word in words), said
        (scores,) = comparison.methods[0].measured["mine"].values()
        assert ("of them before" in said) == ("(1 of them before)" in words)
        return [score.values["psnr"] for score in scores]

    first = psnrs(others, "1 jobs on 2 slices")
    assert psnrs(others, "(1 of them before)") == first
    write_patient(others / "c", 12)
    added = psnrs(others, "1 jobs on 3 slices")
    assert {*first} < {*added}
    write_patient(others / "c", 13)
    assert psnrs(others, "1 jobs on 3 slices") != added
    # The test patient of the run's own folder too: its name stays, its pixels change.
    before = psnrs(sweep.slices, "1 jobs on 1 slices")
    assert psnrs(sweep.slices, "(1 of them before)") == before
    write_patient(sweep.slices / sweep.patients["test"][0], 14)
    assert psnrs(sweep.slices, "1 jobs on 1 slices") != before


def test_sets_with_a_range_of_their_own_say_so(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FolderData, "own_range", True)
    found, _ = sweep.compare(sweep.slices, capsys)
    assert tables_of(found)[0].note.endswith("Data range of each reference, SSIM as skimage's.")


def test_a_public_set_is_known_by_its_files(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    config = parse(
        compose("train", ["data=lodopab", "geometry=lodopab", f"data.root={tmp_path}", "geometry.n_views=8"])
    )
    geometry = build_geometry(config)
    write_lodopab(tmp_path, geometry, {"test": 1})

    def identity() -> list[object]:
        return _identity(SliceDataModule(config.data, geometry=geometry), "test")

    before = identity()
    assert identity() == before
    write_lodopab(tmp_path, geometry, {"test": 1})  # with other times
    assert identity() != before


def test_a_test_on_training_slices_says_so(sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_patient(tmp_path / "others" / "a", 10)
    assert sweep.compare(tmp_path / "others", capsys)[0].notes == []
    patient = sweep.slices / sweep.patients["train"][0]
    for again in (False, True):
        comparison, said = sweep.compare(patient, capsys)
        assert ("(1 of them before)" in said) == again
        assert comparison.notes == ["mine, QN-Mixer: 1 of the slices were used in training: the scores are too good"]
