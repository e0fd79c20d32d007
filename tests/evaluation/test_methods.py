import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from qnmixer.engine.config import parse
from qnmixer.engine.config.commands import parse_compare
from qnmixer.engine.config.compose import compose
from qnmixer.engine.evaluation.evaluate import ImageScore
from qnmixer.engine.evaluation.statistics import Difference, difference, spread, student_quantile
from qnmixer.engine.reports.page import PageMethod, PageSlice
from qnmixer.engine.reports.pictures import Panel, Row, _worst_part, draw_methods
from qnmixer.extras.comparison.compare import _Measuring, split_anew
from qnmixer.extras.comparison.curves import Level, Validation, curve_of, first_above, median_step
from qnmixer.extras.comparison.methods import ComparedJob, ComparedMethod, Comparison, Cost, methods_of
from qnmixer.extras.comparison.report import (
    TV,
    config_digest,
    differences,
    over_tv,
    pairs_of,
    tables_of,
    write_comparison,
)


def test_mean_over_seeds_of_means_over_patients() -> None:
    found = spread({1: {"a": 30.0, "b": 34.0}, 2: {"a": 31.0, "b": 37.0}})
    assert found.mean == 33.0
    assert found.over_seeds == pytest.approx(math.sqrt(2))  # of 32 and 34
    assert found.over_patients == pytest.approx(5 / math.sqrt(2))  # of 30.5 and 35.5
    assert (found.n_seeds, found.n_patients) == (2, 2)
    alone = spread({7: {"a": 30.0}})
    assert (alone.mean, alone.over_seeds, alone.over_patients) == (30.0, None, None)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (10, 2.22814), (63, 1.99834), (100_000, 1.95999)]
)
def test_quantiles_of_student_s_distribution(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, rel=1e-4)


def test_a_difference_is_paired_by_patient_and_by_seed() -> None:
    one, other = {1: {"a": 30.0, "b": 40.0, "c": 50.0}}, {1: {"c": 49.0, "b": 38.0, "a": 27.0}}
    found = difference(one, other)  # 3, 2, 1, whatever their order: deviation 1, error 1/√3, two degrees of freedom
    assert (found.mean, found.over_seeds, found.n_patients, found.n_seeds) == (2.0, None, 3, 1)
    assert found.over_patients == pytest.approx(4.30265 / math.sqrt(3), rel=1e-4)
    assert difference({1: {"a": 3.0}}, {1: {"a": 1.0}}) == Difference(2.0, None, None, 1, 1)
    assert difference(one, one) == Difference(0.0, 0.0, None, 3, 1)
    with pytest.raises(ValueError, match="common patient"):
        difference(one, {1: {"d": 1.0}})
    # Both networks of a seed are better by the same: only what differs within a seed is left.
    one = {seed: {"a": 30.0 + seed, "b": 32.0 + seed + gain} for seed, gain in ((1, 0.0), (2, 0.1), (3, 0.2))}
    other = {seed: {"a": 29.0 + seed, "b": 31.0 + seed} for seed in (1, 2, 3)}
    found = difference(one, other)  # by seed 1, 1.05, 1.1; by patient 1, 1.1
    assert found.over_seeds == pytest.approx(4.30265 * 0.05 / math.sqrt(3), rel=1e-4)
    assert found.over_patients == pytest.approx(12.7062 * 0.05, rel=1e-4)
    assert difference(one, {1: other[1]}).n_seeds == 3  # a method that learns nothing needs one seed only


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Of 200 draws with 3 seeds and 5 patients, whose true difference is 0.5."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(200):
        of_patient, gains = rng.normal(0, 3, 5), 0.5 + rng.normal(0, 0.5, 5)
        methods = [
            {s: {str(i): float(v) for i, v in enumerate(of_patient + of + rng.normal(0, 0.1, 5))} for s in range(3)}
            for of in (gains, 0.0)
        ]
        found = difference(*methods)
        assert found.over_patients is not None
        hits += abs(found.mean - 0.5) < found.over_patients
    assert 0.91 < hits / 200 < 0.99


def of_all(psnr: float, ssim: float) -> dict[str, float]:
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
    jobs = [ComparedJob(Path(f"{name}{seed}"), [], {"git_commit": "0123456789ab"}, None, "") for seed in values]
    jobs += [ComparedJob(Path(folder), [], {}, None, problem) for folder, problem in problems.items()]
    measured = {"as_trained": scores(values, patients)} if values else {}
    cost = Cost(1234, 65.0, 0.25, 77.0, 0.0123, 4.5) if values else None
    return ComparedMethod(name, jobs, name, measured, {"as_trained": scan}, cost)


@pytest.fixture
def comparison() -> Comparison:
    methods = [
        method("A", {1: [30.0, 32.0], 2: [31.0, 33.0]}),
        method("B", {1: [29.0, 30.0]}, j9="failed: FloatingPointError: the loss became nan"),
        method("of another scan", {1: [20.0, 21.0]}, scan="y"),
        method("C", {}, j3="not yet run"),
    ]
    image = torch.zeros(32, 32).index_fill(0, torch.arange(8), 500.0)
    drawn = PageSlice("slice0", image, [PageMethod("A", [image, image + 20], "30.00 dB / 60.00")])
    return Comparison(
        [Path("sweep")], ["as_trained"], methods, {"as_trained": [drawn]}, ["disc is left out: why"], "a processor"
    )


def test_methods_are_held_against_total_variation_and_each_other_on_the_same_sinograms(comparison: Comparison) -> None:
    a, b, another, c = comparison.methods
    assert over_tv(comparison, a, "as_trained") is None
    b.network = TV
    gains = over_tv(comparison, a, "as_trained")
    assert gains is not None
    assert (gains["psnr"].mean, gains["ssim"].mean) == (2.0, 4.0)  # (30.5, 32.5) − (29, 30)
    assert over_tv(comparison, b, "as_trained") is None
    assert over_tv(comparison, another, "as_trained") is None
    assert over_tv(comparison, c, "as_trained") is None
    assert pairs_of(comparison, "as_trained") == [(a, b)]
    assert differences(a, b, "as_trained")["psnr"] == gains["psnr"]


def test_tables(comparison: Comparison) -> None:
    quality, pairs, costs, sources = tables_of(comparison)
    assert quality.title == "as_trained: 2 slices"
    assert quality.headings[-1] == "slices"
    assert quality.rows[0] == ["A", "2", "31.50 ± 0.71", "± 1.41", "63.00 ± 1.41", "± 2.83"]
    assert quality.rows[1][:3] == ["B", "1 of 2", "29.50"]
    assert quality.rows[3] == ["C", "0 of 1", "not yet run", "–", "–", "–"]
    assert [row[:2] for row in pairs.rows] == [["A", "B"]]
    assert pairs.rows[0][2].startswith("+2.00 ± ")
    assert pairs.rows[0][-1] == "2, 2"
    assert costs.rows[0] == ["A", "1,234", "1 min 05 s", "250", "77", "12.3", "4.5"]
    assert costs.rows[3] == ["C", *["–"] * 6]
    assert sources.rows[0][:3] == ["A", "A1, A2", "012345678"]
    assert sources.rows[1][-1] == "job j9: failed: FloatingPointError: the loss became nan"


def test_the_data_range_is_that_of_each_method(comparison: Comparison) -> None:
    a, b, *_, not_measured = comparison.methods

    def said() -> str:
        return tables_of(comparison)[0].note.partition("Data range")[2]

    assert said() == " 1."
    not_measured.own_range.add("as_trained")
    assert said() == " 1."
    b.own_range.add("as_trained")
    assert said() == " 1; of B: data range of each reference, SSIM as skimage's."
    for method in comparison.methods:
        method.own_range.add("as_trained")
    assert said() == " of each reference, SSIM as skimage's."
    a.own_range.clear()
    assert said() == " 1; of B, of another scan: data range of each reference, SSIM as skimage's."


def test_the_slices_of_a_patient_count_as_one() -> None:
    """Three slices of one patient, and one of another."""
    values, patients = [30.0, 31.0, 32.0, 40.0], [0, 0, 0, 1]
    a = method("A", {1: values}, patients=patients)
    tv = method(TV, {1: [29.0, 30.0, 31.0, 38.0]}, patients=patients)
    quality, *_ = tables_of(Comparison([Path("sweep")], ["as_trained"], [a, tv], {}, [], "a processor"))
    assert a.psnr("as_trained") == 35.5
    assert quality.title == "as_trained: 4 slices of 2 patients"
    assert quality.headings[3] == "patients"
    assert quality.rows[0][-2:] == ["+1.50 ± 6.35", "+3.00 ± 12.71"]  # of 1 and 2, with one degree of freedom
    assert "t(1) · s/√2" in quality.note
    for of in (a, tv):
        of.measured["drawn"], of.scans["drawn"] = scores({1: values}, None), "y"
    for tests, units in ((["as_trained", "drawn"], "patients or slices"), (["drawn", "drawn"], "slices")):
        _, _, every, *_ = tables_of(Comparison([Path("sweep")], tests, [a, tv], {}, [], "a processor"))
        assert f"mean over {units} ± standard deviation" in every.note


def test_a_patient_in_the_test_slices_of_two_seeds_is_one_patient() -> None:
    """Each seed has split the patients anew, so the slice of a patient has another number in each split."""

    def split(values: dict[str, float]) -> list[ImageScore]:
        return [ImageScore(k, f"{name}/0", "A", of_all(v, v), patient=k) for k, (name, v) in enumerate(values.items())]

    a, b, c, tv = (ComparedMethod(name, [], name, {}, {"as_trained": "x"}) for name in ("A", "B", "C", TV))
    a.measured["as_trained"] = {(1, 1): split({"p": 30.0, "q": 32.0}), (2, 2): split({"q": 34.0, "p": 36.0})}
    tv.measured["as_trained"] = {(1, 1): split({"p": 29.0, "q": 30.0}), (2, 2): split({"q": 32.0, "p": 35.0})}
    b.measured["as_trained"] = {(3, 3): split({"r": 40.0})}  # a seed whose test patients no other has
    found = Comparison([Path("sweep")], ["as_trained"], [a, b, c, tv], {}, [], "a processor")
    assert a.scores("as_trained", "psnr") == {(1, 1): {"p/0": 30.0, "q/0": 32.0}, (2, 2): {"q/0": 34.0, "p/0": 36.0}}
    gains = over_tv(found, a, "as_trained")
    assert gains is not None
    assert (gains["psnr"].mean, gains["psnr"].n_patients) == (1.5, 2)
    assert over_tv(found, b, "as_trained") is None
    assert pairs_of(found, "as_trained") == [(a, tv)]
    assert tables_of(found)[0].title == "as_trained: 2 slices of 2 patients"
    assert split_anew([a, tv], "as_trained")
    del a.measured["as_trained"][2, 2], tv.measured["as_trained"][2, 2]
    assert not split_anew([a, c, tv], "as_trained")


def test_slices_with_nothing_in_the_window_are_left_out(comparison: Comparison, tmp_path: Path) -> None:
    a, b, *_ = comparison.methods
    b.network = TV
    nothing = {"window_psnr": None, "window_ssim": None}
    for of_method in (a, b):
        for first, *_ in of_method.measured["as_trained"].values():
            first.values |= nothing
    assert differences(a, b, "as_trained")["window_psnr"].n_patients == 1
    for of_seed in b.measured["as_trained"].values():
        for score in of_seed:
            score.values |= nothing
    assert differences(a, b, "as_trained").keys() == {"psnr", "ssim"}
    with Console(quiet=True) as console:
        write_comparison(tmp_path, comparison, parse_compare(compose("compare", ["tests=[as_trained]"])), console)
    record = json.loads((tmp_path / "comparison.json").read_text())
    assert [it["tests"]["as_trained"]["window_psnr"] is None for it in record["methods"][:2]] == [False, True]


def test_the_step_from_which_on_a_method_stays_above_total_variation(tmp_path: Path) -> None:
    config = parse(compose("train", ["model=learn", "trainer.max_steps=30", "seed=1"]))
    metrics = "step,samples,train/samples_per_second,val/psnr\n"

    def job(name: str, rows: str, steps: int) -> ComparedJob:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(metrics + rows)
        return ComparedJob(tmp_path / name, [], {"steps": steps}, config, "")

    learned = job("a", "5,10,2.0,\n10,20,5.0,\n10,20,,33\n20,40,,30.5\n30,60,,31\n", 30)
    assert curve_of(learned) == [Validation(10, 7.0, 33.0), Validation(20, 7.0, 30.5), Validation(30, 7.0, 31.0)]
    tv = ComparedMethod("TV", [job("tv", "0,0,,30.4\n", 0)], TV)
    a = ComparedMethod("LEARN", [learned, job("b", "10,10,,29\n20,20,,30\n", 30)], "LEARN")
    level = Level(TV, [a, tv])
    assert level.crossings(a) == [10, None]
    assert level.crossings(tv) == []
    assert Level("FBP", [a, tv]).crossings(a) == []
    config.data = config.data.changed(n_val=3)  # of all three jobs
    assert level.crossings(a) == []
    curve = [Validation(step, 0.0, psnr) for step, psnr in ((1, 9.0), (2, 5.0), (3, 6.0), (4, math.nan))]
    assert [first_above(curve[:n], 5.5) for n in (1, 2, 3, 4)] == [1, None, 3, None]
    texts = {median_step(steps) for steps in ([1500], [2000, 1500, None], [None, 1500, None], [None])}
    assert texts == {"1,500", "2,000 (2 of 3)", "none (1 of 3)", "none"}


def test_other_noise_is_no_test_of_measured_sinograms(tmp_path: Path) -> None:
    measuring = _Measuring(parse_compare(compose("compare", ["accelerator=cpu"])), tmp_path, [])
    config = parse(compose("train", ["experiment=lodopab", "data.root=/x"]))
    job = ComparedJob(tmp_path, [], {}, config, "")
    assert measuring._config(job, "field_noise") == measuring._config(job, "as_trained")
    measuring.config.sets["moved"] = ["data.root='/a b'", "data.num_workers=0"]
    assert measuring._config(job, "moved")[0].data == replace(config.data, root="/a b", num_workers=0)


def test_a_job_that_its_epochs_limit_has_the_steps_that_it_took() -> None:
    for overrides, steps in ((["trainer.max_epochs=2"], 16), (["trainer.max_steps=20"], 20)):
        config = parse(compose("train", ["model=learn", *overrides]))
        assert ComparedJob(Path("0"), [], {"steps": 16}, config, "").steps == steps
        assert ComparedJob(Path("0"), [], {"steps": 0}, config, "").steps is None


def test_a_resumed_job_has_the_config_of_the_others() -> None:
    first, resumed, other = (
        config_digest(ComparedJob(Path("0"), [], {}, parse(compose("train", words)), ""))
        for words in ([], ["resume=runs/0", "seed=2"], ["optimizer.lr=1"])
    )
    assert first == resumed != other


def test_a_seed_that_two_sweeps_trained_counts_once() -> None:
    a = method("A", {1: [30.0, 32.0], 2: [31.0, 33.0]})
    a.jobs.append(ComparedJob(Path("other/0"), [], {}, None, ""))  # seed 1 again
    quality, *_ = tables_of(Comparison([Path("sweep")], ["as_trained"], [a], {}, [], "a processor"))
    assert quality.rows[0][1] == "2 of 3"


def test_a_method_with_no_job_and_no_measure_has_a_row(comparison: Comparison) -> None:
    """As FBP, which is added to each comparison, where its jobs have not all the same sinograms."""
    comparison.methods.append(ComparedMethod("FBP", []))
    quality, *_ = tables_of(comparison)
    assert quality.rows[4][:3] == ["FBP", "–", "not measured"]


def test_slices_of_one_name_are_slices_still(comparison: Comparison) -> None:
    a = comparison.methods[0]
    for its in a.measured["as_trained"].values():
        for score in its:
            score.slice = "the same"
    assert len(a.scores("as_trained", "psnr")[1, 7]) == 2


def test_files_tell_the_same(comparison: Comparison, tmp_path: Path) -> None:
    config = parse_compare(compose("compare", ["tests=[as_trained]"]))
    with Console(quiet=True) as console:
        write_comparison(tmp_path, comparison, config, console)
    names = {f"comparison.{kind}" for kind in ("csv", "md", "json", "png", "html")} | {"images.csv"}
    assert {path.name for path in tmp_path.iterdir()} == names
    record = json.loads((tmp_path / "comparison.json").read_text())
    a, b, _, c = record["methods"]
    assert a["tests"]["as_trained"]["psnr"]["mean"] == 31.5
    assert record["differences"]["as_trained"][0]["psnr"]["mean"] == 2.0
    assert [job["status"] for job in b["jobs"]] == ["done", "failed: FloatingPointError: the loss became nan"]
    assert (c["tests"], c["cost"]) == ({}, None)
    assert record["made"]["config"]["sets"] == {"as_trained": []}
    markdown = (tmp_path / "comparison.md").read_text()
    assert "| A | 2 | 31.50 ± 0.71 |" in markdown
    assert "- disc is left out: why" in markdown
    assert len((tmp_path / "images.csv").read_text().splitlines()) == 1 + 4 + 2 + 2


def test_the_picture_enlarges_where_the_methods_are_wrong_inside_the_body(tmp_path: Path) -> None:
    truth = torch.full((64, 64), -1000.0)
    truth[16:56, 8:60] = 0.0
    good, bad = truth.clone(), truth.clone()
    good[36:44, 40:48] += 300  # what all but the worst have
    good[:8, :8] += 900  # outside
    bad[16:32, 8:24] += 900
    row, column = _worst_part([good, bad], truth)
    assert row <= 36
    assert row + 16 >= 44
    assert column <= 40
    assert column + 16 >= 48
    rows = [Row(f"slice {k}", truth, [Panel("good", good), Panel("bad", bad)]) for k in range(2)]
    draw_methods(tmp_path / "picture.png", rows)
    picture = np.asarray(Image.open(tmp_path / "picture.png").convert("RGB")).astype(int)
    orange = (abs(picture - np.array([255, 127, 14])).sum(axis=-1) < 30).sum()
    assert orange > 6 * 4 * 10  # frames on six images
    assert picture.shape[0] > picture.shape[1]


def sweep(folder: Path, jobs: dict[str, list[str]], varying: list[str]) -> Path:
    (folder / "sweep.json").write_text(
        json.dumps({"overrides": [], "varying": varying, "git_commit": None, "jobs": jobs})
    )
    return folder


@pytest.mark.parametrize(
    ("jobs", "varying", "names"),
    [
        ([["model=qn_mixer", "seed=1"], ["model=qn_mixer", "seed=2"], ["model=learn", "seed=1"]], ["model", "seed"],
         ["QN-Mixer", "LEARN"]),
        ([["model.hessian=bfgs"], ["model.hessian=identity"]], ["model.hessian"],
         ["hessian=bfgs", "hessian=identity"]),
        ([["model=qn_mixer", "noise=none"], ["model=qn_mixer", "noise=field"], ["model=tv", "noise=none"]],
         ["model", "noise"], ["QN-Mixer noise=none", "QN-Mixer noise=field", "TV"]),
        ([["seed=1"], ["seed=2"]], ["seed"], ["QN-Mixer"]),
        ([["model.hessian=nonsense"]], ["model.hessian"], ["hessian=nonsense"]),
    ],
)  # fmt: skip
def test_methods_are_jobs_that_differ_in_more_than_their_seed(
    tmp_path: Path, jobs: list[list[str]], varying: list[str], names: list[str]
) -> None:
    found = methods_of([sweep(tmp_path, {str(k): its for k, its in enumerate(jobs)}, varying)])
    assert [method.name for method in found] == names
    assert sum(len(method.jobs) for method in found) == len(jobs)
    assert {job.problem for method in found for job in method.jobs} == {"not yet run"}


def test_a_method_that_another_sweep_trained_for_longer_has_a_row_of_its_own(tmp_path: Path) -> None:
    folders = [tmp_path / "equal_steps", tmp_path / "equal_time"]
    jobs = [{"0": ["model=learn", "seed=1"], "1": ["model=qn_mixer", "seed=1"]},
            {"0": ["model=learn", "seed=1", "trainer.max_steps=9000"]}]  # fmt: skip
    for folder, its, varying in zip(folders, jobs, (["model"], ["seed"]), strict=True):
        folder.mkdir()
        sweep(folder, its, varying)
    assert [method.name for method in methods_of(folders)] == ["LEARN", "LEARN max_steps=9000", "QN-Mixer"]


@pytest.mark.parametrize(
    "override",
    [
        "hydra.searchpath=[pkg://antigravity_of_a_stranger]", "data.root=${oc.env:OF_THIS_MACHINE}",
        "experiment=[../../../evil]", "model._target_=antigravity_of_a_stranger.Net",
    ],
)  # fmt: skip
def test_what_a_sweep_says_is_neither_imported_nor_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    monkeypatch.setenv("OF_THIS_MACHINE", "secret")
    (tmp_path / "antigravity_of_a_stranger").mkdir()
    (tmp_path / "antigravity_of_a_stranger" / "__init__.py").write_text("open('imported', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    jobs = {"0": ["data=numpy", "data.root=/ct", override]}
    (method,) = methods_of([sweep(tmp_path, jobs, [override.partition("=")[0]])])
    assert not (tmp_path / "imported").exists()
    assert "secret" not in str(method.jobs)
