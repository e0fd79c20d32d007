"""The report of a comparison: tables (terminal, CSV, Markdown), all results as JSON, pictures, and one HTML page."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console

from qnmixer.config import to_plain
from qnmixer.config.commands import CompareConfig
from qnmixer.evaluation.compare import FBP
from qnmixer.evaluation.evaluate import METRICS
from qnmixer.evaluation.methods import ComparedJob, ComparedMethod, Comparison
from qnmixer.evaluation.statistics import Difference, Spread, difference, spread, with_deviation
from qnmixer.files import digest, write_text
from qnmixer.reports.page import PageMethod, PageSlice, PageTable, without_folders, write_page
from qnmixer.reports.pictures import Panel, Row, draw_methods
from qnmixer.reports.tables import csv_table, markdown_table, terminal_table
from qnmixer.tracking.results import duration, git_commit, versions

_DRAWN = 8  # a picture has room for so many methods
_NOTHING = "–"


def write_comparison(folder: Path, comparison: Comparison, config: CompareConfig, console: Console) -> None:
    """Print the tables and write comparison.{csv,md,json,png,html} and images.csv into a folder.

    With several tests it also writes comparison_tests.png, with one slice of each test after the first.
    """
    tables = tables_of(comparison)
    notes = [*comparison.notes, *_problems(comparison)]
    title = f"Comparison of {comparison.sweep.name}"
    provenance = _provenance(comparison, config)
    write_text(folder / "comparison.csv", csv_table(_lines(comparison)))
    write_text(folder / "images.csv", csv_table(_image_lines(comparison)))
    write_text(folder / "comparison.json", json.dumps(_record(comparison, config), indent=2, default=str) + "\n")
    write_text(folder / "comparison.md", _markdown(title, tables, notes, provenance))
    pictures = _draw(folder, comparison)
    slices = [
        replace(of, name=f"{test}: {of.name}", methods=_in_order(of))
        for test, its in comparison.slices.items()
        for of in its
    ]
    n_methods, tests = len(comparison.methods), ", ".join(comparison.tests)
    made_by = provenance | {"notes": "; ".join(notes) or "none"}
    subtitle = f"{n_methods} method{'s' * (n_methods != 1)} on {tests} ({config.split} split)"
    n_images = sum(_n_images(comparison, test) for test in comparison.tests)
    order = f"by test: {len(slices)} of {n_images}, those of the pictures; images.csv has the scores of all"
    write_page(folder / "comparison.html", title, tables, slices, made_by, subtitle=subtitle, order=order)

    for table in tables[:-1]:  # the table of sources is in the files only
        _print(table, console)
    written = ["comparison.html", "comparison.md", "comparison.csv", "comparison.json", *pictures, "images.csv"]
    lines = [*(f"note: {note}" for note in notes), f"comparison: {folder} ({', '.join(written)})"]
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)


def tables_of(comparison: Comparison) -> list[PageTable]:
    """The tables: the first test in full, all tests if there are several, costs of the methods, sources of the rows."""
    tables = [_quality(comparison)]
    if len(comparison.tests) > 1:
        tables.append(_all_tests(comparison))
    return [*tables, _costs(comparison), _sources(comparison)]


def against_best(comparison: Comparison, method: ComparedMethod, test: str) -> tuple[ComparedMethod, Difference] | None:
    """The best other method on a test with the same sinograms, and the PSNR difference to it; None if there is none."""
    if not method.scores(test, "psnr"):
        return None
    others = [
        other
        for other in comparison.methods
        if other is not method and other.measured.get(test) and other.scans[test] == method.scans[test]
    ]
    if not others:
        return None
    best = max(others, key=lambda other: other.psnr(test))
    return best, difference(method.scores(test, "psnr"), best.scores(test, "psnr"))


def _quality(comparison: Comparison) -> PageTable:
    test, rows = comparison.tests[0], []
    n_images = _n_images(comparison, test)
    for method in comparison.methods:
        row = [method.name, _seeds(method)]
        for metric in ("psnr", "ssim"):
            found = _spread(method, test, metric)
            row += [_with_seeds(found), _NOTHING if found is None else _number(found.over_images)]
        if row[2] == _NOTHING:
            row[2] = method.jobs[0].problem.partition(":")[0] if method.jobs else "not measured"
        rows.append([*row, _against(comparison, method, test)])
    return PageTable(
        f"{test}: {n_images} slices",
        ["method", "seeds", "PSNR, dB", "images", "SSIM × 100", "images", "over the best other, dB"],
        rows,
        "Mean over seeds of the mean over images, ± standard deviation over seeds; then that over images (of their "
        "means over seeds). Last: PSNR over that of the best other method, paired by image, with a 95 % interval for "
        "other images and other seeds. Data range 1.",
    )


def _n_images(comparison: Comparison, test: str) -> int:
    return max(len(scores) for m in comparison.methods for scores in m.scores(test, "psnr").values())


def _all_tests(comparison: Comparison) -> PageTable:
    rows = [
        [m.name, *(f"{_with_seeds(_spread(m, t, 'psnr'))} / {_with_seeds(_spread(m, t, 'ssim'))}" if m.measured.get(t)
                   else _NOTHING for t in comparison.tests)]
        for m in comparison.methods
    ]  # fmt: skip
    note = "PSNR, dB / SSIM × 100, each the mean over seeds of the mean over images ± standard deviation over seeds."
    return PageTable("All tests", ["method", *comparison.tests], rows, note)


def _costs(comparison: Comparison) -> PageTable:
    rows = []
    for method in comparison.methods:
        if (cost := method.cost) is not None:
            rows.append([
                method.name,
                f"{cost.parameters:,}",
                _NOTHING if cost.train_seconds is None else duration(cost.train_seconds),
                _milliseconds(cost.step_seconds),
                _NOTHING if cost.step_mib is None else f"{cost.step_mib:,.0f}",
                _milliseconds(cost.inference_seconds),
                _NOTHING if cost.largest_gradient is None else f"{cost.largest_gradient:.3g}",
            ])  # fmt: skip
        else:
            rows.append([method.name, *[_NOTHING] * 6])
    return PageTable(
        "Cost",
        ["method", "parameters", "training", "step, ms", "step, MiB", "slice, ms", "largest gradient"],
        rows,
        f"Training: a whole job, mean over seeds. Step: an optimizer step, median, and the most bytes in its tensors, "
        f"the highest of the seeds; slower where jobs run side by side. Slice: inference, batch 1, median, here "
        f"({comparison.device}). Largest norm of a gradient before clipping, of all jobs.",
    )


def _sources(comparison: Comparison) -> PageTable:
    rows = [
        [
            method.name,
            ", ".join(job.folder.name for job in method.jobs) or "made here",
            _joined(_short_commit(job) for job in method.jobs),
            _joined(_config_digest(job) for job in method.jobs),
            _joined(_hardware(job) for job in method.jobs),
            "; ".join(f"job {job.folder.name}: {job.problem}" for job in method.jobs if job.problem) or _NOTHING,
        ]
        for method in comparison.methods
    ]
    return PageTable(
        "Where the rows come from",
        ["method", "jobs", "commit", "config", "trained on", "not measured"],
        rows,
        "Config: a digest of all of it but for the seed. comparison.json has overrides, versions and whole commits.",
    )


def _problems(comparison: Comparison) -> list[str]:
    return [
        f"{method.name}, job {job.folder.name}: {job.problem}"
        for method in comparison.methods
        for job in method.jobs
        if job.problem
    ]


def _seeds(method: ComparedMethod) -> str:
    if not method.jobs:
        return _NOTHING
    n, of = len(method.done), len(method.jobs)
    return str(n) if n == of else f"{n} of {of}"


def _spread(method: ComparedMethod, test: str, metric: str) -> Spread | None:
    scores = method.scores(test, metric)
    return spread(scores) if scores else None


def _with_seeds(found: Spread | None) -> str:
    return _NOTHING if found is None else with_deviation(found.mean, found.over_seeds)


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"± {value:.2f}"


def _against(comparison: Comparison, method: ComparedMethod, test: str) -> str:
    if (found := against_best(comparison, method, test)) is None:
        return _NOTHING
    return with_deviation(found[1].mean, found[1].half_width, "+")


def _milliseconds(seconds: float | None) -> str:
    return _NOTHING if seconds is None else f"{1000 * seconds:,.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def _joined(texts: Any) -> str:
    return ", ".join(dict.fromkeys(text for text in texts if text)) or _NOTHING


def _short_commit(job: ComparedJob) -> str:
    commit, changed, _ = (job.results.get("git_commit") or "").partition("+")
    return commit[:9] + changed + "changes" * bool(changed)


def _config_digest(job: ComparedJob) -> str:
    """A digest that is equal for jobs that differ only in their seed."""
    if job.config is None:
        return ""
    plain = to_plain(job.config)
    plain["seed"] = plain["data"]["seed"] = None
    return digest(plain, 8, sort_keys=True)


def _hardware(job: ComparedJob) -> str:
    device, threads = job.results.get("device"), job.results.get("threads")
    return f"{device}, {threads} thread{'s' * (threads != 1)}" if device else ""


def _provenance(comparison: Comparison, config: CompareConfig) -> dict[str, str]:
    return {
        "sweep": comparison.sweep.name,
        "tests": "; ".join(f"{name} [{', '.join(config.sets[name])}]" for name in comparison.tests),
        "split": f"{config.split}, phantoms and noise of seed {config.seed}, checkpoint {config.checkpoint}",
        "measured": f"{time.strftime('%Y-%m-%d %H:%M %Z')}, on {comparison.device}",
        "commit": git_commit() or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }


def _record(comparison: Comparison, config: CompareConfig) -> dict[str, Any]:
    """All results, for other programs."""
    return {
        "sweep": comparison.sweep,
        "made": {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "git_commit": git_commit(), "versions": versions(),
                 "device": comparison.device, "config": asdict(config)},
        "tests": {test: config.sets[test] for test in comparison.tests},
        "methods": [_method_record(comparison, method) for method in comparison.methods],
        "notes": comparison.notes,
    }  # fmt: skip


def _method_record(comparison: Comparison, method: ComparedMethod) -> dict[str, Any]:
    tests: dict[str, Any] = {}
    for test in comparison.tests:
        if method.measured.get(test):
            tests[test] = {metric: asdict(spread(method.scores(test, metric))) for metric in METRICS}
            tests[test]["scan"] = method.scans[test]
            if (found := against_best(comparison, method, test)) is not None:
                tests[test]["against"] = {"method": found[0].name} | asdict(found[1])
    jobs = [
        {"folder": job.folder, "status": job.problem or "done", "config_digest": _config_digest(job)}
        | {"overrides": job.overrides, "seed": job.config and job.config.seed}
        | {key: job.results.get(key) for key in ("git_commit", "versions", "device", "threads", "started", "steps",
                                                 "seconds", "memory", "best")}
        for job in method.jobs
    ]  # fmt: skip
    return {"name": method.name, "tests": tests, "cost": method.cost and asdict(method.cost), "jobs": jobs}


def _lines(comparison: Comparison) -> list[list[Any]]:
    """The rows of comparison.csv: one for each test and method, also if nothing was measured."""
    costs = ("parameters", "train_seconds", "step_seconds", "step_mib", "inference_seconds", "largest_gradient")
    deviations = [f"{metric}{of}" for metric in METRICS for of in ("", "_over_seeds", "_over_images")]
    heading = ["test", "method", "status", "seeds", "jobs", "images", *deviations, "against", "psnr_difference",
               "psnr_difference_95", *costs, "commit", "config", "trained_on", "folders"]  # fmt: skip
    lines: list[list[Any]] = [heading]
    for test in comparison.tests:
        for method in comparison.methods:
            spreads = [_spread(method, test, metric) for metric in METRICS]
            first = spreads[0]
            status = "measured" if first is not None else method.jobs[0].problem if method.jobs else "not measured"
            found = against_best(comparison, method, test)
            lines.append([
                test, method.name, without_folders(status),
                first and first.n_seeds, len(method.jobs), first and first.n_images,
                *(value for s in spreads for value in ((s.mean, s.over_seeds, s.over_images) if s else [None] * 3)),
                *((found[0].name, found[1].mean, found[1].half_width) if found else [None] * 3),
                *(getattr(method.cost, name, None) for name in costs),
                _joined(job.results.get("git_commit") for job in method.jobs),
                _joined(map(_config_digest, method.jobs)), _joined(map(_hardware, method.jobs)),
                " ".join(job.folder.name for job in method.jobs),
            ])  # fmt: skip
    return lines


def _image_lines(comparison: Comparison) -> list[list[Any]]:
    lines: list[list[Any]] = [["test", "method", "seed", "data_seed", "number", "slice", *METRICS]]
    for test in comparison.tests:
        for method in comparison.methods:
            for seeds, scores in method.measured.get(test, {}).items():
                which = [test, method.name, *(seeds if method.jobs else ("", ""))]
                lines += [[*which, s.number, s.slice, *(getattr(s, name) for name in METRICS)] for s in scores]
    return lines


def _markdown(title: str, tables: list[PageTable], notes: list[str], provenance: dict[str, str]) -> str:
    parts = [f"# {title}"]
    for table in tables:
        parts += [f"## {table.title}", markdown_table(table.headings, table.rows), table.note]
    if notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
    parts += ["## Made by", "\n".join(f"- {name}: {text}" for name, text in provenance.items())]
    return without_folders("\n\n".join(parts)) + "\n"


def _draw(folder: Path, comparison: Comparison) -> list[str]:
    first, *others = comparison.tests
    rows = {
        "comparison.png": [_row(of.name, of) for of in comparison.slices[first]],
        "comparison_tests.png": [_row(test, of) for test in others for of in comparison.slices[test]],
    }
    drawn = {name: of for name, of in rows.items() if of}
    for name, of in drawn.items():
        draw_methods(folder / name, of)
    return [*drawn]


def _row(name: str, slice_: PageSlice) -> Row:
    """A row of the picture: FBP, and the best methods that there is room for."""
    assert slice_.truth is not None
    shown = _in_order(slice_, _DRAWN)
    return Row(name, slice_.truth, [Panel(f"{fill(m.name, 26)}\n{m.caption}", m.iterates[-1]) for m in shown])


def _in_order(slice_: PageSlice, most: int | None = None) -> list[PageMethod]:
    """Methods in display order: FBP, then worst to best. At most `most`, the best ones."""
    fbp = [method for method in slice_.methods if method.name == FBP]
    best = [method for method in slice_.methods if method.name != FBP][: most and most - len(fbp)]
    return [*fbp, *reversed(best)]


def _print(table: PageTable, console: Console) -> None:
    rows = [[cell.replace(" / ", "\n") for cell in row] for row in table.rows]
    shown = terminal_table(table.headings, rows, title=table.title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in shown.columns[1:]:
        column.no_wrap = True
    console.print(shown)
    console.print(f"{table.note}\n", soft_wrap=not console.is_terminal, highlight=False)
