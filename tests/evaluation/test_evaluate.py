import csv
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from qnmixer.engine.batch import to_hu
from qnmixer.engine.config import Config
from qnmixer.engine.config.evaluation import EvaluationConfig
from qnmixer.engine.config.run import section
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.evaluation.evaluate import Evaluation, ImageScore, _gain, evaluate, warnings_of, write_evaluation
from qnmixer.engine.evaluation.slices import pictured
from qnmixer.engine.optimization.metrics import psnr, ssim, to_window
from qnmixer.engine.reports.page import PageMethod, PageSlice
from qnmixer.engine.reports.pictures import Panel, Row, draw_comparison
from qnmixer.engine.tracking.run import name_of_run
from qnmixer.engine.tracking.sweep_file import write_sweep
from qnmixer.module import ReconstructionModule

WINDOW = [-160.0, 240.0]
NAMES = ("psnr", "ssim", "window_psnr", "window_ssim")


def changed(score: ImageScore, **values: float | None) -> ImageScore:
    """The score with other values of some metrics."""
    return replace(score, values=score.values | values)


@pytest.fixture
def module(tiny_module: Callable[..., ReconstructionModule]) -> ReconstructionModule:
    return tiny_module("noise=field")


def measured(module: ReconstructionModule, **options: int) -> tuple[Evaluation, SliceDataModule]:
    config = section("data", "phantoms", image_size=16, num_workers=0, n_test=5, **options)
    data = SliceDataModule(config)
    settings = EvaluationConfig(window=WINDOW, n_pictures=2)
    return evaluate(module, data, "test", settings, torch.device("cpu")), data


def test_every_slice_is_scored_once_by_each_method_on_the_same_sinogram(module: ReconstructionModule) -> None:
    evaluation, data = measured(module, batch_size=2)
    names = [data.dataset("test").source.name(i) for i in range(5)]
    assert evaluation.methods == ["FBP", "QN-Mixer"]
    for method in evaluation.methods:
        assert [score.slice for score in evaluation.scores if score.method == method] == names
    for index, batch in enumerate(
        SliceDataModule(section("data", "phantoms", image_size=16, num_workers=0, n_test=5)).loader("test")
    ):
        truth = batch["image"]
        with torch.no_grad():
            y = module.measure(batch, "test")
            images = {"FBP": module.projector.fbp(y), "QN-Mixer": module.network(y)}
        for method, image in images.items():
            (score,) = [s for s in evaluation.scores if (s.slice, s.method) == (names[index], method)]
            assert score.values["psnr"] == pytest.approx(psnr(image, truth).item(), abs=1e-3)
            assert score.values["ssim"] == pytest.approx(100 * ssim(image, truth).item(), abs=1e-2)
            windowed = [to_window(to_hu(batch, x), (WINDOW[0], WINDOW[1])) for x in (image, truth)]
            assert score.values["window_psnr"] == pytest.approx(psnr(*windowed).item(), abs=1e-3)
            assert score.values["window_ssim"] == pytest.approx(100 * ssim(*windowed).item(), abs=1e-2)


def test_batch_size_changes_no_score(module: ReconstructionModule) -> None:
    alone, together = (measured(module, batch_size=n)[0] for n in (1, 4))
    for a, b in zip(alone.scores, together.scores, strict=True):
        assert (a.slice, a.method) == (b.slice, b.method)
        first, second = ([of.values[name] for name in NAMES[:3]] for of in (a, b))
        assert first == pytest.approx(second, abs=2e-3)


def test_pictures_are_of_slices_spread_over_the_split(module: ReconstructionModule) -> None:
    evaluation, _ = measured(module, batch_size=2)
    assert [row.name for row in evaluation.rows] == [f"slice {i}" for i in sorted(pictured(5, 2))]
    for row in evaluation.rows:
        assert [panel.title.splitlines()[0] for panel in row.panels] == ["FBP", "QN-Mixer"]
        assert row.truth.min() >= -1000
        assert row.truth.max() > 0


def test_all_slices_are_there_to_look_through_the_worst_first(module: ReconstructionModule) -> None:
    evaluation, data = measured(module, batch_size=2)
    ours = [score for score in evaluation.scores if score.method == "QN-Mixer"]
    worst_first = sorted(ours, key=lambda score: score.values["psnr"])
    assert [of.name for of in evaluation.slices] == [f"slice {score.number}" for score in worst_first]
    assert [score.slice for score in ours] == [data.dataset("test").source.name(score.number) for score in ours]
    assert [of.psnr for of in evaluation.slices] == sorted(score.values["psnr"] for score in ours)
    T = module.network.n_iterations
    assert [[len(m.iterates) for m in of.methods] for of in evaluation.slices] == [[1, T + 1]] * 5
    assert all(of.full_shape is None for of in evaluation.slices)


@pytest.mark.parametrize(
    ("n_images", "n_pictures", "drawn"),
    [(5, 3, {0, 2, 4}), (1, 3, {0}), (2, 3, {0, 1}), (3, 3, {0, 1, 2}), (100, 4, {12, 37, 62, 87}), (64, 1, {32})],
)
def test_spread(n_images: int, n_pictures: int, drawn: set[int]) -> None:
    found = pictured(n_images, n_pictures)
    assert len(found) == min(n_images, n_pictures)
    assert all(0 <= i < n_images for i in found)
    assert all(abs(a - b) <= 1 for a, b in zip(sorted(found), sorted(drawn), strict=True))


@pytest.mark.parametrize("n_images", [1, 2, 3, 4, 5, 7, 10, 32, 64])
@pytest.mark.parametrize("n_pictures", [1, 2, 3, 5, 8])
def test_spread_gives_as_many_as_asked_for_within_the_split(n_images: int, n_pictures: int) -> None:
    found = pictured(n_images, n_pictures)
    assert len(found) == min(n_images, n_pictures)
    assert found <= set(range(n_images))


@pytest.fixture
def scores() -> Evaluation:
    values = {"FBP": [(20.0, 50.0, 10.0, 40.0), (22.0, 60.0, 12.0, 44.0)],
              "QN-Mixer": [(30.5, 90.0, 21.0, 80.0), (31.0, 92.0, 22.0, 82.0)]}  # fmt: skip
    by_slice = [
        ImageScore(i, f"a,{i}.dcm", method, dict(zip(NAMES, rows[i], strict=True)))
        for i in range(2)
        for method, rows in values.items()
    ]
    picture = torch.zeros(16, 16)
    slices = [PageSlice(f"a,{i}.dcm", picture, [PageMethod(method, [picture]) for method in values]) for i in range(2)]
    return Evaluation(by_slice, slices, [0, 1])


def test_total_variation_stands_in_the_table_where_it_is_asked_for(module: ReconstructionModule) -> None:
    data = SliceDataModule(section("data", "phantoms", image_size=16, num_workers=0, n_test=2))
    settings = EvaluationConfig(window=WINDOW, n_pictures=1, tv_weight=1e-3)
    evaluation = evaluate(module, data, "test", settings, torch.device("cpu"))
    assert evaluation.methods == ["FBP", "TV", "QN-Mixer"]
    assert evaluation.means()["TV"]["psnr"] > evaluation.means()["FBP"]["psnr"]


def test_a_network_below_another_method_is_told_before_the_table(scores: Evaluation) -> None:
    assert warnings_of(scores) == []
    worse = Evaluation(
        [changed(s, psnr=s.values["psnr"] - 20) if s.method == "QN-Mixer" else s for s in scores.scores], []
    )
    (line,) = warnings_of(worse)
    assert line.startswith("QN-Mixer is BELOW FBP by 10.25 dB")
    dead = Evaluation([replace(s, constant=s.method == "QN-Mixer") for s in scores.scores], [])
    assert warnings_of(dead) == ["QN-Mixer gives a constant image for 2 of 2 slices: the network is dead"]


def test_a_gain_over_patients_has_an_interval(scores: Evaluation) -> None:
    of_two = Evaluation([replace(score, patient=score.number) for score in scores.scores], [])
    text = _gain(of_two)  # 10.5 and 9: 9.75, and 12.7062 · 1.5 / 2
    assert "; over FBP, mean over 2 patients ± half of its 95 % interval: PSNR +9.75 ± 9.53, SSIM × 100 +36.00 " in text
    assert "patients" not in _gain(scores)
    with_phantoms = [*of_two.scores, *(replace(score, number=score.number + 2) for score in scores.scores)]
    assert "patients" not in _gain(Evaluation(with_phantoms, []))  # as in a mix with evaluate_on=null


def test_means(scores: Evaluation) -> None:
    assert scores.means()["FBP"] == {"psnr": 21.0, "ssim": 55.0, "window_psnr": 11.0, "window_ssim": 42.0}
    assert scores.means()["QN-Mixer"]["psnr"] == 30.75


def test_tables_hold_the_scores(scores: Evaluation, tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    with Console(quiet=True) as console:
        picture = write_evaluation(
            tmp_path, scores, "two slices", tiny_config(), torch.device("cpu"), console, Path("/home/anna/runs/mine")
        )  # fmt: skip
    assert picture == tmp_path / "picture.png"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "images.csv", "page.html", "picture.png", "table.csv", "table.md",
    ]  # fmt: skip
    with (tmp_path / "images.csv").open(newline="") as stream:
        images = list(csv.DictReader(stream))
    assert len(images) == 4
    for line, score in zip(images, scores.scores, strict=True):
        assert (line["number"], line["slice"]) == (str(score.number), score.slice)
        assert line["method"] == score.method
        assert {name: float(line[name]) for name in NAMES} == score.values
    with (tmp_path / "table.csv").open(newline="") as stream:
        headings, fbp, ours = csv.reader(stream)
    assert headings[0] == "method"
    assert len(headings) == len(fbp) == len(ours) == 5
    assert fbp[:2] == ["FBP", f"{mean([20, 22]):.2f} ± {stdev([20, 22]):.2f}"]
    assert ours[0] == "QN-Mixer"
    assert ours[2] == "91.00 ± 1.41"
    markdown = (tmp_path / "table.md").read_text()
    assert markdown.startswith("**two slices**\n")
    assert "| " + " | ".join(fbp) + " |" in markdown
    assert "| " + " | ".join(ours) + " |" in markdown
    assert "QN-Mixer over FBP: +9.75 dB, mean over 2 images" in markdown
    table = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {6}
    page = (tmp_path / "page.html").read_text()
    assert "<title>QN-Mixer, run mine: two slices, 16 × 16 pixels</title>" in page
    assert "QN-Mixer over FBP: +9.75 dB, mean over 2 images (data range 1). The window is −160 to 240 HU." in page
    assert "anna" not in page


def test_a_page_warns_as_the_table_does(scores: Evaluation, tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    worse = [changed(score, psnr=0.0) if score.method == "QN-Mixer" else score for score in scores.scores]
    found = replace(scores, scores=worse)
    write_evaluation(tmp_path, found, "two", tiny_config(), torch.device("cpu"), Console(quiet=True), tmp_path)
    assert "Warning: QN-Mixer is BELOW FBP by 21.00 dB" in (tmp_path / "page.html").read_text()


def test_the_name_of_a_run_has_no_folders(tmp_path: Path) -> None:
    """But for those without which it says nothing: the day of a run, the sweep of a job."""
    dated, job = tmp_path / "2026-01-31" / "12-00-00", tmp_path / "my_sweep" / "3"
    for folder in (dated / "checkpoints", job):
        folder.mkdir(parents=True)
    (dated / "checkpoints" / "best.ckpt").touch()
    (tmp_path / "shipped.safetensors").touch()
    write_sweep(job.parent, {"overrides": [], "varying": [], "git_commit": None, "jobs": None})
    names = {
        dated: "2026-01-31/12-00-00", dated / "checkpoints" / "best.ckpt": "2026-01-31/12-00-00", job: "my_sweep/3",
        tmp_path / "shipped.safetensors": "shipped", tmp_path / "demo": "demo",
    }  # fmt: skip
    assert {path: name_of_run(path) for path in names} == names


def test_one_slice_has_no_deviation(scores: Evaluation, tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    one = Evaluation(scores.scores[:2], scores.slices[:1], [0])
    write_evaluation(tmp_path, one, "one", tiny_config(), torch.device("cpu"), Console(quiet=True), tmp_path)
    assert (tmp_path / "table.csv").read_text().splitlines()[1].startswith("FBP,20.00,50.00,")


def test_a_slice_with_nothing_in_the_window_has_no_window_scores(module: ReconstructionModule) -> None:
    data = SliceDataModule(section("data", "phantoms", image_size=16, num_workers=0, n_test=2))
    settings = EvaluationConfig(window=[2500.0, 3000.0], n_pictures=1)
    evaluation = evaluate(module, data, "test", settings, torch.device("cpu"))
    assert {(score.values["window_psnr"], score.values["window_ssim"]) for score in evaluation.scores} == {(None, None)}
    assert all(math.isfinite(score.values["psnr"]) for score in evaluation.scores)


def test_means_leave_out_what_is_not_in_the_window_and_show_what_is_no_number(
    scores: Evaluation, tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    fbp, ours, *others = (replace(score, patient=score.number) for score in scores.scores)
    first = [changed(score, window_psnr=None, window_ssim=None) for score in (fbp, changed(ours, psnr=math.nan))]
    found = replace(scores, scores=[*first, *others])
    write_evaluation(tmp_path, found, "two", tiny_config(), torch.device("cpu"), Console(quiet=True), tmp_path)
    assert found.means()["FBP"] == {"psnr": 21.0, "ssim": 55.0, "window_psnr": 12.0, "window_ssim": 44.0}
    table = (tmp_path / "table.md").read_text()
    assert "| QN-Mixer | nan ± nan | 91.00 ± 1.41 | 22.00 | 82.00 |" in table
    assert "**Warning: QN-Mixer gives NaN or infinite pixels for 1 of 2 slices" in table
    nothing = [changed(score, window_psnr=None, window_ssim=None) for score in scores.scores]
    assert math.isnan(replace(scores, scores=nothing).means()["FBP"]["window_psnr"])


def row(n_panels: int, size: int = 20) -> Row:
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    truth = torch.where((x - size / 2) ** 2 + (y - size / 2) ** 2 < size**2 / 9, 40.0, -1000.0)
    panels = [Panel(f"method {k}\n30.00 dB", truth + 100 * k) for k in range(n_panels)]
    return Row("patient/with/a/very/long/path/that/does/not/fit/slice.dcm", truth, panels)


@pytest.mark.parametrize(("n_rows", "n_methods"), [(1, 1), (2, 2), (3, 4)])
def test_comparison_has_a_row_for_each_slice_and_a_column_for_each_image(
    tmp_path: Path, n_rows: int, n_methods: int
) -> None:
    path = tmp_path / "new" / "picture.png"
    draw_comparison(path, [row(n_methods)] * n_rows)
    with Image.open(path) as picture:
        width, height = picture.size
        colours = picture.convert("RGB").getcolors(maxcolors=2**24)
    assert width == int(130 * (2.2 * (1 + 2 * n_methods) + 1.2))
    assert height == int(130 * 2.5 * n_rows)
    assert colours is not None
    assert len(colours) > 100


def test_error_maps_show_the_error(tmp_path: Path) -> None:
    """Equal images give black error maps; an error of 200 HU everywhere gives the brightest."""
    good, bad = row(1), row(1)
    bad.panels = [Panel("bad", bad.truth + 200)]
    brightness = []
    for name, line in (("good", good), ("bad", bad)):
        draw_comparison(tmp_path / f"{name}.png", [line])
        with Image.open(tmp_path / f"{name}.png") as picture:
            pixels = np.asarray(picture.convert("L"), float)
        brightness.append(pixels[:, pixels.shape[1] // 2 :].mean())
    assert brightness[1] > 1.1 * brightness[0]
