import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qnmixer.data.batch import to_hu
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.splits import Overlap
from qnmixer.evaluation.evaluate import evaluate, pictured, what_was_evaluated, worst_of, write_evaluation
from qnmixer.evaluation.metrics import psnr, ssim, to_window
from qnmixer.evaluation.pictures import MethodImages, SliceImages
from qnmixer.evaluation.scores import Evaluation, ImageScore
from qnmixer.module import ReconstructionModule
from qnmixer.physics import images_by_symmetry, symmetries
from qnmixer.runs.terminal import Console
from qnmixer.settings.run import section
from qnmixer.settings.sections import EvaluationConfig

from ..conftest import csv_rows, tiny_module

WINDOW = [-160.0, 240.0]
NAMES = ("psnr", "ssim", "window_psnr", "window_ssim")


def changed(score: ImageScore, **values: float | None) -> ImageScore:
    """The score with other values of some metrics."""
    return replace(score, values=score.values | values)


@pytest.fixture
def module() -> ReconstructionModule:
    return tiny_module("noise=field")


def slices_of(n: int, **options: int) -> SliceDataModule:
    return SliceDataModule(section("data", "phantoms", image_size=16, num_workers=0, n_test=n, **options))


def test_every_slice_is_scored_once_by_each_method_on_the_same_sinogram(module: ReconstructionModule) -> None:
    """Whatever the batches. All slices are there to look through, the worst first; the picture has some in order."""
    data, settings = slices_of(5, batch_size=2), EvaluationConfig(window=WINDOW, n_pictures=2, tv_weight=1e-3)
    found = evaluate(module, data, "test", settings, torch.device("cpu"))
    names = [data.dataset("test").source.name(i) for i in range(5)]
    assert found.methods == ["FBP", "TV", "QN-Mixer"]
    assert found.means()["TV"]["psnr"] > found.means()["FBP"]["psnr"]
    of_loggers = {"psnr": "QN-Mixer", "fbp/psnr": "FBP", "tv/psnr": "TV"}
    assert {name: found.metrics()[name] for name in of_loggers} == {
        name: found.means()[method]["psnr"] for name, method in of_loggers.items()
    }
    for method in found.methods:
        assert [(score.number, score.slice) for score in found.scores_of(method)] == [*enumerate(names)]
    for index, batch in enumerate(slices_of(5, batch_size=1).loader("test")):
        truth = batch["image"]
        with torch.no_grad():
            y = module.measure(batch, "test")
            images = {"FBP": module.projector.fbp(y), "QN-Mixer": module.network(y)}
        for method, image in images.items():
            values = found.scores_of(method)[index].values
            assert values["psnr"] == pytest.approx(psnr(image, truth).item(), abs=1e-3)
            assert values["ssim"] == pytest.approx(100 * ssim(image, truth).item(), abs=1e-2)
            windowed = [to_window(to_hu(batch, x), (WINDOW[0], WINDOW[1])) for x in (image, truth)]
            assert values["window_psnr"] == pytest.approx(psnr(*windowed).item(), abs=1e-3)
            assert values["window_ssim"] == pytest.approx(100 * ssim(*windowed).item(), abs=1e-2)
    worst_first = sorted(found.scores_of("QN-Mixer"), key=lambda score: score.values["psnr"])
    assert [*found.slices] == [score.number for score in worst_first]
    for score in worst_first:
        shown = found.slices[score.number]
        assert shown.name == f"slice {score.number}"
        assert [len(method.iterates) for method in shown.methods] == [1, 1, module.network.n_iterations + 1]
        assert shown.methods[2].caption.startswith(f"{score.values['psnr']:.2f} dB, SSIM ")
    assert found.pictured == sorted(pictured(5, 2)) == [1, 3]
    assert [found.slices[n].name for n in found.pictured] == [f"slice {n}" for n in found.pictured]


def test_rows_of_the_mean_over_symmetries_and_of_first_order(module: ReconstructionModule) -> None:
    """From the images themselves."""
    with torch.no_grad():
        for parameter in module.network.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    settings = EvaluationConfig(window=WINDOW, n_pictures=1, first_order=True)
    found = evaluate(module, slices_of(1), "test", settings, torch.device("cpu"), 8)
    assert found.methods == ["FBP", "QN-Mixer, H = I", "QN-Mixer", "QN-Mixer, symmetric"]
    assert found.title.endswith("symmetric: mean over 8 turns and flips")
    assert found.metrics()["psnr"] == found.means()["QN-Mixer, symmetric"]["psnr"]
    assert not found.warnings()[1:]  # of a row beside its own network
    (batch,) = slices_of(1).loader("test")
    with torch.no_grad():
        y = module.measure(batch, "test")
        images = images_by_symmetry(module.network, y, symmetries(module.projector))
    expected = psnr(images.mean(0), batch["image"]).item()
    assert found.means()["QN-Mixer, symmetric"]["psnr"] == pytest.approx(expected, abs=1e-3)
    assert expected != pytest.approx(found.means()["QN-Mixer"]["psnr"], abs=1e-2)
    module.network.hessian = "identity"
    with torch.no_grad():
        first_order = psnr(module.network(y), batch["image"]).item()
    assert found.means()["QN-Mixer, H = I"]["psnr"] == pytest.approx(first_order, abs=1e-3)
    trust = what_was_evaluated(module, found)["scalars"]["tau"]
    assert trust == [parameter.tolist() for parameter in module.network.trust]
    assert found.gain().endswith(f". tau_t, learned: {'; '.join(f'{value:.3f}' for (value,) in trust)}")


def test_a_page_has_the_slices_of_the_picture_and_the_worst_others() -> None:
    image = torch.zeros(16, 16)
    psnrs = [30.0 + abs(n - 9.2) for n in range(18)] + [math.nan, math.inf]  # the worst ones in the middle
    scores = {n: [ImageScore(n, "", "net", {"psnr": psnr})] for n, psnr in enumerate(psnrs)}
    slices = {n: SliceImages(f"{n}", image, [], WINDOW) for n in scores}
    expected = [18, 9, 10, 8, 11, 7, 12, 6, 13, 14, 3]
    assert [*worst_of(slices, scores, {3, 14})] == expected
    shares = [worst_of({n: its for n, its in slices.items() if n % 3 == k}, scores, {3, 14}) for k in range(3)]
    assert [*worst_of(shares[0] | shares[1] | shares[2], scores, {3, 14})] == expected  # in processes as in one


@pytest.fixture
def scores() -> Evaluation:
    values = {"FBP": [(20.0, 50.0, 10.0, 40.0), (22.0, 60.0, 12.0, 44.0)],
              "QN-Mixer": [(30.5, 90.0, 21.0, 80.0), (31.0, 92.0, 22.0, 82.0)]}  # fmt: skip
    by_slice = [
        ImageScore(i, f"a,{i}.dcm", method, dict(zip(NAMES, rows[i], strict=True)))
        for i in range(2)
        for method, rows in values.items()
    ]
    image = torch.zeros(16, 16)
    methods = [MethodImages(method, [image]) for method in values]
    slices = {i: SliceImages(f"slice {i}", image, methods, WINDOW) for i in range(2)}
    return Evaluation(by_slice, "two slices", slices, [0, 1])


def test_a_network_below_another_method_is_told_before_the_table(scores: Evaluation) -> None:
    assert scores.warnings() == []
    worse = [changed(s, psnr=s.values["psnr"] - 20) if s.method == "QN-Mixer" else s for s in scores.scores]
    (line,) = replace(scores, scores=worse, baselines=["FBP"]).warnings()
    assert line.startswith("QN-Mixer is BELOW FBP by 10.25 dB")
    seen = replace(scores, trained=Overlap(2, 3))
    first, second = seen.warnings()
    assert first == "2 of the slices were used in training: the scores are too good"
    assert second.startswith("3 other slices look like training slices in another size, or have the PatientID")


def test_files_hold_the_scores(scores: Evaluation, tmp_path: Path) -> None:
    picture = write_evaluation(tmp_path, scores, Console(quiet=True))
    assert picture == tmp_path / "picture.png"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "images.csv", "page.html", "picture.png", "table.csv", "table.md",
    ]  # fmt: skip
    for line, score in zip(csv_rows(tmp_path / "images.csv"), scores.scores, strict=True):
        assert (line["number"], line["slice"], line["method"]) == (str(score.number), score.slice, score.method)
        assert {name: float(line[name]) for name in NAMES} == score.values
    assert (tmp_path / "table.csv").read_text().splitlines()[1] == (
        "FBP,21.00 ± 1.41,55.00 ± 7.07,11.00 ± 1.41,42.00 ± 2.83"
    )
    assert (tmp_path / "table.md").read_text().splitlines() == [
        "**two slices**", "",
        "| method | PSNR, dB | SSIM × 100 | window PSNR, dB | window SSIM × 100 |", "|---|---|---|---|---|",
        "| FBP | 21.00 ± 1.41 | 55.00 ± 7.07 | 11.00 ± 1.41 | 42.00 ± 2.83 |",
        "| QN-Mixer | 30.75 ± 0.35 | 91.00 ± 1.41 | 21.50 ± 0.71 | 81.00 ± 1.41 |", "",
        "QN-Mixer over FBP: +9.75 dB, mean over 2 images, ± their standard deviation (data range 1)",
    ]  # fmt: skip
    alone = "mean over 2 images, ± their standard deviation (data range 1)"
    assert f"QN-Mixer over FBP: +9.75 dB, {alone}" in (tmp_path / "page.html").read_text()
    assert Evaluation(scores.scores_of("FBP")).gain() == alone


def test_what_is_missing_or_no_number_is_seen(scores: Evaluation, tmp_path: Path) -> None:
    """A slice with nothing in the window is left out of its means. One value has no deviation."""
    fbp, ours, *others = scores.scores
    first = [changed(score, window_psnr=None, window_ssim=None) for score in (fbp, changed(ours, psnr=math.nan))]
    found = replace(scores, scores=[*first, *others])
    write_evaluation(tmp_path, found, Console(quiet=True))
    assert found.means()["FBP"] == {"psnr": 21.0, "ssim": 55.0, "window_psnr": 12.0, "window_ssim": 44.0}
    table, warning = (tmp_path / "table.md").read_text(), "QN-Mixer gives NaN or infinite pixels for 1 of 2 slices"
    assert "| QN-Mixer | nan ± nan | 91.00 ± 1.41 | 22.00 | 82.00 |" in table
    assert f"**Warning: {warning}" in table
    assert f"Warning: {warning}" in (tmp_path / "page.html").read_text()
    nothing = [changed(score, window_psnr=None, window_ssim=None) for score in scores.scores]
    assert math.isnan(replace(scores, scores=nothing).means()["FBP"]["window_psnr"])
    empty = replace(scores, scores=nothing)
    write_evaluation(tmp_path, empty, Console(quiet=True))
    table = (tmp_path / "table.md").read_text()
    assert "| – | – |" in table
    assert "nan" not in table
    assert "no slice has window PSNR, dB or window SSIM × 100: no pixel lies in evaluation.window" in table
