"""The command `qnmixer.evaluate evaluation=task`: FBP, total variation and a network on phantoms at several doses."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qnmixer.engine.checkpoints import digest_of_weights, load_run
from qnmixer.engine.config.commands import EvaluateConfig
from qnmixer.engine.config.rules import one_scale
from qnmixer.engine.config.run import section
from qnmixer.engine.config.sections import TaskConfig
from qnmixer.engine.parallel.devices import choose_device
from qnmixer.engine.reconstructor import Reconstructor, build_noise
from qnmixer.engine.reports.terminal import Console, progress
from qnmixer.engine.tracking.run import Run
from qnmixer.errors import ConfigError
from qnmixer.extras.task.phantoms import BODY_HU, Disc, TaskPhantom
from qnmixer.extras.task.report import DoseScores, headings, write_task
from qnmixer.extras.task.scores import (
    channel_outputs,
    detectability,
    dog_channels,
    edge_profile,
    half_modulation,
    noise_of,
    noise_power,
    radial_mean,
    task_transfer,
    with_interval,
)
from qnmixer.models.fbp import FBP
from qnmixer.models.total_variation import TotalVariation

_KINDS = "absent", "present", "edges"
_FINER = 2
"""Sinograms come from a grid so many times finer, so that no method reconstructs by the matrix that simulated."""
_CORE = 0.6
"""Part of an insert's radius within which its contrast is measured, away from its edge."""


@dataclass
class _Samples:
    """Images of one method at one dose, in HU on the host: without inserts, with them [n, H, W], and edge profiles."""

    absent: list[Tensor]
    present: list[Tensor]
    edges: list[Tensor]


def evaluate_run(config: EvaluateConfig, folder: Path, overrides: list[str]) -> list[DoseScores]:
    """Run `qnmixer.evaluate evaluation=task`. Writes table.md, table.csv, picture.png and results.json into the folder.

    Raises CheckpointError for weights that cannot be loaded, ConfigError for a network or inserts that do not fit.
    """
    task = config.evaluation
    assert isinstance(task, TaskConfig)
    console = Console()
    module = load_run(config.run, config.checkpoint, config.trust)
    check_fit(module, task)
    with Run(folder, overrides).recording() as record:
        module = module.to(choose_device(config.accelerator)).eval()
        scores = [*task_scores(module, task, console)]
        geometry = module.projector.geometry
        title = (
            f"inserts of {task.insert_hu:g} HU and {task.insert_diameter:g} mm, {geometry.n_views} views, "
            f"{task.n_images} images of each kind and dose"
        )
        record["evaluated"] = {"weights": digest_of_weights(module.state_dict()), "data": "task", "noise": "physical"}
        record["task"] = [one.plain() for one in scores]
        record["picture"] = str(write_task(folder, title, scores, console))
    console.print(f"picture: {record['picture']}", soft_wrap=True)
    return scores


def check_fit(module: Reconstructor, task: TaskConfig) -> None:
    """Raise ConfigError for inserts that the grid or its values cannot show, or a scale that has no dose."""
    one_scale(module.config.data, section("noise", "physical"))
    phantom = TaskPhantom(module.projector.geometry)
    smallest, largest = 1.5 * phantom.pixel_size, phantom.region * phantom.pixel_size / 2
    if not smallest <= task.insert_diameter <= largest:
        raise ConfigError(
            f"evaluation.insert_diameter={task.insert_diameter:g} does not fit the images of this run: give "
            f"{smallest:.3g} to {largest:.3g} mm"
        )
    lowest, highest = -1000 - BODY_HU, module.config.data.hu_max - BODY_HU
    for key, contrasts in {"insert_hu": [task.insert_hu], "edge_hu": task.edge_hu}.items():
        for contrast in contrasts:
            if not lowest <= contrast <= highest:
                raise ConfigError(
                    f"evaluation.{key} has {contrast:g}, which makes values that this run cannot have: give "
                    f"{lowest:g} to {highest:g}"
                )


def task_scores(module: Reconstructor, task: TaskConfig, console: Console) -> Iterator[DoseScores]:
    """The scores of every dose and method, in this order. The noise of the module's config becomes that of the dose.

    All doses have the same phantoms. Every image has a body of its own.
    """
    phantom = TaskPhantom(module.projector.geometry)
    jobs = [(photons, kind, n) for photons in task.photons for kind in _KINDS for n in range(task.n_images)]
    samples: dict[str, _Samples] = {}
    for photons, kind, n in progress(jobs, "evaluating", "phantom", console):
        module.config.noise = section("noise", "physical", photons=photons)
        rng = np.random.default_rng([task.seed, _KINDS.index(kind), n])
        discs: list[Disc] = []
        if kind == "present":
            discs = phantom.inserts(task.insert_diameter, task.insert_hu)
        elif kind == "edges":
            discs = phantom.edges(task.edge_hu, rng)
        key = task.seed, _KINDS.index(kind), n
        images = _reconstructed(module, task, phantom.draw(_FINER * phantom.size, discs, rng), key)
        for method, image in images.items():
            of = samples.setdefault(method, _Samples([], [], []))
            if kind == "edges":
                image = torch.stack([edge_profile(image, d.x, d.y, d.radius, phantom.pixel_size) for d in discs])
            getattr(of, kind).append(image)
        if (kind, n) == (_KINDS[-1], task.n_images - 1):
            yield from (_scored(phantom, task, photons, method, of) for method, of in samples.items())
            samples = {}


@torch.no_grad()
def _reconstructed(
    module: Reconstructor, task: TaskConfig, fine: Tensor, key: tuple[int, int, int]
) -> dict[str, Tensor]:
    """HU [H, W] by every method of the sinogram of a phantom [f·H, f·W] in HU."""
    offset, scale = module.config.data.hu_scaling
    noise = build_noise(module.config)
    x = ((fine - offset) / scale)[None, None].to(module.device)
    y = noise(module.measurement.project(x, x), [key])
    total_variation = TotalVariation(
        module.projector, weight=task.tv_weight, noise_weight=task.tv_noise_weight, variance=noise.variance
    )
    methods: dict[str, Callable[[Tensor], Tensor]] = {FBP.title: module.projector.fbp}
    methods |= {TotalVariation.title: total_variation, module.network.title: module.network}
    return {name: (offset + scale * method(y)[0, 0]).cpu() for name, method in methods.items()}


def _scored(phantom: TaskPhantom, task: TaskConfig, photons: float, method: str, of: _Samples) -> DoseScores:
    pixel, channels = phantom.pixel_size, dog_channels(phantom.region)
    absent, present = (phantom.regions(torch.stack(images)).double() for images in (of.absent, of.present))
    edges = torch.stack(of.edges)  # [n, contrasts, 2, bins]
    axis = (torch.arange(phantom.region) - (phantom.region - 1) / 2) * pixel
    core = torch.hypot(axis, axis[:, None]) <= max(_CORE * task.insert_diameter / 2, pixel)

    def kept(without: Tensor, inserted: Tensor) -> Tensor:
        return 100 * (inserted[..., core].mean() - without[..., core].mean()) / task.insert_hu

    def noise(spectra: Tensor) -> Tensor:
        return noise_of(spectra.mean(0), pixel)

    def halves(profiles: Tensor) -> Tensor:
        return torch.stack([half_modulation(of_contrast, pixel) for of_contrast in profiles.unbind(1)])

    spectra = torch.stack([noise_power(regions, pixel) for regions in absent])
    outputs = [channel_outputs(regions, channels) for regions in (absent, present)]
    measured = (
        with_interval(noise, spectra),
        with_interval(halves, edges),
        with_interval(kept, absent, present),
        with_interval(detectability, *outputs),
    )
    values, intervals = (
        torch.cat([part.flatten() for part in parts]).tolist() for parts in zip(*measured, strict=True)
    )
    return DoseScores(
        photons,
        method,
        dict(zip(headings(task.edge_hu), zip(values, intervals, strict=True), strict=True)),
        spectrum=radial_mean(spectra.mean(0), pixel),
        transfer={
            contrast: task_transfer(profiles, pixel)
            for contrast, profiles in zip(task.edge_hu, edges.unbind(1), strict=True)
        },
        example=of.present[0],
    )
