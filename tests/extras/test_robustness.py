"""`qnmixer.robustness` on an untrained network."""

import csv
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qnmixer import robustness
from qnmixer.engine.cli.command import TRACEBACK
from qnmixer.engine.tracking.records import read_results
from qnmixer.extras.export.card import evaluations
from qnmixer.models import UnrolledNetwork

from ..saved import TINY, save


class WeightOfEachView(UnrolledNetwork):
    """A network that knows one number of views only."""

    title = "Views"

    def __init__(self, projector, n_iterations, channels) -> None:
        super().__init__(1)
        self.projector = projector
        self.weight = torch.nn.Parameter(torch.ones(projector.geometry.n_views, 1))

    def start(self, y):
        return (self.projector.fbp(y * self.weight),)

    def step(self, t, y, state):
        return state


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["robustness", *words])
    monkeypatch.delenv(TRACEBACK, raising=False)
    try:
        robustness.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def rows_of(folder: Path) -> dict[tuple[str, str, str], float]:
    with (folder / "table.csv").open() as stream:
        return {(row["condition"], row["value"], row["method"]): float(row["psnr"]) for row in csv.DictReader(stream)}


WORDS = ["data=phantoms", "data.num_workers=0", "n_slices=1", "accelerator=cpu"]


def test_one_table_over_all_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline_runs: Callable[[Path], list[Any]]
) -> None:
    run, folder = save(tmp_path / "run", *TINY), tmp_path / "run" / "robustness"
    few = [
        "photons=[2.5e4,4e5]",
        "noises=[none]",
        "views=[2]",
        "field_of_view=[1.1]",
        "detector_offset=[1]",
        "source_distance=[200]",
    ]
    words = [f"run={run}", *WORDS, *few, "logger=wandb", "evaluation.tv_weight=null", f"hydra.run.dir={folder}"]
    assert command(monkeypatch, *words) == 0
    psnr = rows_of(folder)
    conditions = dict.fromkeys(condition for condition, _, _ in psnr)
    assert [*conditions] == [
        "noise", "dose, photons a ray", "views", "field of view, mm", "detector off by, bins", "source off by, mm",
    ]  # fmt: skip
    assert {name for _, _, name in psnr} == {"FBP", "QN-Mixer"}
    assert psnr["dose, photons a ray", "25000.0", "FBP"] < psnr["dose, photons a ray", "400000.0", "FBP"]
    reference = psnr["noise", "none", "FBP"]
    assert ("field of view, mm", "440.0", "FBP") in psnr
    assert psnr["source off by, mm", "200.0", "FBP"] < reference
    assert psnr["detector off by, bins", "1.0", "FBP"] < reference
    assert "| views 10 |" in (folder / "table.md").read_text()
    assert (folder / "robustness.png").stat().st_size > 10_000
    (logged,) = offline_runs(folder)
    names = {name for name in logged.metrics if name.startswith("robustness/")}
    assert {"robustness/dose_photons_a_ray_25000/fbp/psnr", "robustness/noise_as_trained/psnr"} <= names
    assert all(re.fullmatch(r"[\w./ :-]+", name) for name in names)  # MLflow refuses others
    assert [*evaluations(run, read_results(folder)["evaluated"]["weights"])] == [folder]  # the card gets the table
    assert command(monkeypatch, *words) == 1  # the folder is in use


def test_a_network_for_one_number_of_views_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"model._target_={__name__}.WeightOfEachView"
    scan = [word for word in TINY if not word.startswith("model.")]
    run, folder = save(tmp_path / "run", *scan, "model=custom", target), tmp_path / "out"
    few = ["noises=[]", "photons=[]", "field_of_view=[]", "detector_offset=[]", "source_distance=[]", "views=[2]"]
    words = [f"run={run}", *WORDS, *few, "logger=csv", f"trust={__name__}", f"hydra.run.dir={folder}"]
    assert command(monkeypatch, *words, "evaluation.tv_weight=null") == 0
    table = (folder / "table.md").read_text()
    assert "| views 10 | – | – |" in table
    assert "views 10: the network does not take it" in table


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("noises=[odd]", "noises=odd does not exist: choose "),
        ("photons=[0]", "photons"),
        ("views=[-64]", "n_views=0 should be greater than or equal to 1"),
        ("source_distance=[-900]", "source_to_axis"),
    ],
)
def test_wrong_conditions_are_one_line(
    word: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save(tmp_path / "run", *TINY, "geometry.n_views=64")
    assert command(monkeypatch, f"run={run}", *WORDS, word, f"hydra.run.dir={tmp_path}/out") == 1
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert line in error


def test_a_folder_in_use_is_refused_and_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra would write its record over that of the run."""
    run = save(tmp_path / "run", *TINY)
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert command(monkeypatch, f"run={run}", *WORDS, f"hydra.run.dir={run}") == 1
    assert "hydra.run.dir" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
