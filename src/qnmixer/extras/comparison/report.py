"""The report of a comparison: tables (terminal, CSV, Markdown), all results as JSON, pictures, and one HTML page."""

import json
import time
from dataclasses import asdict, replace
from itertools import chain, combinations
from math import nan
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console

from qnmixer.engine.config import to_plain
from qnmixer.engine.config.commands import CompareConfig
from qnmixer.engine.evaluation.evaluate import IN_WINDOW, data_range
from qnmixer.engine.evaluation.statistics import Difference, Spread, difference, spread, with_deviation
from qnmixer.engine.reports.page import PageFigure, PageMethod, PageSlice, PageTable, without_folders, write_page
from qnmixer.engine.reports.pictures import Curve, Panel, Row, draw_curves, draw_methods
from qnmixer.engine.reports.tables import csv_table, decimals_of, markdown_table, terminal_table
from qnmixer.engine.tracking.results import duration, git_commit, versions
from qnmixer.extras.comparison.compare import FBP
from qnmixer.extras.comparison.curves import Level, curve_of, median_step
from qnmixer.extras.comparison.methods import ComparedJob, ComparedMethod, Comparison
from qnmixer.files import digest, write_text
from qnmixer.models.total_variation import TotalVariation

TV = TotalVariation.title
CURVES = "comparison_curves.png"
_DRAWN = 8  # a picture, or a table of pairs, has room for so many methods
_NOTHING = "–"


def write_comparison(folder: Path, comparison: Comparison, config: CompareConfig, console: Console) -> None:
    """Print the tables and write comparison.{csv,md,json,png,html} and images.csv into a folder.

    With several tests it also writes comparison_tests.png, with one slice of each test after the first; and
    comparison_curves.png, if a method was validated during training.
    """
    tables = tables_of(comparison)
    notes = [*comparison.notes, *_problems(comparison)]
    title = f"Comparison of {_names(comparison)}"
    provenance = _provenance(comparison, config)
    write_text(folder / "comparison.csv", csv_table(_lines(comparison)))
    write_text(folder / "images.csv", csv_table(_image_lines(comparison)))
    write_text(folder / "comparison.json", json.dumps(_record(comparison, config), indent=2, default=str) + "\n")
    write_text(folder / "comparison.md", _markdown(title, tables, notes, provenance))
    pictures = _draw(folder, comparison)
    figures = []
    if _draw_curves(folder / CURVES, comparison):
        note = (
            "Mean PSNR over validation slices. Thin lines: seeds; thick: their mean; level: methods that learn nothing."
        )
        figures = [PageFigure("Validation during training", folder / CURVES, note)]
        pictures.append(CURVES)
    slices = [
        replace(of, name=f"{test}: {of.name}", methods=_in_order(of))
        for test, its in comparison.slices.items()
        for of in its
    ]
    n_methods, tests = len(comparison.methods), ", ".join(comparison.tests)
    made_by = provenance | {"notes": "; ".join(notes) or "none"}
    subtitle = f"{n_methods} method{'s' * (n_methods != 1)} on {tests} ({config.split} split)"
    n_images = sum(_unit(comparison, test)[1] for test in comparison.tests)
    order = f"by test: {len(slices)} of {n_images}, those of the pictures; images.csv has the scores of all"
    write_page(
        folder / "comparison.html", title, tables, slices, made_by, subtitle=subtitle, order=order, figures=figures
    )

    for table in tables[:-1]:  # the table of sources is in the files only
        _print(table, console)
    written = ["comparison.html", "comparison.md", "comparison.csv", "comparison.json", *pictures, "images.csv"]
    lines = [*(f"note: {note}" for note in notes), f"comparison: {folder} ({', '.join(written)})"]
    console.print("\n".join(lines), soft_wrap=True, highlight=False)


def _names(comparison: Comparison) -> str:
    return ", ".join(sweep.name for sweep in comparison.sweeps)


def tables_of(comparison: Comparison) -> list[PageTable]:
    """The tables: the first test in full, differences, all tests if there are several, costs, sources of the rows."""
    tables = [_quality(comparison), _pairs(comparison)]
    if len(comparison.tests) > 1:
        tables.append(_all_tests(comparison))
    return [*(table for table in tables if table.rows), _costs(comparison), _sources(comparison)]


def over_tv(comparison: Comparison, method: ComparedMethod, test: str) -> dict[str, Difference] | None:
    """By metric, the difference to total variation on the same sinograms, the best one if there are several."""
    rivals = [
        other
        for other in comparison.methods
        if other is not method and other.network == TV and _on_the_same(method, other, test)
    ]
    if not rivals:
        return None
    best = max(rivals, key=lambda other: other.psnr(test))
    return differences(method, best, test)


def differences(one: ComparedMethod, other: ComparedMethod, test: str) -> dict[str, Difference]:
    """`one` minus `other` by metric; without a metric that no patient has."""
    return {
        metric: difference(one.scores(test, metric), other.scores(test, metric))
        for metric in one.metrics(test)
        if _on_the_same(one, other, test, metric)
    }


def pairs_of(comparison: Comparison, test: str) -> list[tuple[ComparedMethod, ComparedMethod]]:
    """Pairs among the first methods that have the same sinograms, without FBP. Methods are sorted: the better first."""
    by_scan: dict[str, list[ComparedMethod]] = {}
    for method in comparison.methods:
        if method.measured.get(test) and method.network != FBP:
            by_scan.setdefault(method.scans[test], []).append(method)
    pairs = [pair for methods in by_scan.values() for pair in combinations(methods[:_DRAWN], 2)]
    return [pair for pair in pairs if _on_the_same(*pair, test)]


def _on_the_same(one: ComparedMethod, other: ComparedMethod, test: str, metric: str = "psnr") -> bool:
    """Whether two methods were measured on the same sinograms of at least one patient."""
    if not (one.measured.get(test) and other.measured.get(test) and one.scans[test] == other.scans[test]):
        return False
    mine, its = ({*chain(*method.scores(test, metric).values())} for method in (one, other))
    return not mine.isdisjoint(its)


def _quality(comparison: Comparison) -> PageTable:
    test, rows, shown = comparison.tests[0], [], _in_full(comparison)
    unit, n_images, n = _unit(comparison, test)
    gains = {method.name: over_tv(comparison, method, test) for method in comparison.methods}
    has_tv = any(gains.values())
    other_steps = len({method.steps for method in comparison.methods} - {None}) > 1
    for method in comparison.methods:
        row = [method.name, _seeds(method, test)]
        for metric in shown:
            found = _spread(method, test, metric)
            row += [_with_seeds(found), _NOTHING if found is None else _number(found.over_patients, found.mean)]
        if row[2] == _NOTHING:
            row[2] = method.jobs[0].problem.partition(":")[0] if method.jobs else "not measured"
        if has_tv:
            row += [_gain(gain[metric]) if (gain := gains[method.name]) else _NOTHING for metric in ("psnr", "ssim")]
        if other_steps:
            row += [_NOTHING if method.steps is None else f"{method.steps:,}", _training(method)]
        rows.append(row)
    each = ", each the mean of its slices" if unit == "patients" else ""
    note = (
        f"Mean over seeds of the mean over {n} {unit}{each}, ± standard deviation over seeds. Next: that over {unit}. "
    )
    if has_tv:
        note += f"Over {TV}: the mean over {unit} of the paired difference, averaged over seeds" + (
            f"; ± half of its 95 % interval for other {unit}, t({n - 1}) · s/√{n}. " if n > 1 else ". "
        )
    if other_steps:
        note += "Methods with another number of training steps stand below the others. "
    return PageTable(
        f"{test}: {n_images} slices" + (f" of {n} patients" if unit == "patients" else ""),
        ["method", "seeds", *(heading for title in shown.values() for heading in (title, unit))]
        + ["over TV, dB", "over TV, SSIM"] * has_tv
        + ["steps", "training"] * other_steps,
        rows,
        note + _data_range(comparison, test),
    )


def _in_full(comparison: Comparison) -> dict[str, str]:
    """Headings of the metrics of the whole range, by name. The files have those inside the HU window too."""
    return {name: title for name, title in comparison.titles.items() if name not in IN_WINDOW}


def _data_range(comparison: Comparison, test: str) -> str:
    """The data range of a test. Methods that were trained on several sets may have several."""
    measured = [method for method in comparison.methods if method.measured.get(test)]
    own = [method.name for method in measured if test in method.own_range]
    if 0 < len(own) < len(measured):
        return f"Data range 1; of {', '.join(own)}: {data_range(own=True)}."
    return f"{data_range(bool(own))}.".replace("data", "Data", 1)


def _unit(comparison: Comparison, test: str) -> tuple[str, int, int]:
    """The unit of the statistics (patients, or slices), the number of slices, and that of units."""
    measured = [method for method in comparison.methods if method.measured.get(test)]
    scores = [its for method in measured for its in method.measured[test].values()]
    unit = "patients" if any(score.patient is not None for its in scores for score in its) else "slices"
    return unit, max(map(len, scores)), max(spread(method.scores(test, "psnr")).n_patients for method in measured)


def _pairs(comparison: Comparison) -> PageTable:
    test = comparison.tests[0]
    unit, _, _ = _unit(comparison, test)
    rows, shown = [], _in_full(comparison)
    for one, other in pairs_of(comparison, test):
        row, found = [one.name, other.name], differences(one, other, test)
        for metric in shown:
            its, level = found.get(metric), _spread(one, test, metric)
            row += [_gain(its, level.mean), _number(its.over_seeds, level.mean)] if its and level else [_NOTHING] * 2
        rows.append([*row, f"{found['psnr'].n_patients}, {found['psnr'].n_seeds}"])
    return PageTable(
        f"{test}: differences",
        ["method", "minus", *(it for title in shown.values() for it in (title, "seeds")), f"{unit}, seeds"],
        rows,
        f"Mean difference on the same {unit}, ± half of its 95 % interval for other {unit} (each averaged over seeds). "
        f"Next: the interval for other seeds (each averaged over {unit}). Last: how many {unit} and seeds. "
        f"A difference is clear if it is larger than both intervals. The best {_DRAWN} methods, without FBP.",
    )


def _all_tests(comparison: Comparison) -> PageTable:
    rows = [
        [m.name, *(f"{_with_seeds(_spread(m, t, 'psnr'))} / {_with_seeds(_spread(m, t, 'ssim'))}" if m.measured.get(t)
                   else _NOTHING for t in comparison.tests)]
        for m in comparison.methods
    ]  # fmt: skip
    units = " or ".join(dict.fromkeys(_unit(comparison, test)[0] for test in comparison.tests))
    note = f"PSNR, dB / SSIM × 100, each the mean over seeds of the mean over {units} ± standard deviation over seeds."
    return PageTable("All tests", ["method", *comparison.tests], rows, note)


def _costs(comparison: Comparison) -> PageTable:
    rows, level = [], Level(TV, comparison.methods)
    for method in comparison.methods:
        if (cost := method.cost) is not None:
            rows.append([
                method.name,
                f"{cost.parameters:,}",
                _training(method),
                _milliseconds(cost.step_seconds),
                _NOTHING if cost.step_mib is None else f"{cost.step_mib:,.0f}",
                _milliseconds(cost.inference_seconds),
                _NOTHING if cost.largest_gradient is None else f"{cost.largest_gradient:.3g}",
            ])  # fmt: skip
        else:
            rows.append([method.name, *[_NOTHING] * 6])
        if level.found:
            steps = level.crossings(method)
            rows[-1].append(median_step(steps) if steps else _NOTHING)
    note = (
        f"Training: a whole job, mean over seeds. Step: an optimizer step, median, and the most bytes in its tensors, "
        f"the highest of the seeds; slower where jobs run side by side. Slice: inference, batch 1, median, here "
        f"({comparison.device}). Largest norm of a gradient before clipping, of all jobs."
    )
    if level.found:
        note += (
            f" Above TV: the first validation from which on the mean PSNR stays above that of {TV} on the same slices; "
            "median over seeds, in brackets how many seeds stay above."
        )
    return PageTable(
        "Cost",
        ["method", "parameters", "training", "step, ms", "step, MiB", "slice, ms", "largest gradient"]
        + ["above TV from step"] * bool(level.found),
        rows,
        note,
    )


def _sources(comparison: Comparison) -> PageTable:
    rows = [
        [
            method.name,
            ", ".join(_job(comparison, job) for job in method.jobs) or "made here",
            _joined(_short_commit(job) for job in method.jobs),
            _joined(config_digest(job) for job in method.jobs),
            _joined(_hardware(job) for job in method.jobs),
            "; ".join(f"job {_job(comparison, job)}: {job.problem}" for job in method.jobs if job.problem) or _NOTHING,
        ]
        for method in comparison.methods
    ]
    return PageTable(
        "Where the rows come from",
        ["method", "jobs", "commit", "config", "trained on", "not measured"],
        rows,
        "Config: a digest of the config without the seed. comparison.json has overrides, versions and whole commits.",
    )


def _problems(comparison: Comparison) -> list[str]:
    return [
        f"{method.name}, job {_job(comparison, job)}: {job.problem}"
        for method in comparison.methods
        for job in method.jobs
        if job.problem
    ]


def _job(comparison: Comparison, job: ComparedJob) -> str:
    """The folder of a job, with that of its sweep if there are several."""
    several = len(comparison.sweeps) > 1
    return f"{job.folder.parent.name}/{job.folder.name}" if several else job.folder.name


def _seeds(method: ComparedMethod, test: str) -> str:
    if not method.jobs:
        return _NOTHING
    n, of = len(method.measured.get(test, {})), len(method.jobs)
    return str(n) if n == of else f"{n} of {of}"


def _spread(method: ComparedMethod, test: str, metric: str) -> Spread | None:
    scores = method.scores(test, metric)
    return spread(scores) if scores else None


def _with_seeds(found: Spread | None) -> str:
    return _NOTHING if found is None else with_deviation(found.mean, found.over_seeds, decimals=decimals_of(found.mean))


def _number(value: float | None, of: float) -> str:
    return _NOTHING if value is None else f"± {value:.{decimals_of(of)}f}"


def _gain(found: Difference, of: float = nan) -> str:
    return with_deviation(found.mean, found.over_patients, "+", decimals_of(of))


def _training(method: ComparedMethod) -> str:
    cost = method.cost
    return _NOTHING if cost is None or cost.train_seconds is None else duration(cost.train_seconds)


def _milliseconds(seconds: float | None) -> str:
    return _NOTHING if seconds is None else f"{1000 * seconds:,.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def _joined(texts: Any) -> str:
    return ", ".join(dict.fromkeys(text for text in texts if text)) or _NOTHING


def _short_commit(job: ComparedJob) -> str:
    commit, changed, _ = (job.results.get("git_commit") or "").partition("+")
    return commit[:9] + changed + "changes" * bool(changed)


def config_digest(job: ComparedJob) -> str:
    """A digest that is equal for jobs that differ only in their seed, or in whether they were stopped and resumed."""
    if job.config is None:
        return ""
    plain = to_plain(job.config)
    plain["seed"] = plain["data"]["seed"] = plain["resume"] = None
    return digest(plain, 8, sort_keys=True)


def _hardware(job: ComparedJob) -> str:
    device, threads = job.results.get("device"), job.results.get("threads")
    return f"{device}, {threads} thread{'s' * (threads != 1)}" if device else ""


def _provenance(comparison: Comparison, config: CompareConfig) -> dict[str, str]:
    return {
        "sweep": _names(comparison),
        "tests": "; ".join(f"{name} [{', '.join(config.sets[name])}]" for name in comparison.tests),
        "split": f"{config.split}, phantoms and noise of seed {config.seed}, checkpoint {config.checkpoint}",
        "measured": f"{time.strftime('%Y-%m-%d %H:%M %Z')}, on {comparison.device}",
        "commit": git_commit() or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }


def _record(comparison: Comparison, config: CompareConfig) -> dict[str, Any]:
    """All results, for other programs."""
    level = Level(TV, comparison.methods)
    return {
        "sweeps": comparison.sweeps,
        "made": {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "git_commit": git_commit(), "versions": versions(),
                 "device": comparison.device, "config": asdict(config)},
        "tests": {test: config.sets[test] for test in comparison.tests},
        "methods": [_method_record(comparison, method, level) for method in comparison.methods],
        "differences": {
            test: [
                {"method": one.name, "minus": other.name}
                | {metric: asdict(found) for metric, found in differences(one, other, test).items()}
                for one, other in pairs_of(comparison, test)
            ]
            for test in comparison.tests
        },
        "notes": comparison.notes,
    }  # fmt: skip


def _method_record(comparison: Comparison, method: ComparedMethod, level: Level) -> dict[str, Any]:
    tests: dict[str, Any] = {}
    for test in comparison.tests:
        if method.measured.get(test):
            spreads = {metric: _spread(method, test, metric) for metric in comparison.titles}
            tests[test] = {metric: found and asdict(found) for metric, found in spreads.items()}
            tests[test]["scan"] = method.scans[test]
            if (gains := over_tv(comparison, method, test)) is not None:
                tests[test]["over_tv"] = {metric: asdict(gain) for metric, gain in gains.items()}
    jobs = [
        {"folder": job.folder, "status": job.problem or "done", "config_digest": config_digest(job)}
        | {"overrides": job.overrides, "seed": job.config and job.config.seed}
        | {key: job.results.get(key) for key in ("git_commit", "versions", "device", "threads", "started", "steps",
                                                 "seconds", "memory", "best")}
        | {"validations": [asdict(validation) for validation in curve_of(job)]}
        for job in method.jobs
    ]  # fmt: skip
    crossings = level.crossings(method)
    return {"name": method.name, "tests": tests, "cost": method.cost and asdict(method.cost), "jobs": jobs,
            "above_tv_from_step": crossings}  # fmt: skip


def _lines(comparison: Comparison) -> list[list[Any]]:
    """The rows of comparison.csv: one for each test and method, also if nothing was measured."""
    costs = ("parameters", "train_seconds", "step_seconds", "step_mib", "inference_seconds", "largest_gradient")
    deviations = [f"{metric}{of}" for metric in comparison.titles for of in ("", "_over_seeds", "_over_patients")]
    gains = [f"{metric}_over_tv{of}" for metric in comparison.titles for of in ("", "_95")]
    heading = ["test", "method", "status", "seeds", "jobs", "steps", "images", "patients", *deviations, *gains,
               "above_tv_from_step", *costs, "commit", "config", "trained_on", "folders"]  # fmt: skip
    level = Level(TV, comparison.methods)
    lines: list[list[Any]] = [heading]
    for test in comparison.tests:
        for method in comparison.methods:
            spreads = [_spread(method, test, metric) for metric in comparison.titles]
            first = spreads[0]
            status = "measured" if first is not None else method.jobs[0].problem if method.jobs else "not measured"
            found = over_tv(comparison, method, test)
            steps = level.crossings(method)
            lines.append([
                test, method.name, without_folders(status),
                first and first.n_seeds, len(method.jobs), method.steps,
                first and max(map(len, method.measured[test].values())), first and first.n_patients,
                *(value for s in spreads for value in ((s.mean, s.over_seeds, s.over_patients) if s else [None] * 3)),
                *(value for metric in comparison.titles
                  for value in (
                      (found[metric].mean, found[metric].over_patients) if found and metric in found else [None] * 2
                  )),
                median_step(steps) if steps else None,
                *(getattr(method.cost, name, None) for name in costs),
                _joined(job.results.get("git_commit") for job in method.jobs),
                _joined(map(config_digest, method.jobs)), _joined(map(_hardware, method.jobs)),
                " ".join(_job(comparison, job) for job in method.jobs),
            ])  # fmt: skip
    return lines


def _image_lines(comparison: Comparison) -> list[list[Any]]:
    lines: list[list[Any]] = [["test", "method", "seed", "data_seed", "number", "slice", "patient", *comparison.titles]]
    for test in comparison.tests:
        for method in comparison.methods:
            for seeds, scores in method.measured.get(test, {}).items():
                which = [test, method.name, *(seeds if method.jobs else ("", ""))]
                lines += [[*which, s.number, s.slice, s.patient, *map(s.values.get, comparison.titles)] for s in scores]
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


def _draw_curves(path: Path, comparison: Comparison) -> bool:
    """Draw the validations of the best methods. False: none was validated twice."""
    curves: list[Curve] = []
    levels: dict[str, float] = {}
    for method in comparison.methods:
        found = [its for job in method.done if (its := curve_of(job))]
        if method.steps is None and found:
            levels[method.name] = mean(its[-1].psnr for its in found)
        elif any(len(its) > 1 for its in found):
            curves.append(Curve(method.name, [[(it.step, it.seconds, it.psnr) for it in its] for its in found]))
    if curves:
        draw_curves(path, curves[:_DRAWN], levels, "validation PSNR, dB")
    return bool(curves)


def _row(name: str, slice_: PageSlice) -> Row:
    """A row of the picture: FBP, and the best methods that there is room for."""
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
