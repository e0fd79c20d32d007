"""`evaluation=task` by the code that its command runs, on an untrained network, and its phantoms."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from qnmixer.evaluate import check, evaluate
from qnmixer.physics import FanBeamGeometry
from qnmixer.reconstruction.checkpoints import load_run
from qnmixer.runs.run import into_new_folder
from qnmixer.settings.compose import compose
from qnmixer.settings.run import section
from qnmixer_studies.task.evaluate_task import reconstructed
from qnmixer_studies.task.phantoms import Disc, TaskPhantom
from qnmixer_studies.task.report import DoseScores, headings, task_figure
from qnmixer_studies.task.task_config import EvaluateTaskConfig

from ...conftest import csv_rows, offline_runs
from ...saved import TINY, run, save


def geometry(size: int = 64) -> FanBeamGeometry:
    return FanBeamGeometry(
        image_size=size, pixel_size=400 / size, n_views=16, n_detectors=96, detector_pitch=10.0, source_to_axis=600.0,
        axis_to_detector=290.0,
    )  # fmt: skip


def test_a_phantom_has_its_inserts_in_the_middle_of_its_regions_and_nothing_else() -> None:
    phantom = TaskPhantom(geometry())
    inserts = [Disc(x, y, 12.5, 20.0) for x, y in phantom.places]
    without, discs = phantom.draw(64, np.random.default_rng(3)), phantom.draw_discs(64, inserts)
    difference = phantom.regions(discs[None])[0]
    assert difference.shape == (8, phantom.region, phantom.region)
    assert (difference - difference.flip(1, 2)).abs().max() < 1e-3
    assert math.isclose(difference.sum(), 8 * 20 * math.pi * 12.5**2 / 6.25**2, rel_tol=0.03)
    assert math.isclose(difference.sum(), discs.sum(), rel_tol=1e-4)
    assert (phantom.regions(without[None]) == 40).all()


@pytest.mark.parametrize("size", [16, 63, 64])
def test_places_of_a_phantom_are_equal_by_symmetry_and_regions_stay_inside(size: int) -> None:
    phantom = TaskPhantom(geometry(size))
    assert {(-y, x) for x, y in phantom.places} == {*phantom.places}
    images = torch.arange(size * size).view(1, size, size)
    assert phantom.regions(images).shape == (1, 8, phantom.region, phantom.region)


@pytest.mark.parametrize("seed", range(5))
def test_around_a_body_is_all_of_it_and_little_more(seed: int) -> None:
    phantom = TaskPhantom(geometry())
    body = phantom.draw(64, np.random.default_rng(seed)) > -1000
    assert phantom.around_body(body).sum() == body.sum()
    assert phantom.around_body(body).sum() > 0.55 * phantom.around_body(body).numel()


EDGES = (-50.0, 200.0, 800.0)


def dose_scores(photons: float, method: str, hidden: float | None, kept: float) -> DoseScores:
    """Curves that end at 0.5 per mm; the edge of a contrast in HU has no value."""
    frequencies = torch.linspace(0, 0.5, 6)
    edges = [(math.nan if hu == hidden else 0.2, 0.02) for hu in EDGES]
    values = [(7.0, 0.3), (0.07, 0.01), *edges, (kept, 0.0), (2.0, 0.5), (0.1, 0.2)]
    named = dict(zip(headings(EDGES), values, strict=True))
    transfer = dict.fromkeys(EDGES, (frequencies, 1 - frequencies, frequencies / 5))
    spectrum = frequencies[1:], frequencies[1:]
    return DoseScores(photons, method, named, spectrum=spectrum, transfer=transfer, example=torch.zeros(8, 8))


def test_each_edge_has_a_panel_without_the_curves_that_noise_hides() -> None:
    """A drawn curve has its interval around it. Those that are left out are named."""
    scores = [dose_scores(photons, "FBP", -50.0, 100.7) for photons in (2e4, 1e5, 4e5)]
    scores += [dose_scores(photons, "QN-Mixer", None, 60.0) for photons in (2e4, 1e5, 4e5)]
    figure = task_figure(scores, torch.zeros(8, 8), [(4.0, 3.0, 2.0)])
    assert [axes.get_title() for axes in figure.axes if axes.patches] == ["truth", "FBP", "QN-Mixer"]
    panels = [axes for axes in figure.axes if "edge of" in axes.get_title()]
    assert [axes.get_title() for axes in panels] == [f"modulation, edge of {hu} HU" for hu in ("−50", "200", "800")]
    assert [[line.get_color() for line in axes.lines] for axes in panels] == [["C1"], ["C0", "C1"], ["C0", "C1"]]
    assert [[text.get_text() for text in axes.texts] for axes in panels] == [["hidden: FBP"], [], []]
    for axes in panels:
        for line, band in zip(axes.lines, axes.collections, strict=True):
            low, high = band.get_paths()[0].vertices.min(0), band.get_paths()[0].vertices.max(0)
            assert line.get_xdata()[-1] == pytest.approx(high[0]) == 0.5
            assert (low[1], high[1]) == pytest.approx((0.4, 1.0))


def test_a_marker_at_full_contrast_is_whole() -> None:
    """A method that keeps all the contrast, without scatter, is far from the edge of its panel."""
    scores = [dose_scores(1e5, "FBP", None, 100.7), dose_scores(1e5, "QN-Mixer", None, 60.0)]
    figure = task_figure(scores, torch.zeros(8, 8), [])
    (panel,) = (axes for axes in figure.axes if "contrast kept" in axes.get_title())
    assert panel.get_ylim()[0] == 0
    assert panel.get_ylim()[1] > 104


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("task") / "run", *TINY)


@pytest.mark.usefixtures("no_wandb")
def test_one_command_writes_a_table_and_a_figure_and_logs_both(network: Path, tmp_path: Path) -> None:
    folder = tmp_path / "task"
    given = [f"run={network}", "evaluation=task", "evaluation.n_images=3", "evaluation.photons=[1e5]"]
    given += ["evaluation.insert_diameter=40", "evaluation.edge_hu=[-100,500]", "accelerator=cpu", "logger=wandb"]
    given += ["evaluation.tv_weight=1e-3"]  # fewer iterations than the default needs
    code, stdout, stderr = run(evaluate, check, "evaluate", *given, f"hydra.run.dir={folder}")
    assert (code, stderr) == (0, "")
    assert f"picture: {folder / 'picture.png'}" in stdout.splitlines()
    assert (folder / "picture.png").stat().st_size > 10_000
    rows = csv_rows(folder / "table.csv")
    assert [row["method"] for row in rows] == ["FBP", "TV", "QN-Mixer"]
    *rivals, of_network = rows
    assert not of_network["d′ of the network minus it"]
    for row in rivals:
        beyond = float(of_network["d′"]) - float(row["d′"])
        assert math.isclose(float(row["d′ of the network minus it"]), beyond, abs_tol=1e-9)
    for row in rows:
        assert all(math.isfinite(float(value)) for name, value in row.items() if value and name != "method")
        hidden = {"edge of -100 HU, 1/mm", "edge of 500 HU, 1/mm", "d′ of the network minus it"}
        assert {name.removeprefix("± of ") for name, value in row.items() if not value} <= hidden
    assert "| 100,000 | TV |" in (folder / "table.md").read_text()
    record = json.loads((folder / "results.json").read_text())
    assert (record["status"], record["evaluated"]["data"]) == ("done", "task")
    (logged,) = offline_runs(folder)
    for method in ("", "fbp/", "tv/"):
        assert {
            f"task/100000/{method}{score}" for score in ("noise_HU", "its_mean_frequency_1_mm", "d")
        } <= logged.metrics
    files = logged.folder / "files"
    assert {"picture.png", "table.csv"} <= {path.name for path in files.iterdir()}


def test_what_an_insert_leaves_in_fbp_does_not_depend_on_the_noise(network: Path) -> None:
    """So FBP keeps the same part of the contrast at every dose: all of it, but for its resolution."""
    module = load_run(str(network)).eval()
    phantom, rng = TaskPhantom(module.projector.geometry), np.random.default_rng(0)
    body = phantom.draw(2 * phantom.size, rng)
    fine = body + phantom.draw_discs(2 * phantom.size, [Disc(x, y, 20.0, 20.0) for x, y in phantom.places])
    words = ["run=x", "evaluation=task", "evaluation.tv_weight=1e-3"]
    task = EvaluateTaskConfig.parse(compose("evaluate", words)).evaluation
    left = []
    for seed in range(2):
        module.config.noise = section("noise", "physical", photons=1e4)
        images = (reconstructed(module, task, hu, body, (seed,))["FBP"] for hu in (fine, body))
        left.append(torch.sub(*images))
    torch.testing.assert_close(*left, rtol=0, atol=0.05)
    assert left[0].abs().max() > 5


@pytest.mark.parametrize(("given", "says"), [
    (["evaluation.insert_diameter=2"], "evaluation.insert_diameter=2 does not fit the images of this run: give 18.8"),
    (["evaluation.insert_hu=0"], "evaluation.insert_hu=0 is no insert: give for example 20"),
    (["evaluation.edge_hu=[0,10]"], "evaluation.edge_hu=[0.0, 10.0] has a disc without contrast: give for example"),
    (["evaluation.photons=[]"], "evaluation.photons=[]"),
    (["evaluation.photons=[-1]"], "evaluation.photons=-1 should be greater than 0"),
    (["evaluation.n_images=2"], "evaluation.n_images=2 should be greater than or equal to 3"),
    (["data=phantoms"], "evaluation=task draws its own phantoms: leave out data=…"),
    (["data.disc=true"], "evaluation=task draws its own phantoms: leave out data=…"),
    (["split=val"], "evaluation=task draws its own phantoms: leave out split=…"),
    (["noise=field"], "evaluation=task draws photon counts: give doses, as evaluation.photons=[1e5], not field"),
    (["symmetries=8"], "evaluation=task is of the network itself, on its own scan: leave out symmetries=…"),
    (["geometry.n_views=6"], "evaluation=task is of the network itself, on its own scan: leave out geometry=…"),
    (["evaluation.window=[0,1]"], "unknown key evaluation.window: evaluation=task has photons, "),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(network: Path, tmp_path: Path, given: list[str], says: str) -> None:
    words = [
        f"run={network}", "evaluation=task", "evaluation.insert_diameter=40", f"hydra.run.dir={tmp_path / 'new'}",
        *given,
    ]  # fmt: skip
    code, _, stderr = run(evaluate, check, "evaluate", *words)
    assert code == 1
    (line,) = [line for line in stderr.splitlines() if not line.startswith("warning")]
    assert line.startswith(f"error: {says}")
    assert into_new_folder("evaluate", words) == words  # nothing was written


def test_images_that_are_scaled_one_by_one_have_no_dose(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", *TINY, "data.scaling=minmax")
    _, _, stderr = run(
        evaluate, check, "evaluate", f"run={folder}", "evaluation=task", f"hydra.run.dir={tmp_path / 'e'}"
    )
    assert "needs one scale of all slices" in stderr
