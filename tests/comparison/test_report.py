"""The tables and files of a comparison whose scores are given."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qnmixer.engine.config.commands import parse_compare
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import parse
from qnmixer.engine.evaluation.scores import ImageScore
from qnmixer.engine.reports.pictures import MethodImages, SliceImages
from qnmixer.engine.reports.terminal import Console
from qnmixer.extras.comparison.methods import ComparedJob, ComparedMethod, Comparison
from qnmixer.extras.comparison.report import (
    COSTS,
    curve_of,
    draw_curves,
    drawn_of,
    pairs_of,
    tables_of,
    write_comparison,
)

TEST = "as_trained"


def of_all(psnr: float, ssim: float) -> dict[str, float | None]:
    return {"psnr": psnr, "ssim": ssim, "window_psnr": psnr, "window_ssim": psnr}


def scores(values: dict[int, list[float]], patients: list[int] | None) -> dict[tuple[int, int], list[ImageScore]]:
    return {
        (seed, 7): [
            ImageScore(k, f"slice{k}", "QN-Mixer", of_all(v, 2 * v), patient=patients and patients[k])
            for k, v in enumerate(its)
        ]
        for seed, its in values.items()
    }


def method(
    name: str, values: dict[int, list[float]], scan: str = "x", patients: list[int] | None = None, **problems: str
) -> ComparedMethod:
    jobs = [ComparedJob(Path(f"{name}{seed}"), {"git_commit": "0123456789ab"}, None, "") for seed in values]
    jobs += [ComparedJob(Path(folder), {}, None, problem) for folder, problem in problems.items()]
    measured = {TEST: scores(values, patients)} if values else {}
    cost = dict(zip(COSTS, (4, 1234, 65.0, 0.25, 77.0, 0.0123, 4.5), strict=True)) if values else {}
    return ComparedMethod(name, jobs, name, measured, {TEST: scan}, cost)


def comparison_of(*methods: ComparedMethod, tests: list[str] | None = None) -> Comparison:
    return Comparison([Path("sweep")], [*methods], "a processor", {test: {} for test in tests or [TEST]})


@pytest.fixture
def comparison() -> Comparison:
    methods = [
        method("A", {1: [30.0, 32.0], 2: [31.0, 33.0]}),
        method("B", {1: [29.0, 30.0]}, j9="failed: FloatingPointError: the loss became nan"),
        method("of another scan", {1: [20.0, 21.0]}, scan="y"),
        method("C", {}, j3="not yet run"),
    ]
    image = torch.zeros(32, 32).index_fill(0, torch.arange(8), 500.0)
    drawn = SliceImages("slice 0", image, [MethodImages("A", [image, image + 20], "30.00 dB / 60.00")])
    return replace(comparison_of(*methods), slices={TEST: {0: drawn}}, notes=["disc is left out: why"])


def test_tables(comparison: Comparison) -> None:
    comparison.methods.append(ComparedMethod("FBP", []))  # as where the jobs have not all the same sinograms
    quality, pairs, costs, sources = tables_of(comparison)
    assert quality.title == "as_trained: 2 slices of 2 patients"
    assert quality.rows[0] == ["A", "2", "31.50 ± 0.71", "± 1.41", "63.00 ± 1.41", "± 2.83"]
    assert quality.rows[1][:3] == ["B", "1 of 2", "29.50"]
    assert quality.rows[3:] == [["C", "0 of 1", "not yet run", "–", "–", "–"], ["FBP", "–", "not measured", *"–––"]]
    assert [row[:2] for row in pairs.rows] == [["A", "B"]]  # on the same sinograms
    assert pairs.rows[0][2].startswith("+2.00 ± ")
    assert pairs.rows[0][-1] == "2, 2"
    assert costs.rows[0] == ["A", "4", "1,234", "1 min 05 s", "250", "77", "12.3", "4.5"]
    assert costs.rows[3] == ["C", *["–"] * 7]
    assert sources.rows[0][:3] == ["A", "A1, A2", "012345678"]
    a = comparison.methods[0]
    a.jobs.append(ComparedJob(Path("other/0"), {}, None, ""))  # seed 1 again, of another sweep
    assert tables_of(comparison)[0].rows[0][1] == "2 of 3"


def test_the_slices_of_a_patient_count_as_one() -> None:
    """Three slices of one patient, and one of another."""
    values, patients = [30.0, 31.0, 32.0, 40.0], [0, 0, 0, 1]
    a = method("A", {1: values}, patients=patients)
    b = method("B", {1: [29.0, 30.0, 31.0, 38.0]}, patients=patients)
    quality, pairs, *_ = tables_of(comparison_of(a, b))
    assert a.psnr(TEST) == 35.5
    assert quality.title == "as_trained: 4 slices of 2 patients"
    # of 1 and 2, with one degree of freedom
    assert pairs.rows == [["A", "B", "+1.50 ± 6.35", "–", "+3.00 ± 12.71", "–", "2, 1"]]
    for of in (a, b):
        of.measured["drawn"], of.scans["drawn"] = scores({1: values}, None), "y"
    _, _, every, *_ = tables_of(comparison_of(a, b, tests=[TEST, "drawn"]))
    assert every.rows[0] == ["A", "35.50 / 71.00", "33.25 / 66.50"]
    # Slices whose patient is not known are slices still, also of one name.
    nameless = [replace(score, slice="the same", patient=None) for score in a.measured[TEST][1, 7]]
    a.measured[TEST] = {(1, 7): nameless}
    assert len(a.scores(TEST, "psnr")[1, 7]) == 4


def test_a_patient_in_the_test_slices_of_two_seeds_is_one_patient() -> None:
    """Each seed has split the patients anew, so the slice of a patient has another number in each split."""

    def split(values: dict[str, float]) -> list[ImageScore]:
        return [ImageScore(k, f"{name}/0", "A", of_all(v, v), patient=k) for k, (name, v) in enumerate(values.items())]

    a, b, c = (ComparedMethod(name, [], name, {}, {TEST: "x"}) for name in "ABC")
    a.measured[TEST] = {(1, 1): split({"p": 30.0, "q": 32.0}), (2, 2): split({"q": 34.0, "p": 36.0})}
    b.measured[TEST] = {(1, 1): split({"p": 29.0, "q": 30.0}), (2, 2): split({"q": 32.0, "p": 35.0})}
    c.measured[TEST] = {(3, 3): split({"r": 40.0})}  # a seed whose test patients no other has
    found = comparison_of(a, b, c)
    assert a.scores(TEST, "psnr") == {(1, 1): {"p/0": 30.0, "q/0": 32.0}, (2, 2): {"q/0": 34.0, "p/0": 36.0}}
    ((one, other, gains),) = pairs_of(found, TEST)
    assert (one, other, gains["psnr"].mean, gains["psnr"].n_patients) == (a, b, 1.5, 2)
    assert tables_of(found)[0].title == "as_trained: 2 slices of 2 patients"


def test_files_tell_the_same(comparison: Comparison, tmp_path: Path) -> None:
    for of_seed in comparison.methods[1].measured[TEST].values():
        for score in of_seed:
            score.values |= {"window_psnr": None, "window_ssim": None}  # nothing is in the window
    with Console(quiet=True) as console:
        write_comparison(tmp_path, comparison, parse_compare(compose("compare", ["tests=[as_trained]"])), console)
    names = {f"comparison.{kind}" for kind in ("csv", "md", "png", "html")} | {"images.csv"}
    assert {path.name for path in tmp_path.iterdir()} == names
    with (tmp_path / "comparison.csv").open(newline="") as stream:
        first, second, _, last = csv.DictReader(stream)
    assert [first[key] for key in ("method", "status", "seeds", "jobs", "images", "patients")] == [
        "A", "measured", "2", "2", "2", "2",
    ]  # fmt: skip
    assert (first["psnr"], first["window_psnr"]) == ("31.5", "31.5")
    assert (second["window_psnr"], last["status"], last["psnr"], last["parameters"]) == ("", "not yet run", "", "")
    markdown = (tmp_path / "comparison.md").read_text()
    assert "| A | 2 | 31.50 ± 0.71 |" in markdown
    assert "- disc is left out: why\n- B, job j9: failed: FloatingPointError: the loss became nan" in markdown
    assert len((tmp_path / "images.csv").read_text().splitlines()) == 1 + 4 + 2 + 2


def test_the_curves_are_those_of_the_validations(tmp_path: Path) -> None:
    """A validation that is not a finite number is a gap. Without a second validation there is no picture."""
    config = parse(compose("train", ["model=learn", "trainer.max_steps=30", "seed=1"]))
    metrics = "step,samples,train/samples_per_second,val/psnr\n"

    def job(name: str, rows: str, steps: int) -> ComparedJob:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(metrics + rows)
        return ComparedJob(tmp_path / name, {"steps": steps}, config, "")

    learned = job("a", "5,10,2.0,\n10,20,5.0,\n10,20,,33\n20,40,,nan\n30,60,,31\n", 30)
    first, _, last = curve_of(learned)
    assert (first, last) == ((10, 7 / 60, 33.0), (30, 7 / 60, 31.0))
    tv = ComparedMethod("TV", [job("tv", "0,0,,30.4\n", 0)], "TV")
    of_two = ComparedMethod("LEARN", [learned, job("b", "10,10,,29\n20,20,,nan\n", 30)], "LEARN")
    dead = ComparedMethod("dead", [job("dead", "10,10,,nan\n20,20,,nan\n", 30)], "dead")
    for number, methods in enumerate(([of_two, tv], [dead])):
        assert draw_curves(tmp_path / f"{number}.png", methods)
        assert np.asarray(Image.open(tmp_path / f"{number}.png")).std() > 10
    assert not draw_curves(tmp_path / "none.png", [tv])
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("worst", ["FBP", "J"])
def test_the_picture_has_the_best_methods_and_fbp(worst: str) -> None:
    names = [worst, "I", "H" if worst == "FBP" else "FBP", *"GFEDCBA"]  # the best one last
    image = torch.zeros(8, 8)
    drawn = drawn_of(SliceImages("slice", image, [MethodImages(name, [image], "") for name in names]))
    assert [its.name for its in drawn.methods] == (["FBP", "H"] if worst == "FBP" else ["FBP"]) + [*"GFEDCBA"]
