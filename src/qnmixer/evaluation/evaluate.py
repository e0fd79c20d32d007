"""Compare a network with FBP, and on request total variation, on a split: scores per image, a table, a picture."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from math import inf, isnan
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from qnmixer.data.batch import Batch, to_hu
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.own_datamodule import Numbered, OwnDataModule
from qnmixer.errors import ConfigError, DataError
from qnmixer.evaluation.metrics import ImageMetric, build_metrics, psnr, ssim_percent, to_window
from qnmixer.evaluation.page import write_page_of
from qnmixer.evaluation.pictures import MethodImages, SliceImages, draw_slices
from qnmixer.evaluation.scores import Conditions, Evaluation, ImageScore, titles_of, with_usual
from qnmixer.files import digest, digest_of_bytes, write_text
from qnmixer.measurement.pairs import check_pairs
from qnmixer.models.total_variation import TotalVariation
from qnmixer.physics import NoNoise, images_by_symmetry
from qnmixer.reconstruction.pretrained import digest_of_weights
from qnmixer.reconstruction.reconstructor import Reconstructor, second_order, symmetries_of
from qnmixer.runs.processes.process import rank
from qnmixer.runs.terminal import Console, progress
from qnmixer.settings.data import DataConfig, FolderData, MixedData
from qnmixer.settings.logged_names import IN_WINDOW, RESIDUAL
from qnmixer.settings.run import Config
from qnmixer.settings.sections import EvaluationConfig

RunData = SliceDataModule | OwnDataModule
Images = dict[str, list[Tensor]]  # by method: its iterates, or x_T alone, each [B, 1, S, S]
PICTURE, PAGE = "picture.png", "page.html"
_MOST_ITERATIONS = 50  # a page has room for the images of so many
_N_WORST = 9  # so many of the worst slices are on a page, beside those of the picture


def what_was_evaluated(module: Reconstructor, evaluation: Evaluation) -> dict[str, Any]:
    """The entry of results.json that says what a table measures: the weights, the slices, the noise.

    Scores of two evaluations can be compared only where `test` is equal in both. `scalars`: τ_t and the others.
    """
    return {
        "weights": digest_of_weights(module.state_dict()),
        "scalars": {name: [p.tolist() for p in part] for name, part in module.network.scalars().items() if part},
        "data": evaluated_name(module.config),
        "noise": module.config.noise.plain(),
        "test": evaluation.test and evaluation.test._asdict(),
    }


def evaluated_source(data: DataConfig) -> DataConfig:
    """The source of validation and test slices."""
    return data.by_section()[f"data.sources.{data.evaluate_on}"] if isinstance(data, MixedData) else data


def evaluated_name(config: Config) -> str:
    """What gives the slices of validation and test: a source of `data`, or a LightningDataModule of the user's."""
    return evaluated_source(config.data).name if config.datamodule.is_of_slices else config.datamodule.target


def conditions_of(module: Reconstructor, data: RunData, contents: Sequence[int]) -> Conditions:
    """What tells a test from others. `contents`: digests of its slices, in their order."""
    noise_digests: tuple[str, ...] = ()
    scan = {**asdict(module.projector.geometry), "factor": data.config.simulation_factor}
    if data.measured:
        scan |= {"measured": True}
    noise_model = module.measurement.noise
    if not isinstance(noise_model, NoNoise) and (noise_model.for_measured or not data.measured):
        # The defaults of a class may be left out of a config.
        keys = asdict(noise_model) if is_dataclass(noise_model) else module.config.noise.plain()
        # The noise of a slice depends on its number.
        noise = digest([module.config.noise.target, keys], sort_keys=True)
        noise_digests = noise, str(module.config.seed), digest([*contents])
    return Conditions(digest(sorted(contents)), digest(scan, sort_keys=True), *noise_digests)


def _content(batch: Mapping[str, Any], b: int, measured: bool) -> int:
    """A digest of the b-th truth of a batch, if any, with its scale, and of its sinogram, if that was measured."""
    names = ["image", "hu_offset", "hu_scale", *["sinogram"] * measured]
    parts = [batch[name][b] for name in names if name in batch]
    return digest_of_bytes(b"".join(part.numpy().tobytes() for part in parts))


def title_of(config: Config, n_views: int, module: RunData, split: str) -> str:
    """The title of a table."""
    data = module.config
    slices = f"{split} split"
    if config.datamodule.is_of_slices and isinstance(data, FolderData) and data.split == "all":
        slices = "all slices"
    finer = f", simulated on a {data.simulation_factor} times finer grid" if data.simulation_factor > 1 else ""
    disc = ", with a bright disc" if data.disc else ""
    sinograms = "measured" * module.measured or f"noise {config.noise.name}"
    sinograms += f", noise {config.noise.name}" * (module.measured and config.noise.load().for_measured)
    return f"{slices} of {evaluated_name(config)}{disc}, {n_views} views{finer}, {sinograms}"


def evaluate(
    module: Reconstructor,
    data: RunData,
    split: str,
    config: EvaluationConfig,
    device: torch.device,
    most_symmetries: int = 1,
) -> Evaluation:
    """Reconstruct every slice of a split by FBP and by the network (which may be FBP), from the same noisy sinogram.

    With several symmetries another row has the mean over those that the scan has, at most so many. With several
    processes each evaluates its share, and all get the full result. Without truths, the score is the residual of views
    that are held out of the input.
    """
    if most_symmetries > 1 and not data.has_truth:
        raise ConfigError(f"symmetries={most_symmetries} turns views that are held out too: leave it out without truth")
    module = module.to(device).eval()
    methods = _Methods(module, config, most_symmetries)
    results = _Results(module, data, split, config)
    batches: DataLoader[Any] | Numbered = data.loader(split)
    for host_batch in progress(batches, len(batches), "evaluating", "batch", Console(quiet=rank() != 0)):
        batch: Batch = data.on_after_batch_transfer(data.transfer_batch_to_device(host_batch, device, 0), 0)
        if data.measured and not results.scores:  # before the first is scored
            check_pairs(module.config, module.projector, batch, split)
        y = module.measure(batch, "test")
        results.add(host_batch, batch, methods(y), {} if data.has_truth else methods.residuals(y))
    results.gather()
    scores = [results.scores[n] for n in sorted(results.scores)]
    if not scores:
        raise DataError(f"{evaluated_name(module.config)} has no slice of {split} with a weight above 0")
    scalars = {} if methods.first_order is None else second_order(module.network)
    n = len(methods.turns)
    symmetric = f", symmetric: mean over {n} turns and flips" if n > 1 else ""
    return Evaluation(
        title=title_of(module.config, module.projector.geometry.n_views, data, split) + symmetric,
        scores=[score for of_slice in scores for score in of_slice],
        slices=results.slices,
        pictured=sorted(results.picture_numbers & results.scores.keys()),
        baselines=[*methods.baselines],
        own_range=data.config.own_range,
        titles=titles_of(module.config.metrics) if data.has_truth else {RESIDUAL: "residual of held-out views"},
        note="".join(f". {name}: {scalar}" for name, scalar in scalars.items()),
        test=conditions_of(module, data, [of_slice[0].content for of_slice in scores]),
    )


class _Methods:
    """The methods that an evaluation compares: functions y → x by name, the network, and what stands beside it."""

    def __init__(self, module: Reconstructor, config: EvaluationConfig, most_symmetries: int) -> None:
        self.network = module.network
        self.baselines: dict[str, Callable[[Tensor], Tensor]] = {"FBP": module.projector.fbp}
        if config.tv_weight is not None:
            self.baselines[TotalVariation.title] = TotalVariation(
                module.projector,
                weight=config.tv_weight,
                noise_weight=config.tv_noise_weight,
                variance=module.measurement.noise.variance,
            )
        self.turns = symmetries_of(module.projector, most_symmetries)
        self.first_order = self.network.first_order() if config.first_order else None
        self.measurement = module.measurement
        title = self.network.title
        self.others = {name: method for name, method in self.baselines.items() if name != title}
        if self.first_order is not None:
            self.others[f"{title}, H = I"] = self.first_order

    def residuals(self, y: Tensor) -> dict[str, Tensor]:
        """`Measurement.residual` [B] of each method, where no truth is known."""
        methods = self.others | {self.network.title: self.network}
        return {name: self.measurement.residual(method, y) for name, method in methods.items()}

    @torch.no_grad()
    def __call__(self, y: Tensor) -> Images:
        """The images [B, 1, S, S] of each method from the same y [B, 1, V, D]: its iterates, or x_T alone."""
        network, title = self.network, self.network.title
        images = {name: [method(y)] for name, method in self.others.items()}
        # For a solver with hundreds of iterations only x_T.
        iterates = network.iterates(y) if network.n_iterations <= _MOST_ITERATIONS else [network(y)]
        images[title] = iterates
        if len(self.turns) > 1:  # the first is the identity
            symmetric_images = images_by_symmetry(network, y, self.turns[1:])
            images[f"{title}, symmetric"] = [torch.cat([iterates[-1][None], symmetric_images]).mean(0)]
        return images


class _Results:
    """The scores of all slices, and the images of those of the picture and of the worst, by number of the slice."""

    def __init__(self, module: Reconstructor, data: RunData, split: str, config: EvaluationConfig) -> None:
        self.metrics = build_metrics(with_usual(module.config.metrics), data.config.own_range)
        self.window, self.measured = config.window, data.measured
        self.picture_numbers = pictured(count_of(data, split), config.n_pictures)
        self.patients = data.parts[split].patients if isinstance(data, SliceDataModule) else ()
        self.scores: dict[int, list[ImageScore]] = {}
        self.slices: dict[int, SliceImages] = {}

    def add(self, host_batch: Mapping[str, Any], batch: Batch, images: Images, residuals: Mapping[str, Tensor]) -> None:
        """Score the images of a batch; without a truth, `residuals` are their scores.

        `host_batch`: the batch as its loader gave it.
        """
        if "image" in batch:
            values = {name: _values_of(batch, xs[-1], self.window, self.metrics) for name, xs in images.items()}
        else:
            values = {name: [{RESIDUAL: value} for value in column.tolist()] for name, column in residuals.items()}
        numbers = host_batch.get("number", host_batch["sample"]).tolist()
        for b, (n, weight) in enumerate(zip(numbers, host_batch["weight"].tolist(), strict=True)):
            if weight:  # else it only fills the batch
                origin = self.patients[n] if self.patients else None, _content(host_batch, b, self.measured)
                self.scores[n] = [
                    ImageScore(n, batch["name"][b], method, rows[b], *origin) for method, rows in values.items()
                ]
                self.slices[n] = _slice(n, batch, b, images, self.scores[n], self.window)
        self.slices = worst_of(self.slices, self.scores, self.picture_numbers)

    def gather(self) -> None:
        """Give each process the results of all."""
        if not dist.is_initialized():
            return
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, (self.scores, self.slices))
        self.scores = {n: slice_scores for scores, _ in shares for n, slice_scores in scores.items()}
        slices = {n: slice_ for _, slices in shares for n, slice_ in slices.items()}
        self.slices = worst_of(slices, self.scores, self.picture_numbers)


def count_of(data: RunData, part: str) -> int | None:
    """The slices of a part; None if only its loader knows. Raises DataError if there are none."""
    return len(data.dataset(part)) if isinstance(data, SliceDataModule) else data.count(part)


def pictured(n_images: int | None, n_pictures: int) -> set[int]:
    """The indices of the images to draw. They are spread over the split, because neighbours look alike.

    The first ones, if the number of images is not known.
    """
    if n_images is None:
        return {*range(n_pictures)}
    n = min(n_pictures, n_images)
    return {(2 * k + 1) * n_images // (2 * n) for k in range(n)}


def worst_of(
    slices: Mapping[int, SliceImages], scores: Mapping[int, list[ImageScore]], picture_numbers: Collection[int]
) -> dict[int, SliceImages]:
    """Those of the picture, and of the others the worst by PSNR, or by residual, of the last method.

    The worst come first.
    """
    values = {n: scores[n][-1].values for n in slices}
    goods = {n: value["psnr"] if "psnr" in value else -value[RESIDUAL] for n, value in values.items()}
    numbers = sorted(slices, key=lambda n: (-inf if isnan(goods[n]) else goods[n], n))
    worst = [n for n in numbers if n not in picture_numbers][:_N_WORST]
    return {n: slices[n] for n in numbers if n in picture_numbers or n in worst}


def _slice(n: int, batch: Batch, b: int, images: Images, scores: list[ImageScore], window: list[float]) -> SliceImages:
    """Slice n of the split, the b-th of a batch, by all methods. It is named by number: files may name patients."""

    def hu(image: Tensor) -> Tensor:
        return to_hu(batch, image)[b, 0].cpu()

    methods = []
    for (name, iterates), score in zip(images.items(), scores, strict=True):
        caption = "{psnr:.2f} dB, SSIM {ssim:.2f}".format(**score.values) if "image" in batch else ""
        methods.append(MethodImages(name, [hu(x) for x in iterates], caption))
    return SliceImages(f"slice {n}", hu(batch["image"]) if "image" in batch else None, methods, window)


def _values_of(
    batch: Batch, image: Tensor, window: list[float], metrics: Mapping[str, ImageMetric]
) -> list[dict[str, float | None]]:
    """The metrics of each image of a batch, by name."""
    if "unscored" in batch:
        image = torch.where(batch["unscored"], batch["image"], image)
    x, truth = (to_window(to_hu(batch, x), (window[0], window[1])) for x in (image, batch["image"]))
    columns = {name: metric(image, batch) for name, metric in metrics.items()}
    columns |= {"window_psnr": psnr(x, truth), "window_ssim": ssim_percent(x, truth)}
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    scores: list[dict[str, float | None]] = [dict(zip(columns, row, strict=True)) for row in rows]
    # With nothing in the window a reconstruction that has nothing there either would be infinitely good.
    empty = truth.flatten(1).amax(1) == truth.flatten(1).amin(1)
    return [row | dict.fromkeys(IN_WINDOW) if is_empty else row for row, is_empty in zip(scores, empty, strict=True)]


def write_evaluation(folder: Path, evaluation: Evaluation, console: Console) -> Path:
    """Write table.csv, table.md, images.csv, picture.png and page.html, and print the table. Returns the picture."""
    table, warnings = evaluation.table(), evaluation.warnings()
    write_text(folder / "table.csv", table.csv())
    paragraphs = [*(f"**Warning: {line}**" for line in warnings), table.markdown()]
    write_text(folder / "table.md", "\n\n".join(paragraphs) + "\n")
    write_text(folder / "images.csv", evaluation.images().csv())
    draw_slices(folder / PICTURE, evaluation.rows)
    write_page_of(folder / PAGE, evaluation)
    for line in warnings:
        console.warn(line, style="bold red")
    console.print(table.terminal())
    console.lines(f"table: {folder / 'table.md'}")
    return folder / PICTURE
