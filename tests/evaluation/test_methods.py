import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from qnmixer.config.commands import parse_compare
from qnmixer.config.compose import compose
from qnmixer.evaluation.comparison_report import against_best, tables_of, write_comparison
from qnmixer.evaluation.evaluate import ImageScore
from qnmixer.evaluation.methods import ComparedJob, ComparedMethod, Comparison, Cost, methods_of
from qnmixer.evaluation.statistics import Difference, difference, spread, student_quantile
from qnmixer.reports.page import PageMethod, PageSlice
from qnmixer.reports.pictures import Panel, Row, _worst_part, draw_methods


def test_mean_over_seeds_of_means_over_images() -> None:
    found = spread({1: {"a": 30.0, "b": 34.0}, 2: {"a": 31.0, "b": 37.0}})
    assert found.mean == 33.0
    assert found.over_seeds == pytest.approx(math.sqrt(2))  # of 32 and 34
    assert found.over_images == pytest.approx(5 / math.sqrt(2))  # of 30.5 and 35.5
    assert (found.n_seeds, found.n_images) == (2, 2)
    alone = spread({7: {"a": 30.0}})
    assert (alone.mean, alone.over_seeds, alone.over_images) == (30.0, None, None)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (10, 2.22814), (63, 1.99834), (1e5, 1.95999)]
)
def test_quantiles_of_student_s_distribution(freedom: float, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, rel=1e-4)


def test_a_difference_is_paired_by_image() -> None:
    one, other = {1: {"a": 30.0, "b": 40.0, "c": 50.0}}, {1: {"c": 49.0, "b": 38.0, "a": 27.0}}
    found = difference(one, other)  # 3, 2, 1, whatever their order: deviation 1, error 1/√3, two degrees of freedom
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.30265 / math.sqrt(3), rel=1e-4)
    assert difference({1: {"a": 3.0}}, {1: {"a": 1.0}}) == Difference(2.0, None)
    assert difference(one, one) == Difference(0.0, 0.0)
    with pytest.raises(ValueError, match="common image"):
        difference(one, {1: {"d": 1.0}})


def test_seeds_widen_the_interval_by_welch_and_satterthwaite() -> None:
    one = {seed: {"a": 30.0 + k, "b": 32.0 + k} for k, seed in enumerate((1, 2, 3))}  # seeds' means 31, 32, 33
    other = {seed: {"a": 29.0, "b": 30.0} for seed in (1, 2, 3)}
    found = difference(one, other)  # images: 2 and 3, variance 0.5 / 2; seeds: 1 / 3; of the other nothing
    assert found.mean == 2.5
    total = 0.25 + 1 / 3
    freedom = total**2 / (0.25**2 / 1 + (1 / 3) ** 2 / 2)
    assert found.half_width == pytest.approx(student_quantile(freedom) * math.sqrt(total))


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Of 200 draws with 3 seeds and 12 images, whose true difference is 0.5."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(200):
        of_image, methods = rng.normal(0, 3, 12), []
        for gain in (0.5, 0.0):
            own, seeds = rng.normal(0, 0.5, 12), rng.normal(0, 0.2, 3)
            values = gain + of_image + own + seeds[:, None] + rng.normal(0, 0.1, (3, 12))
            methods.append({s: {str(i): float(values[s, i]) for i in range(12)} for s in range(3)})
        found = difference(*methods)
        assert found.half_width is not None
        hits += abs(found.mean - 0.5) < found.half_width
    assert 0.91 < hits / 200 <= 1


def scores(values: dict[int, list[float]]) -> dict[tuple[int, int], list[ImageScore]]:
    return {
        (seed, 7): [ImageScore(k, f"slice{k}", "QN-Mixer", v, 2 * v, v, v) for k, v in enumerate(its)]
        for seed, its in values.items()
    }


def method(name: str, values: dict[int, list[float]], scan: str = "x", **problems: str) -> ComparedMethod:
    jobs = [ComparedJob(Path(f"{name}{seed}"), [], {"git_commit": "0123456789ab"}, None, "") for seed in values]
    jobs += [ComparedJob(Path(folder), [], {}, None, problem) for folder, problem in problems.items()]
    measured = {"as_trained": scores(values)} if values else {}
    cost = Cost(1234, 65.0, 0.25, 77.0, 0.0123, 4.5) if values else None
    return ComparedMethod(name, jobs, measured, {"as_trained": scan}, cost)


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
        Path("sweep"), ["as_trained"], methods, {"as_trained": [drawn]}, ["disc is left out: why"], "a processor"
    )


def test_methods_are_held_against_the_best_other_one_of_the_same_scan(comparison: Comparison) -> None:
    a, b, another, c = comparison.methods
    found = against_best(comparison, a, "as_trained")
    assert found is not None
    assert found[0] is b
    assert found[1].mean == 2.0  # (30.5, 32.5) − (29, 30)
    assert against_best(comparison, b, "as_trained") == (a, difference(b.scores("as_trained", "psnr"),
                                                                       a.scores("as_trained", "psnr")))  # fmt: skip
    assert against_best(comparison, another, "as_trained") is None
    assert against_best(comparison, c, "as_trained") is None


def test_tables(comparison: Comparison) -> None:
    quality, costs, sources = tables_of(comparison)
    assert quality.title == "as_trained: 2 slices"
    assert quality.rows[0][:6] == ["A", "2", "31.50 ± 0.71", "± 1.41", "63.00 ± 1.41", "± 2.83"]
    assert quality.rows[0][6].startswith("+2.00 ± ")
    assert quality.rows[1][:3] == ["B", "1 of 2", "29.50"]
    assert quality.rows[2][6] == "–"
    assert quality.rows[3] == ["C", "0 of 1", "not yet run", "–", "–", "–", "–"]
    assert costs.rows[0] == ["A", "1,234", "1 min 05 s", "250", "77", "12.3", "4.5"]
    assert costs.rows[3] == ["C", *["–"] * 6]
    assert sources.rows[0][:3] == ["A", "A1, A2", "012345678"]
    assert sources.rows[1][-1] == "job j9: failed: FloatingPointError: the loss became nan"


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
    assert a["tests"]["as_trained"]["against"]["method"] == "B"
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
    found = methods_of(sweep(tmp_path, {str(k): its for k, its in enumerate(jobs)}, varying))
    assert [method.name for method in found] == names
    assert sum(len(method.jobs) for method in found) == len(jobs)
    assert {job.problem for method in found for job in method.jobs} == {"not yet run"}


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
    (method,) = methods_of(sweep(tmp_path, jobs, [override.partition("=")[0]]))
    assert not (tmp_path / "imported").exists()
    assert "secret" not in str(method.jobs)
