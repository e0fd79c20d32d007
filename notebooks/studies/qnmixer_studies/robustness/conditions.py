"""The conditions of a table of robustness, and the sinograms that a network gets under each."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qnmixer.data.batch import Batch
from qnmixer.measurement.build import build_geometry, build_measurement
from qnmixer.physics import PhysicalNoise
from qnmixer.physics.noise import attenuation_per_value
from qnmixer.reconstruction.cures import put_on
from qnmixer.reconstruction.reconstructor import Reconstructor, on_scan
from qnmixer.settings.run import Config, section
from qnmixer_studies.robustness import perturbations as physics
from qnmixer_studies.robustness.robustness_config import RobustnessConfig

VIEWS = "views"
BEYOND = "body beyond the field, times"
Perturbation = Callable[[Tensor, physics.Project], Tensor]
"""An object [B, 1, S, S] and A of its grid → line integrals [B, 1, V, D]."""

Scene = Callable[[Batch], Batch]  # what the truth of a batch becomes

_SCATTER_WIDTH = 0.05  # standard deviation of the smooth scatter, in widths of the detector
_PIN = (0.125, 0.0)  # where the metal is, in widths of the image, to the right of its middle and below it


@dataclass(frozen=True, eq=False)  # a config has no hash
class Condition:
    """What differs from training."""

    axis: str  # the quantity, with its unit
    value: float | str  # of that quantity
    scanner: Config  # config of the scan and the noise that are simulated
    is_known: bool = True  # whether the reconstruction uses the scanner's geometry. Else it uses that of training
    perturbation: Perturbation | None = None  # makes the line integrals in place of A
    scene: Scene | None = None  # what the truth becomes: a batch → a batch
    needs_scale: bool = False  # whether it makes sense only if all slices have the same scale of attenuation

    @property
    def name(self) -> str:
        """Its name in tables and logs."""
        return f"{self.axis} {self.value:g}" if isinstance(self.value, float) else f"{self.axis} {self.value}"

    def reconstructor(self, trained: Reconstructor) -> Reconstructor:
        """The network with the sinograms of this condition. Raises an error if it does not take them."""
        if self.is_known and self.perturbation is None:
            return on_scan(trained, self.scanner)
        return OffScanReconstructor(trained, self)


class OffScanReconstructor(Reconstructor):
    """A network that reconstructs the sinograms of another scan, or perturbed ones, as if they were of its own."""

    def __init__(self, module: Reconstructor, condition: Condition) -> None:
        super().__init__(module.config.changed(noise=condition.scanner.noise), module.projector)
        self.load_state_dict(module.state_dict())
        put_on(self.network, module.projector, module.cures, self.measurement.noise.variance)
        same = condition.scanner.geometry == module.config.geometry
        self.off_scan = build_measurement(condition.scanner, module.projector if same else None)
        self.perturbation = condition.perturbation

    def measure(self, batch: Batch, stream: str) -> Tensor:
        """The noisy sinogram y [B, 1, V, D] of the other scan."""
        if self.perturbation is None:
            return self.off_scan(batch, stream)
        is_fine = "fine" in batch
        x = batch["fine"] if is_fine else batch["image"]

        def project(x: Tensor) -> Tensor:
            return self.off_scan.project(x, x if is_fine else None)

        with torch.no_grad():
            return self.off_scan.with_noise(self.perturbation(x, project), batch, stream)


def conditions(config: RobustnessConfig, trained: Config, fine_size: int) -> Iterator[Condition]:
    """All conditions of a config but the numbers of views, first that of training.

    `fine_size`: of the grid that the sinograms are simulated from. Raises ConfigError for a value out of bounds.
    """
    geometry = trained.geometry

    def scan(**keys: float) -> Config:
        return trained.changed(geometry=geometry.changed(**keys))

    yield Condition("noise", "as trained" if config.noise is None else config.noise.name, trained)
    for option in config.noises:
        yield Condition("noise", option, trained.changed(noise=section("noise", option)))
    for photons in config.photons:
        noise = section("noise", "physical", photons=photons)
        yield Condition("dose, photons a ray", photons, trained.changed(noise=noise), needs_scale=True)
    for arc in config.arc:
        span = build_geometry(trained).short_scan if arc == "short" else math.radians(arc)
        if span < abs(geometry.angle_span):
            signed = math.copysign(span, geometry.angle_span)
            yield Condition("arc, degrees", round(math.degrees(span), 1), scan(angle_span=signed))
    for factor in config.patient_size:
        width = round(factor * geometry.field_of_view, 6)
        yield Condition("patient size, times", factor, scan(field_of_view=width))
    for bins in config.detector_offset:
        off = scan(detector_offset=geometry.detector_offset + bins)
        yield Condition("detector off by, bins", bins, off, is_known=False)
    for distance in config.source_distance if geometry.beam != "parallel" else ():
        off = scan(source_to_axis=geometry.source_to_axis + distance)
        yield Condition("source off by, mm", distance, off, is_known=False)
    yield from _perturbed(config, trained, fine_size)


def _perturbed(config: RobustnessConfig, trained: Config, fine_size: int) -> Iterator[Condition]:
    """The conditions of the beam, the detector and the object."""
    geometry, hu_max = trained.geometry, trained.data.hu_max
    mu = attenuation_per_value(PhysicalNoise.water_attenuation, hu_max)
    pixel_size = geometry.field_of_view / fine_size

    for kv in config.tube_kv:

        def of_tube(x: Tensor, project: physics.Project) -> Tensor:
            return physics.polychromatic([project(part) for part in physics.water_and_bone(x, hu_max)], mu)

        yield Condition("tube, kV", float(kv), trained, perturbation=of_tube, needs_scale=True)
    for fraction in config.scatter:
        perturbation = _of_integrals(partial(physics.constant_scatter, fraction=fraction, mu=mu))
        yield Condition("constant scatter", fraction, trained, perturbation=perturbation, needs_scale=True)
    for fraction in config.smooth_scatter:
        width = _SCATTER_WIDTH * geometry.n_detectors
        perturbation = _of_integrals(partial(physics.smooth_scatter, fraction=fraction, mu=mu, width=width))
        yield Condition("smooth scatter", fraction, trained, perturbation=perturbation, needs_scale=True)
    for share in config.crosstalk:
        perturbation = _of_integrals(partial(physics.crosstalk, share=share, mu=mu))
        yield Condition("crosstalk", share, trained, perturbation=perturbation, needs_scale=True)
    for distance in config.motion:
        perturbation = partial(physics.moving, pixels=distance / pixel_size)
        yield Condition("motion, mm", distance, trained, perturbation=perturbation)
    for factor in config.truncation:
        width = 2 * round(fine_size / factor / 2)  # pixels of the object that the field sees
        factor = round(fine_size / width, 3)
        wide = trained.changed(geometry=geometry.changed(field_of_view=geometry.field_of_view * fine_size / width))
        scene = partial(_within_field, width=width)
        yield Condition(BEYOND, factor, wide, is_known=False, scene=scene)
    for diameter in config.metal:
        centre = (_PIN[0] * fine_size, _PIN[1] * fine_size)
        pin = physics.disc(fine_size, diameter / pixel_size, centre)
        titanium = physics.ATTENUATION_AT_REFERENCE[2] * physics.TITANIUM_DENSITY / 10 / mu  # /mm, then in units of x

        def with_metal(x: Tensor, project: physics.Project, pin: Tensor = pin, titanium: float = titanium) -> Tensor:
            metal = pin.to(x)
            parts = *physics.water_and_bone(x * (1 - metal), hu_max), (titanium * metal).expand_as(x)
            return physics.polychromatic([project(part) for part in parts], mu)

        scene = partial(_without, mask=physics.beside(pin, trained.data.image_size))
        yield Condition("titanium, mm", diameter, trained, perturbation=with_metal, scene=scene, needs_scale=True)


def _of_integrals(change: Callable[[Tensor], Tensor]) -> Perturbation:
    """A perturbation that changes the line integrals themselves."""
    return lambda x, project: change(project(x))


def _within_field(batch: Batch, width: int) -> Batch:
    """A batch whose truth is the middle of each object. The sinograms are still of the whole objects."""
    object_ = batch.get("fine", batch["image"])
    return {**batch, "fine": object_, "image": physics.cut(object_, width, batch["image"].shape[-1])}


def _without(batch: Batch, mask: Tensor) -> Batch:
    """A batch with pixels that are not scored."""
    return {**batch, "unscored": mask.to(batch["image"].device)}
