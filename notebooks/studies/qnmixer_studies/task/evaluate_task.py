"""The command `qnmixer.evaluate evaluation=task`: FBP, total variation and a network on phantoms at several doses."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qnmixer.errors import ConfigError
from qnmixer.evaluation.logs import log_scores
from qnmixer.measurement.build import build_noise
from qnmixer.models.fbp import FBP
from qnmixer.models.total_variation import TotalVariation
from qnmixer.parallel.devices import choose_device
from qnmixer.reconstruction.checkpoints import load_run
from qnmixer.reconstruction.pretrained import digest_of_weights
from qnmixer.reconstruction.reconstructor import Reconstructor
from qnmixer.runs.loggers import recording_scores
from qnmixer.runs.terminal import Console, progress
from qnmixer.settings.rules import one_scale
from qnmixer.settings.run import section
from qnmixer_studies.task import scores as of
from qnmixer_studies.task.phantoms import Disc, TaskPhantom
from qnmixer_studies.task.report import DoseScores, headings, scores_by_name, write_task
from qnmixer_studies.task.task_config import EvaluateTaskConfig, TaskConfig

_KINDS = "absent", "present", "edges"
_FINER = 2  # sinograms come from a finer grid, so that no method reconstructs by the matrix that simulated
_LEAST_CONTRAST_TO_NOISE = 25.0
"""An edge is measured if its contrast is at least so many times the noise of a bin of its mean profile. With less, the
frequency of half modulation scatters by more than a tenth (measured with white noise and blurs of 1 to 6 mm)."""
_CORE = 0.6  # part of an insert's radius within which its contrast is measured


def evaluate_task(config: EvaluateTaskConfig, folder: Path, overrides: list[str]) -> None:
    """Run `qnmixer.evaluate evaluation=task`. Writes table.md, table.csv, picture.png and results.json into the folder.

    Raises CheckpointError for weights that cannot be loaded, ConfigError for a network or an insert that does not fit.
    """
    task, console = config.evaluation, Console()
    module = load_run(config.run, config.checkpoint, config.trust)
    one_scale(module.config.data, section("noise", "physical"))
    geometry, phantom = module.projector.geometry, TaskPhantom(module.projector.geometry)
    smallest, largest = 1.5 * phantom.pixel_size, phantom.region * phantom.pixel_size / 2
    if not smallest <= task.insert_diameter <= largest:
        advice = f"does not fit the images of this run: give {smallest:.3g} to {largest:.3g} mm"
        raise ConfigError(f"evaluation.insert_diameter={task.insert_diameter:g} {advice}")
    device = choose_device(config.accelerator)
    with recording_scores(module.config, config.logger, device.type, folder, overrides) as (record, loggers):
        scores = [*task_scores(module.to(device).eval(), task, console)]
        insert = f"inserts of {task.insert_hu:g} HU and {task.insert_diameter:g} mm"
        title = f"{insert}, {geometry.n_views} views, {task.n_images} images of each kind and dose"
        record["evaluated"] = {"weights": digest_of_weights(module.state_dict()), "data": "task", "noise": "physical"}
        inserts = [Disc(x, y, task.insert_diameter / 2, task.insert_hu) for x, y in phantom.places]
        body = phantom.draw(phantom.size, np.random.default_rng((task.seed, 0, 0)))  # as in the images
        truth = phantom.around_body(body + phantom.draw_discs(phantom.size, inserts))
        picture = write_task(folder, title, scores, truth, phantom.around_inserts(task.insert_diameter), console)
        record["picture"] = str(picture)
        log_scores(loggers, scores_by_name(scores), ("task/picture", picture), [picture, folder / "table.csv"], folder)
    console.lines(f"picture: {record['picture']}")


def task_scores(module: Reconstructor, task: TaskConfig, console: Console) -> Iterator[DoseScores]:
    """The scores of every dose and method, in this order. The noise of the module's config becomes that of the dose.

    All doses have the same phantoms. Those with inserts have the body and the noise of those without. So what an insert
    leaves in an image is their difference.
    """
    phantom = TaskPhantom(module.projector.geometry)
    inserts = [Disc(x, y, task.insert_diameter / 2, task.insert_hu) for x, y in phantom.places]
    jobs = [(photons, kind, n) for photons in task.photons for kind in range(3) for n in range(task.n_images)]
    samples: dict[str, dict[str, list[Tensor]]] = {}
    for photons, kind, n in progress(jobs, len(jobs), "evaluating", "phantom", console):
        module.config.noise = section("noise", "physical", photons=photons)
        key = task.seed, kind // 2, n  # of one pair: the same
        rng = np.random.default_rng(key)
        discs = phantom.edges(task.edge_hu, rng) if _KINDS[kind] == "edges" else inserts * kind
        body = phantom.draw(_FINER * phantom.size, rng)
        fine = body + phantom.draw_discs(_FINER * phantom.size, discs)
        for method, image in reconstructed(module, task, fine, body, key).items():
            if _KINDS[kind] == "edges":
                profiles = [of.edge_profile(image, d.x, d.y, d.radius, phantom.pixel_size) for d in discs]
                image = torch.stack(profiles)
            samples.setdefault(method, {}).setdefault(_KINDS[kind], []).append(image)
        if (kind, n) == (2, task.n_images - 1):
            outputs = {
                method: [of.channel_outputs(phantom.regions(torch.stack(images[kind]))) for kind in _KINDS[:2]]
                for method, images in samples.items()
            }
            network = module.network.title
            for method, images in samples.items():
                nothing = torch.tensor(torch.nan), torch.tensor(torch.nan)
                beyond = nothing if method == network else of.detected_beyond(outputs[network], outputs[method])
                yield _scored(phantom, task, photons, method, images, (of.detected(*outputs[method]), beyond))
            samples = {}


@torch.no_grad()
def reconstructed(
    module: Reconstructor, task: TaskConfig, fine: Tensor, body: Tensor, key: tuple[int, ...]
) -> dict[str, Tensor]:
    """HU [H, W] by every method of the sinogram of a phantom [f·H, f·W] in HU, with the noise that its body draws.

    Of discs of some HU the noise would differ too little to matter, but as a draw it would be another one.
    """
    offset, scale = module.config.data.hu_scaling
    noise = build_noise(module.config)
    x, x_body = (((hu - offset) / scale)[None, None].to(module.device) for hu in (fine, body))
    y, y_body = (module.measurement.project(image, image) for image in (x, x_body))
    y = y + noise(y_body, [key]) - y_body
    total_variation = TotalVariation(
        module.projector, weight=task.tv_weight, noise_weight=task.tv_noise_weight, variance=noise.variance
    )
    methods: dict[str, Callable[[Tensor], Tensor]] = {
        FBP.title: module.projector.fbp,
        TotalVariation.title: total_variation,
        module.network.title: module.network,
    }
    return {name: (offset + scale * method(y)[0, 0]).cpu() for name, method in methods.items()}


def _edge(profiles: Tensor, pixel: float) -> tuple[Tensor, Tensor]:
    """The frequency of half modulation with its interval; NaN for an edge that shows none."""
    if of.edge_contrast_to_noise(profiles) < _LEAST_CONTRAST_TO_NOISE:
        return torch.tensor(torch.nan), torch.tensor(torch.nan)
    value, half = of.with_interval(lambda part: of.half_modulation(part, pixel), profiles)
    return (value, half) if half.isfinite() else (half, half)  # near the widest edge that a disc can show


def _scored(
    phantom: TaskPhantom,
    task: TaskConfig,
    photons: float,
    method: str,
    images: dict[str, list[Tensor]],
    detected: Sequence[tuple[Tensor, Tensor]],
) -> DoseScores:
    """The scores of a method at a dose. `detected`: its d' and the network's minus it, each with its interval."""
    pixel = phantom.pixel_size
    absent, present = (phantom.regions(torch.stack(images[kind])).double() for kind in _KINDS[:2])
    edges = torch.stack(images["edges"])  # [n, contrasts, 2, bins]
    axis = (torch.arange(phantom.region) - (phantom.region - 1) / 2) * pixel
    core = torch.hypot(axis, axis[:, None]) <= max(_CORE * task.insert_diameter / 2, pixel)
    spectra = torch.stack([of.noise_power(regions, pixel) for regions in absent])
    contrast = 100 / task.insert_hu * (present - absent)[..., core].mean((1, 2))
    measured = (
        of.with_interval(lambda drawn: of.noise_of(drawn.mean(0), pixel), spectra),
        *(_edge(part, pixel) for part in edges.unbind(1)),
        of.with_interval(torch.mean, contrast),
        *detected,
    )
    values, halves = (torch.cat([part.flatten() for part in parts]).tolist() for parts in zip(*measured, strict=True))
    return DoseScores(
        photons,
        method,
        dict(zip(headings(task.edge_hu), zip(values, halves, strict=True), strict=True)),
        spectrum=of.radial_mean(spectra.mean(0), pixel),
        transfer={hu: of.shown_transfer(part, pixel) for hu, part in zip(task.edge_hu, edges.unbind(1), strict=True)},
        example=phantom.around_body(images["present"][0]),
    )
