"""Compare a network with FBP, and on request total variation, on a split: scores per image, a table, a picture."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, isnan, nan
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader

from qnmixer.engine.batch import Batch, to_hu
from qnmixer.engine.checkpoints.reading import find_checkpoint, load_run, split_of
from qnmixer.engine.checkpoints.weights_file import digest_of_weights
from qnmixer.engine.config import Config, to_plain, without_places
from qnmixer.engine.config.commands import EvaluateConfig
from qnmixer.engine.config.data import AsTrained, DataConfig, FolderData
from qnmixer.engine.config.evaluation import EvaluationConfig
from qnmixer.engine.config.metrics import MetricConfig, default_metrics
from qnmixer.engine.config.rules import one_scale
from qnmixer.engine.config.run import targets_of
from qnmixer.engine.config.target import keys_of
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.splits import RunSplit
from qnmixer.engine.evaluation.slices import Gallery, as_trained, kind_of, other_slices
from qnmixer.engine.evaluation.statistics import deviation, half_width, with_deviation
from qnmixer.engine.optimization.metrics import ImageMetric, build_metrics, psnr, ssim_percent, to_window
from qnmixer.engine.parallel.devices import choose_device
from qnmixer.engine.plugins import module_of
from qnmixer.engine.processes.ranks import rank
from qnmixer.engine.reconstructor import Reconstructor, build_noise
from qnmixer.engine.reports.page import PageMethod, PageSlice, PageTable, write_page
from qnmixer.engine.reports.pictures import Panel, Row, draw_comparison
from qnmixer.engine.reports.progress import progress
from qnmixer.engine.reports.tables import csv_table, decimals_of, markdown_table, terminal_table
from qnmixer.engine.tracking.loggers import device_name
from qnmixer.engine.tracking.results import git_commit, results, versions
from qnmixer.engine.tracking.run import name_of_run
from qnmixer.errors import ConfigError
from qnmixer.files import write_text
from qnmixer.models.total_variation import TotalVariation
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.weights import located

PICTURE, PAGE = "picture.png", "page.html"
_MOST_ITERATIONS = 50  # a page has room for the images of so many
IN_WINDOW = {"window_psnr": "window PSNR, dB", "window_ssim": "window SSIM × 100"}
"""Headings of the metrics inside the HU window."""


@dataclass
class ImageScore:
    """The scores of one method on one slice.

    `number` is the slice's number in its split, used by pages and pictures; `slice`, its file, may name a patient.
    `patient` is a number too, counted within the split; None: not known, as of phantoms. `values` are by name of the
    metric. Those inside the HU window are None for a slice that has nothing in it.
    """

    number: int
    slice: str
    method: str
    values: dict[str, Any]
    constant: bool = False
    patient: int | None = None


def by_patient(scores: Sequence[ImageScore], metric: str) -> dict[str, float]:
    """The mean of each patient, by the name of the patient's first slice.

    The number of that slice is added only if patients share a name: it changes if a seed splits the patients anew.
    """
    patients: dict[int | str, list[ImageScore]] = {}
    for score in scores:
        patients.setdefault(f"slice {score.number}" if score.patient is None else score.patient, []).append(score)
    n_named = Counter(its[0].slice for its in patients.values())
    means = {}
    for its in patients.values():
        name = its[0].slice if n_named[its[0].slice] == 1 else f"{its[0].number} {its[0].slice}"
        if values := [value for it in its if (value := it.values.get(metric)) is not None]:
            means[name] = mean(values)
    return means


@dataclass
class Evaluation:
    """All scores of a split, the slices of its page (worst first), and which of them are in the picture.

    `baselines`: the methods that every network is compared with. `n_trained`: how many of the slices the network was
    trained on. `own_range`: the data range of each image is that of its reference, not 1. `titles`: headings of the
    metrics, by name.
    """

    scores: list[ImageScore]
    slices: list[PageSlice]
    pictured: list[int] = field(default_factory=list)
    baselines: list[str] = field(default_factory=list)
    n_trained: int = 0
    own_range: bool = False
    titles: dict[str, str] = field(default_factory=lambda: titles_of({}))

    @property
    def rows(self) -> list[Row]:
        """The rows of the picture: the final image of each method."""
        return [
            Row(of.name, of.truth, [Panel(f"{m.name}\n{m.caption}", m.iterates[-1]) for m in of.methods])
            for of in (self.slices[n] for n in self.pictured)
        ]

    def values(self, method: str, metric: str) -> list[float]:
        """One metric of one method, over the images that have it. [NaN] if none has."""
        values = [score.values[metric] for score in self.scores if score.method == method]
        return [value for value in values if value is not None] or [nan]

    def decimals(self, metric: str) -> int:
        """The decimals of a metric in tables."""
        means = [abs(mean(self.values(method, metric))) for method in self.methods]
        return decimals_of(max((it for it in means if isfinite(it)), default=nan))

    @property
    def n_patients(self) -> int:
        """How many patients the slices show; 0 if that is not known of each slice."""
        patients = {score.patient for score in self.scores}
        return 0 if None in patients else len(patients)

    @property
    def methods(self) -> list[str]:
        """Methods in the order of their evaluation."""
        return list(dict.fromkeys(score.method for score in self.scores))

    def means(self) -> dict[str, dict[str, float]]:
        """method → metric → mean over images."""
        return {m: {metric: mean(self.values(m, metric)) for metric in self.titles} for m in self.methods}

    def metrics(self) -> dict[str, float]:
        """The means, under names that are the same for every network: psnr, fbp/psnr, tv/psnr."""
        means = self.means()
        named = {"": self.methods[-1]} | {f"{name.lower()}/": name for name in self.baselines}
        return {f"{prefix}{metric}": means[name][metric] for prefix, name in named.items() for metric in self.titles}


def titles_of(metrics: Mapping[str, MetricConfig]) -> dict[str, str]:
    """The headings of a final table by metric: PSNR, SSIM, the run's own, and PSNR and SSIM inside the HU window."""
    return {name: metric.title or name for name, metric in _with_usual(metrics).items()} | IN_WINDOW


def _with_usual(metrics: Mapping[str, MetricConfig]) -> dict[str, MetricConfig]:
    return default_metrics() | dict(metrics)


def evaluate_run(config: EvaluateConfig, folder: Path, overrides: list[str]) -> Evaluation:
    """Run `qnmixer.evaluate`: compare a run with FBP, and write table, picture and results.json.

    Raises CheckpointError, ConfigError or DataError.
    """
    console = Console(markup=False)
    trust = [*config.trust, *map(module_of, targets_of(config).values())]
    module = load_run(config.run, config.checkpoint, trust, "metrics.")
    trained = module.config
    before = split_of(find_checkpoint(config.run, config.checkpoint))
    data, own = (
        (as_trained(config.run, config.data, trained.data, trust), True)
        if isinstance(config.data, AsTrained)
        else other_slices(config.data, trained, overrides)
    )
    split = RunSplit(before if own else None)
    slices = SliceDataModule(data, split=split, geometry=module.projector.geometry)
    if config.noise is not None:
        trained.noise = config.noise
        one_scale(trained)
        module.measurement.noise = build_noise(trained)
    with results(folder, overrides) as record:
        if config.noise is not None and slices.measured:
            raise ConfigError(
                f"noise={config.noise.name} has no effect on the sinograms of data={data.name}, which were measured: "
                "leave it out"
            )
        device = choose_device(config.accelerator)
        evaluation = evaluate(module, slices, config.split, config.evaluation, device)
        evaluation.n_trained = slices.split.trained(config.split, before) if before else 0
        record |= {config.split: evaluation.means(), "evaluated": what_was_evaluated(module, data)}
        title = title_of(trained, slices, config.split)
        measured = replace(trained, data=data, evaluation=config.evaluation)
        record["picture"] = str(
            write_evaluation(folder, evaluation, title, measured, device, console, located(config.run))
        )
    console.print(f"picture: {record['picture']}\nto look through: {folder / PAGE}", soft_wrap=True)
    return evaluation


def what_was_evaluated(module: Reconstructor, data: DataConfig) -> dict[str, Any]:
    """The entry of results.json that says what a table measures: a digest of the weights, the slices, the noise."""
    weights = digest_of_weights(module.state_dict())
    return {"weights": weights, "data": kind_of(data), "noise": keys_of(module.config.noise)}


def title_of(trained: Config, module: SliceDataModule, split: str) -> str:
    """The title of a table."""
    data = module.config
    slices = "all slices" if isinstance(data, FolderData) and data.split == "all" else f"{split} split"
    finer = f", simulated on a {data.simulation_factor} times finer grid" if data.simulation_factor > 1 else ""
    disc = ", with a bright disc" if data.disc else ""
    noise = "measured" if module.measured else f"noise {trained.noise.name}"
    return f"{slices} of {kind_of(data)}{disc}, {trained.geometry.n_views} views{finer}, {noise}"


def evaluate(
    module: Reconstructor, data: SliceDataModule, split: str, config: EvaluationConfig, device: torch.device
) -> Evaluation:
    """Reconstruct every slice of a split by FBP and by the network (which may be FBP), from the same noisy sinogram.

    With several processes each evaluates its share, and all get the full result.
    """
    module = module.to(device).eval()
    methods: dict[str, Callable[[Tensor], Tensor]] = {"FBP": module.projector.fbp}
    if config.tv_weight is not None:
        methods[TotalVariation.title] = TotalVariation(
            module.projector,
            weight=config.tv_weight,
            noise_weight=config.tv_noise_weight,
            variance=module.measurement.noise.variance,
        )
    baselines = [*methods]
    metrics = build_metrics(_with_usual(module.config.metrics), data.config.own_range)
    methods[module.network.title] = module.network
    n_images, size = len(data.dataset(split)), module.config.data.image_size
    patients = data.parts[split].patients or [None] * n_images
    n_iterates = _n_shown(module.network)
    gallery = Gallery(n_images, config.n_pictures, size, len(methods), n_iterates)
    found: dict[int, list[ImageScore]] = {}
    batches: DataLoader[Any] = data.loader(split)
    for host_batch in progress(batches, "evaluating", "batch", Console(quiet=rank() != 0, markup=False)):
        numbers, weights = host_batch["sample"].tolist(), host_batch["weight"].tolist()
        batch: Batch = data.transfer_batch_to_device(host_batch, device, 0)
        with torch.no_grad():
            y = module.measure(batch, "test")
            images = {name: [method(y)] for name, method in methods.items() if method is not module.network}
            images[module.network.title] = shown_iterates(module.network, y)
        scores = {name: _score(batch, name, of[-1], config.window, metrics) for name, of in images.items()}
        for b, (n, weight) in enumerate(zip(numbers, weights, strict=True)):
            if weight:
                of_slice = {name: of[b] for name, of in scores.items()}
                found[n] = [*of_slice.values()]
                gallery.add(n, _slice(n, batch, b, images, of_slice))
    if dist.is_initialized():
        shares: list[tuple[dict[int, list[ImageScore]], dict[int, PageSlice]]]
        shares = [({}, {})] * dist.get_world_size()
        dist.all_gather_object(shares, (found, gallery.found))
        for its_scores, its_slices in shares:
            found |= its_scores
            gallery.merge(its_slices)
    numbers, slices = zip(*gallery.found.items(), strict=True)
    drawn = [numbers.index(n) for n in sorted(gallery.pictured)]
    scored = [replace(score, patient=patients[n]) for n in sorted(found) for score in found[n]]
    titles = titles_of(module.config.metrics)
    return Evaluation(scored, [*slices], drawn, baselines, own_range=data.config.own_range, titles=titles)


def shown_iterates(network: UnrolledNetwork[Any], y: Tensor) -> list[Tensor]:
    """x₀ … x_T for a page. For a solver with hundreds of iterations only x_T."""
    return network.iterates(y) if _n_shown(network) > 1 else [network(y)]


def _n_shown(network: UnrolledNetwork[Any]) -> int:
    return network.n_iterations + 1 if network.n_iterations <= _MOST_ITERATIONS else 1


def _slice(n: int, batch: Batch, b: int, images: dict[str, list[Tensor]], scores: dict[str, ImageScore]) -> PageSlice:
    """Slice n of the split, the b-th of a batch, by all methods. It is named by number: files may name patients."""

    def hu(image: Tensor) -> Tensor:
        return to_hu(batch, image)[b, 0].cpu()

    captions = {name: caption_of(score.values["psnr"], score.values["ssim"]) for name, score in scores.items()}
    methods = [PageMethod(name, [hu(x) for x in of], captions[name]) for name, of in images.items()]
    *_, last = scores.values()
    return PageSlice(f"slice {n}", hu(batch["image"]), methods, psnr=last.values["psnr"])


def write_evaluation(
    folder: Path, evaluation: Evaluation, title: str, config: Config, device: torch.device, console: Console, run: Path
) -> Path:
    """Write table.csv, table.md, images.csv, page.html and picture.png, and print the table. Returns the picture.

    `config`, `device` and `run`: what was measured, where, and with whose weights, for the page.
    """
    headings, body = table_of(evaluation)
    gain, warnings = _gain(evaluation), warnings_of(evaluation)
    write_text(folder / "table.csv", csv_table([headings, *body]))
    write_text(folder / "table.md", _markdown(title, headings, body, gain, warnings))
    write_text(folder / "images.csv", csv_table(_image_lines(evaluation)))
    picture = folder / PICTURE
    draw_comparison(picture, evaluation.rows)
    _write_page(folder / PAGE, evaluation, title, config, device, run)

    for line in warnings:
        console.print(f"warning: {line}", style="bold red", highlight=False, soft_wrap=True)
    console.print(terminal_table(headings, body, title=title, caption=gain))
    return picture


def _write_page(
    path: Path, evaluation: Evaluation, title: str, config: Config, device: torch.device, run: Path
) -> None:
    method, n_images = evaluation.methods[-1], len(evaluation.values(evaluation.methods[-1], "psnr"))
    size, (low, high) = config.data.image_size, config.evaluation.window
    lines = [f"Warning: {line}." for line in warnings_of(evaluation)]
    lines += [f"{_gain(evaluation)}. The window is {low:g} to {high:g} HU.".replace(" -", " −")]
    n_kept = len(evaluation.slices)
    order = f"worst first by PSNR of {method}"
    if n_kept < n_images:
        order += f": {n_kept} of {n_images}, the worst and those of the picture; images.csv has all"
    made_by = {
        "commit": git_commit() or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "hardware": device_name(device.type),
    }
    write_page(
        path,
        f"{method}, run {name_of_run(run)}",
        [PageTable(f"Mean ± standard deviation over {n_images} slices", *table_of(evaluation), " ".join(lines))],
        evaluation.slices,
        made_by,
        subtitle=f"{title}, {size} × {size} pixels",
        configuration=to_plain(without_places(config)),
        order=order,
        opened=sorted(evaluation.pictured)[len(evaluation.pictured) // 2] if evaluation.pictured else 0,
    )


def _image_lines(evaluation: Evaluation) -> list[list[Any]]:
    """Headings and rows of images.csv."""
    return [["number", "slice", "method", *evaluation.titles, "constant", "patient"]] + [
        [s.number, s.slice, s.method, *(s.values[name] for name in evaluation.titles), s.constant, s.patient]
        for s in evaluation.scores
    ]


def _score(
    batch: Batch, method: str, image: Tensor, window: list[float], metrics: Mapping[str, ImageMetric]
) -> list[ImageScore]:
    truth = batch["image"]
    windowed, windowed_truth = (to_window(to_hu(batch, x), (window[0], window[1])) for x in (image, truth))
    found = {name: metric(image, batch) for name, metric in metrics.items()}
    found |= {"window_psnr": psnr(windowed, windowed_truth), "window_ssim": ssim_percent(windowed, windowed_truth)}
    columns = {name: column.tolist() for name, column in found.items()}
    constant, empty = (_is_constant(x).tolist() for x in (image, windowed_truth))
    scores = []
    for b, (number, name) in enumerate(zip(batch["sample"].tolist(), batch["name"], strict=True)):
        values = {metric: column[b] for metric, column in columns.items()}
        if empty[b]:  # a reconstruction that has nothing there either would be infinitely good
            values |= dict.fromkeys(IN_WINDOW)
        scores.append(ImageScore(number, name, method, values, constant[b]))
    return scores


def _is_constant(image: Tensor) -> Tensor:
    return image.flatten(1).amax(1) == image.flatten(1).amin(1)


def caption_of(decibels: float, percent: float) -> str:
    """PSNR and SSIM × 100 as the text over an image."""
    return f"{decibels:.2f} dB, SSIM {percent:.2f}"


def table_of(evaluation: Evaluation) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table, a row for each method."""
    body = [[method] for method in evaluation.methods]
    for metric in evaluation.titles:
        for row in body:
            values = evaluation.values(row[0], metric)
            row.append(with_deviation(mean(values), deviation(values), decimals=evaluation.decimals(metric)))
    return ["method", *evaluation.titles.values()], body


def numbers_of(evaluation: Evaluation) -> tuple[list[str], list[list[str | float]]]:
    """The same table for programs: means and standard deviations are numbers in separate columns."""
    headings = ["method", *(f"{metric}{of}" for metric in evaluation.titles for of in ("", "_std"))]
    body: list[list[str | float]] = []
    for method in evaluation.methods:
        values = [evaluation.values(method, metric) for metric in evaluation.titles]
        body.append([method, *(it for of in values for it in (mean(of), deviation(of) or 0.0))])
    return headings, body


def _gain(evaluation: Evaluation) -> str:
    *others, last = evaluation.methods
    n = len(evaluation.values(last, "psnr"))
    over = ", ".join(f"over {other}: {_mean_gain(evaluation, other):+.2f} dB" for other in others)
    line = f"{last} {over}, mean over {n} images ({data_range(evaluation.own_range)})".removeprefix(
        "" if over else f"{last} , "
    )
    return "; ".join([line, *(_patient_gain(evaluation, other) for other in others if evaluation.n_patients > 1)])


def data_range(own: bool) -> str:
    """The data range of PSNR and SSIM in words. `own`: that of each reference."""
    return "data range of each reference, SSIM as skimage's" if own else "data range 1"


def _patient_gain(evaluation: Evaluation, other: str) -> str:
    """The gain over another method by every metric, with the patient as the unit: slices of one look alike."""
    last, gains = evaluation.methods[-1], []
    for metric, heading in evaluation.titles.items():
        mine, its = (
            by_patient([score for score in evaluation.scores if score.method == method], metric)
            for method in (last, other)
        )
        if differences := [mine[patient] - its[patient] for patient in mine]:
            gain = with_deviation(mean(differences), half_width(differences), "+", evaluation.decimals(metric))
            gains.append(f"{heading.partition(',')[0]} {gain}")
    return f"over {other}, mean over {evaluation.n_patients} patients ± half of its 95 % interval: {', '.join(gains)}"


def warnings_of(evaluation: Evaluation) -> list[str]:
    """Warnings above the table: a network below another method, a constant image, slices of the training set."""
    *others, last = evaluation.methods
    lines = [used_in_training(n)] if (n := evaluation.n_trained) else []
    lines += [
        f"{last} is BELOW {other} by {-gain:.2f} dB: it has not learned enough, or was trained for other data"
        for other in others
        if (gain := _mean_gain(evaluation, other)) < 0
    ]
    for method in evaluation.methods:
        if constant := sum(score.constant for score in evaluation.scores if score.method == method):
            of = len(evaluation.values(method, "psnr"))
            lines.append(f"{method} gives a constant image for {constant} of {of} slices: the network is dead")
        if bad := sum(isnan(value) or value == -inf for value in evaluation.values(method, "psnr")):
            of = len(evaluation.values(method, "psnr"))
            lines.append(f"{method} gives NaN or infinite pixels for {bad} of {of} slices, which images.csv names")
    return lines


def used_in_training(n: int) -> str:
    """The warning about n slices of a test that a network was trained on."""
    return f"{n} of the slices were used in training: the scores are too good"


def _mean_gain(evaluation: Evaluation, other: str) -> float:
    """Mean PSNR difference of the last method and another one."""
    pairs = zip(evaluation.values(evaluation.methods[-1], "psnr"), evaluation.values(other, "psnr"), strict=True)
    return mean(a - b for a, b in pairs)


def _markdown(title: str, headings: list[str], body: list[list[str]], caption: str, warnings: list[str]) -> str:
    first = [f"**Warning: {line}**" for line in warnings]
    return "\n\n".join([*first, f"**{title}**", markdown_table(headings, body), caption]) + "\n"
