"""`qnmixer.robustness` on an untrained network."""

import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from qnmixer import robustness
from qnmixer.commands.command import TRACEBACK
from qnmixer.evaluation.evaluate import _values_of
from qnmixer.evaluation.evaluate_run import in_turn
from qnmixer.evaluation.metrics import psnr
from qnmixer.extras.export.card import evaluations
from qnmixer.models import UnrolledNetwork
from qnmixer.runs.records import read_results
from qnmixer.runs.tables import NOTHING
from qnmixer_studies.robustness.cliff import search
from qnmixer_studies.robustness.conditions import BEYOND, Condition
from qnmixer_studies.robustness.perturbations import disc
from qnmixer_studies.robustness.table import explanation, has_fallen, labelled, robustness_figure, table

from ...conftest import csv_rows, few_conditions, offline_runs
from ...saved import TINY, save


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
    rows = csv_rows(folder / "table.csv")
    return {(row["condition"], row["value"], row["method"]): float(row["psnr"]) for row in rows}


WORDS = ["data=phantoms", "data.num_workers=0", "n_slices=1", "accelerator=cpu"]


def test_one_table_over_all_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = save(tmp_path / "run", *TINY), tmp_path / "run" / "robustness"
    few = [
        "photons=[2.5e4,4e5]", "noises=[none]", "views=[0.5,1]", "patient_size=[1.1]", "arc=[120]",
        "scatter=[1e-3]", "smooth_scatter=[1e-2]", "crosstalk=[0.2]", "motion=[20]", "truncation=[1.5]",
        "metal=[30]", "detector_offset=[1]", "source_distance=[200]", "passes=2", "start=fbp",
    ]  # fmt: skip
    words = [f"run={run}", *WORDS, *few, "logger=wandb", "evaluation.tv_weight=null", f"hydra.run.dir={folder}"]
    assert command(monkeypatch, *words) == 0
    assert "passes=2: 2 times" in capsys.readouterr().out
    psnr = rows_of(folder)
    conditions = dict.fromkeys(condition for condition, _, _ in psnr)
    assert [*conditions] == [
        "noise", "dose, photons a ray", "arc, degrees", "patient size, times", "detector off by, bins",
        "source off by, mm", "tube, kV", "constant scatter", "smooth scatter", "crosstalk", "motion, mm",
        "body beyond the field, times", "titanium, mm", "views",
    ]  # fmt: skip
    assert {name for _, _, name in psnr} == {"FBP", "QN-Mixer"}
    assert psnr["dose, photons a ray", "25000.0", "FBP"] < psnr["dose, photons a ray", "400000.0", "FBP"]
    reference = psnr["noise", "none", "FBP"]
    assert ("patient size, times", "1.1", "FBP") in psnr
    for condition in [*conditions][6:]:
        assert psnr[next(key for key in psnr if key[0] == condition and key[2] == "FBP")] != reference, condition
    assert psnr["source off by, mm", "200.0", "FBP"] < reference
    assert psnr["detector off by, bins", "1.0", "FBP"] < reference
    table = (folder / "table.md").read_text()
    assert re.findall(r"^\| views (\d+) ", table, re.MULTILINE) == ["4", "5", "6", "7"]
    assert "With fewer: it holds to 4. With more: it holds to 8." in table
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
    words = [f"run={run}", *WORDS, *few_conditions(views="[1,2]"), "logger=csv", f"hydra.run.dir={folder}"]
    assert command(monkeypatch, *words, f"trust={__name__}", "evaluation.tv_weight=null") == 0
    table = (folder / "table.md").read_text()
    assert "| views 11 | – | – | – |" in table
    assert "views 11: the network does not take it" in table


@pytest.mark.parametrize(("word", "line"), [
    ("noises=[odd]", "noises=odd does not exist: choose "),
    ("photons=[0]", "photons"),
    ("views=[-1,2]", "views=-1 should be greater than 0"),
    ("truncation=[1]", "truncation=1 should be greater than 1"),
    ("tube_kv=[80]", "tube_kv=80 should be 120"),
    ("source_distance=[-900]", "source_to_axis"),
])  # fmt: skip
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


def test_slices_come_from_all_patients_in_turn() -> None:
    assert in_turn([0, 0, 0, 1, 2, 2]) == [1, 3, 4, 0, 5, 2]
    assert in_turn(range(3)) == [0, 1, 2]


@pytest.mark.parametrize(("bad", "expected"), [
    (lambda n: n < 51, "fewer: it holds to 51 and falls at 49"),
    (lambda n: n < 5, "fewer: it holds to 16"),
    (lambda n: n > 100, "more: it holds to 100 and falls at 102"),
])  # fmt: skip
def test_the_search_ends_at_the_edge(bad: Callable[[int], bool], expected: str) -> None:
    tried: list[int] = []
    edges = search(lambda n: tried.append(n) or bad(n), 64, (0.25, 2.0))
    assert expected in map(str, edges)
    assert len(tried) <= 11
    assert all(16 <= n <= 128 for n in tried)


def test_the_legend_hides_no_point_and_no_labels_of_ticks_touch() -> None:
    """Labels are turned by 45°. So their lines are 1/√2 as far apart as their ticks, and digits 0.73 of a size high."""
    scanner: Any = None
    values: dict[str, list[float | str]] = {"noise": ["none", "field"], "views": [16.0, 17.0, 18.0, 19.0, 23.0, 128.0]}
    values["dose, photons a ray"] = [2.5e4, 1e5, 4e5]
    results = {
        Condition(axis, value, scanner): {name: {"psnr": {"a": 30.0 + k}} for name in ("FBP", "TV", "QN-Mixer")}
        for axis, of_axis in values.items()
        for k, value in enumerate(of_axis)
    }
    figure = robustness_figure(results, {"views": 64.0})
    figure.draw_without_rendering()
    (legend,) = figure.legends
    views = next(panel for panel in figure.axes if panel.get_xlabel() == "views")
    for panel in figure.axes:
        assert panel.get_legend() is None
        assert not legend.get_window_extent().overlaps(panel.get_window_extent())
        drawn = [label for label in panel.get_xticklabels() if label.get_text()]
        places = [panel.transData.transform((label.get_position()[0], 30.0))[0] for label in drawn]
        for left, right in pairwise(places):  # turned by 45°
            assert (right - left) / 2**0.5 > 0.8 * drawn[0].get_fontsize() * figure.dpi / 72
    assert [label.get_text() for label in views.get_xticklabels()] == ["16", "", "", "19", "23", "64", "128"]
    assert labelled([0.0, 60.0, 64.0, 128.0], 64.0, logarithmic=False) == [0.0, 128.0, 64.0]  # that of training stays


def test_a_network_has_fallen_below_another_method() -> None:
    def scores(fbp: float, network: float) -> dict[str, dict[str, dict[str, float]]]:
        return {"FBP": {"psnr": {"a": fbp}}, "QN-Mixer": {"psnr": {"a": network}}}

    assert has_fallen(scores(30, 29.9))
    assert not has_fallen(scores(30, 30.1))
    assert has_fallen(scores(30, float("nan")))
    assert has_fallen({})  # the network was not taken


def test_total_variation_without_pixels_for_the_body_is_no_rival() -> None:
    """What is outside of the field is in no image of it, so its rows have scores and no difference."""
    scanner: Any = None
    psnr = {"psnr": {"a": 30.0, "b": 31.0}, "ssim": {"a": 90.0, "b": 91.0}}
    axes = {axis: Condition(axis, 1.5, scanner) for axis in (BEYOND, "motion, mm")}
    rows = table({condition: {"TV": psnr, "QN-Mixer": psnr} for condition in axes.values()}).rows
    assert [row[-1] for row in rows] == [NOTHING, "0.00 ± 0.00"]
    with_fbp = {axes[BEYOND]: {"FBP": psnr, "QN-Mixer": psnr}}
    assert table(with_fbp).rows[0][-1] != NOTHING
    assert "wider grid" not in explanation(with_fbp)
    assert "wider grid" in explanation({axes[BEYOND]: {"TV": psnr, "QN-Mixer": psnr}})


def test_pixels_of_metal_are_not_scored() -> None:
    truth = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    metal = disc(16, 4.0) > 0
    batch: Any = {"image": truth, "hu_offset": torch.zeros(1), "hu_scale": torch.full((1,), 3000.0)}
    wrong = truth + 5 * metal
    metrics = {"psnr": lambda x, batch: psnr(x, batch["image"])}
    (seen,), (unseen,) = (_values_of(b, wrong, [0, 3000], metrics) for b in (batch, batch | {"unscored": metal}))
    assert seen["psnr"] < 0
    assert unseen["psnr"] == float("inf") == unseen["window_psnr"]
