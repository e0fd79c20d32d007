"""The tables and files of a comparison whose scores are given."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qnmixer.data.splits import Overlap
from qnmixer.evaluation.pictures import MethodImages, SliceImages
from qnmixer.evaluation.scores import Conditions, ImageScore, titles_of
from qnmixer.files import digest_of_bytes
from qnmixer.runs.terminal import Console
from qnmixer_studies.comparison.methods import ComparedJob, ComparedMethod, Comparison
from qnmixer_studies.comparison.report import write_comparison

from ...conftest import config_of, csv_rows

IMAGE = torch.zeros(32, 32).index_fill(0, torch.arange(8), 500.0)


def score(number: int, psnr: float, patient: int | None = None, name: str = "") -> ImageScore:
    values = {"psnr": psnr, "ssim": 2 * psnr, "window_psnr": psnr, "window_ssim": psnr}
    name = name or f"slice{number}"
    return ImageScore(number, name, "QN-Mixer", values, patient, digest_of_bytes(name.encode()))


def method(name: str, values: dict[int, list[ImageScore]], n_seeds: int) -> ComparedMethod:
    config = config_of()
    configs = {seed: config.model_copy(update={"seed": seed, "data": config.data.changed(seed=7)}) for seed in values}
    jobs = [
        ComparedJob(Path(f"{name}{seed}"), {"steps": 4}, configs[seed], its, title="test split")
        for seed, its in values.items()
    ]
    return ComparedMethod(name, jobs, n_seeds, 1234)


def written(folder: Path, *methods: ComparedMethod, console: Console | None = None) -> str:
    """comparison.md."""
    shown = {
        (methods[0].jobs[0].test, 0): SliceImages(
            "slice 0", IMAGE, [MethodImages("A", [IMAGE, IMAGE + 20], "30.00 dB")], [-160, 240]
        )
    }
    found = Comparison([Path("/home/anna/sweep")], [*methods], titles_of({}), shown)
    write_comparison(folder, found, console or Console(quiet=True))
    return (folder / "comparison.md").read_text()


def test_files_tell_the_same(tmp_path: Path) -> None:
    a = method("A", {1: [score(0, 30.0), score(1, 32.0)], 2: [score(0, 31.0), score(1, 33.0)]}, 2)
    b = method("B", {1: [score(0, 29.0), score(1, 30.0)]}, 2)
    for its in b.measured[1, 7]:
        its.values |= {"window_psnr": None, "window_ssim": None}  # nothing is in the window
    a.trained = Overlap(2, 1)
    markdown = written(tmp_path, a, b, method("C", {}, 1))
    assert markdown.startswith("# Comparison of sweep\n\n## test split: 2 patients\n")
    assert "| A | 2 | 31.50 ± 0.71 | 63.00 ± 1.41 | 1,234 | 4 | – | – |" in markdown
    assert "| B | 1 of 2 | 29.50 | 59.00 | 1,234 | 4 | – | – |" in markdown
    assert "| C | 0 of 1 | – | – | 1,234 | – | – | – |" in markdown
    assert "| A | B | 2.00 ± 6.35 | 6.35 | 4.00 ± 12.71 | 12.71 | 2, 2 |" in markdown
    assert "Warning: 2 of the slices were used in training: the scores are too good." in markdown
    assert "Warning: 1 other slices look like training slices" in markdown
    names = {f"comparison.{kind}" for kind in ("csv", "md", "png", "html")} | {"images.csv"}
    assert {path.name for path in tmp_path.iterdir()} == names
    lines = csv_rows(tmp_path / "comparison.csv")
    assert [line["metric"] for line in lines if line["method"] == "B"] == ["psnr", "ssim"]
    assert [float(lines[0][key]) for key in ("mean", "seeds", "patients")] == [31.5, 2, 2]
    assert len((tmp_path / "images.csv").read_text().splitlines()) == 1 + 4 + 2


def test_a_seed_that_is_trained_twice_is_told_in_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = method("A", {1: [score(0, 30.0)], 2: [score(0, 31.0)]}, 2)
    a.repeats = [replace(a.jobs[0], folder=Path("sweep/7"))]
    warning = "Warning: jobs sweep/7 of A repeat a seed, which counts once."
    assert warning in written(tmp_path, a, console=Console(width=300))
    assert warning in capsys.readouterr().out
    assert warning in (tmp_path / "comparison.html").read_text()
    assert {line["seeds"] for line in csv_rows(tmp_path / "comparison.csv")} == {"2"}


def test_the_slices_of_a_patient_count_as_one(tmp_path: Path) -> None:
    """Three slices of one patient, and one of another."""
    of_a = [score(k, v, patient) for k, (v, patient) in enumerate([(30.0, 0), (31.0, 0), (32.0, 0), (40.0, 1)])]
    of_b = [replace(it, values={"psnr": it.values["psnr"] - gain}) for it, gain in zip(of_a, (1, 1, 1, 2), strict=True)]
    markdown = written(tmp_path, method("A", {1: of_a}, 1), method("B", {1: of_b}, 1))
    assert "## test split: 2 patients\n" in markdown
    assert "| A | 1 | 35.50 | 71.00 |" in markdown
    assert "| A | B | 1.50 ± 6.35 | – | – | – | 2, 1 |" in markdown  # of 1 and 2, with one degree of freedom


def test_a_patient_in_the_test_slices_of_two_seeds_is_one_patient(tmp_path: Path) -> None:
    """Each seed has split the patients anew, so the slice of a patient has another number in each split."""

    def split(**values: float) -> list[ImageScore]:
        return [score(k, psnr, k, name) for k, (name, psnr) in enumerate(values.items())]

    a = method("A", {1: split(p=30.0, q=32.0), 2: split(q=34.0, p=36.0)}, 2)
    b = method("B", {1: split(p=29.0, q=30.0), 2: split(q=32.0, p=35.0)}, 2)
    c = method("C", {3: split(r=40.0)}, 1)  # its test patients no other has
    markdown = written(tmp_path, a, b, c)
    assert "## test split: 2 patients\n" in markdown
    assert "| A | B | 1.50 ± " in markdown
    assert "| C |" not in markdown.partition("## Differences")[2]


CONDITIONS = Conditions("slices", "scan", "noise", "1", "order")


def with_tests(of: ComparedMethod, *tests: Conditions) -> ComparedMethod:
    """The method, each of whose jobs had one of these tests."""
    for job, test in zip(of.jobs, tests, strict=True):
        job.test = test
    return of


def test_a_mean_over_seeds_with_slices_of_their_own_is_told(tmp_path: Path) -> None:
    """A method that lacks a seed has other slices, so it stands in another table."""
    own = CONDITIONS, CONDITIONS._replace(slices="others")
    values = {1: [score(0, 30.0)], 2: [score(1, 40.0)]}
    a, b = with_tests(method("A", values, 2), *own), with_tests(method("B", values, 2), *own)
    c = with_tests(method("C", {1: values[1]}, 2), CONDITIONS)
    markdown = written(tmp_path, a, b, c)
    assert "the test slices of jobs A1, B1, C1; A2, B2 differ" not in markdown
    assert (
        "Warning: the test slices of jobs A1, B1; A2, B2 differ, as they follow data.seed, so ± has both." in markdown
    )
    assert "Jobs had other tests, which differ in slices, so each has its own table" in markdown
    first, second = markdown.split("## test split – test ")[1:]
    assert "| A | 2 | 35.00 ± 7.07 |" in first
    assert "| A | B | 0.00 ± 0.00 |" in first
    assert "| C | 1 of 2 | 30.00 |" in second
    assert "differ, as" not in second


def test_no_mean_is_over_jobs_with_another_scan_or_noise(tmp_path: Path) -> None:
    """As two sweeps with the same overrides have, between which a config file was changed."""
    for other in ({"scan": "b"}, {"noise": "b"}, {"seed": "2"}, {"order": "b"}):
        values = {1: [score(0, 30.0)], 2: [score(0, 40.0)]}
        a = with_tests(method("A", values, 2), CONDITIONS, CONDITIONS._replace(**other))
        markdown = written(tmp_path, *a.by_conditions())
        assert "| A | 1 | 30.00 |" in markdown
        assert "| A | 1 | 40.00 |" in markdown
        assert [line["test"] for line in csv_rows(tmp_path / "images.csv")] == ["1", "2"]
        assert f"which differ in {next(iter(other))}, so each has its own table. Jobs of test 1: " in markdown


def test_what_follows_from_another_difference_is_not_named() -> None:
    without = Conditions("slices", "scan")
    assert Conditions.differing([CONDITIONS, without]) == ["noise"]
    assert Conditions.differing([CONDITIONS, CONDITIONS._replace(slices="b", order="b")]) == ["slices"]
    assert Conditions.differing([CONDITIONS, CONDITIONS._replace(order="b")]) == ["order"]
