"""The measurement: x → A x + noise → y. Plain torch."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from qnmixer.data.batch import Batch
from qnmixer.errors import GeometryError
from qnmixer.physics import FanBeamGeometry, FanBeamProjector, KeyedNoise, NoNoise
from qnmixer.physics.projector import system_matrix
from qnmixer.physics.scan import ScanMatrix
from qnmixer.physics.sparse import apply_linear

# Training, validation and test draw their noise from different random streams.
STREAMS = {"train": 0, "val": 1, "test": 2}
_LARGEST = 8192  # pixels of a side, views and bins of a scan, as in `qnmixer.settings`


class Measurement(nn.Module):
    """A scan and its noise: x → A x + noise → y.

    Args:
        projector: A of the grid of the images.
        noise: None: none is added.
        seed: of the noise.
        overfit: validation draws the noise of training, because it has the same slices.
    """

    def __init__(
        self, projector: FanBeamProjector, noise: KeyedNoise | None = None, seed: int = 42, *, overfit: bool = False
    ) -> None:
        super().__init__()
        self.projector, self.noise, self.seed, self.overfit = projector, noise or NoNoise(), seed, overfit
        self._geometry = projector.geometry  # `at_scan` changes that of the projector
        self.fine_matrix: ScanMatrix | None = None  # A of the finer grid, from its first use on
        self.scans = nn.ModuleList()  # measurements of training steps with other scans, and at last a copy of this one
        self._half: FanBeamProjector | None = None

    def at_scan(self, number: int = -1) -> "Measurement":
        """The measurement of a scan of `scans`, by default that of this one. The projector becomes that of the scan.

        The network has the same projector. So it has this scan until the next call.
        """
        if not self.scans:
            return self
        measurement = cast(Measurement, self.scans[number])
        self.projector.become(measurement.projector)
        return measurement

    @torch.no_grad()
    def forward(self, batch: Batch, stream: str) -> Tensor:
        """The noisy sinogram y [B, 1, V, D] of a batch. A sample's noise does not depend on the batch, rank or device.

        A sinogram from the loader or from a scanner already has its noise. With fine images, y is simulated from them.
        Then no sinogram comes from the matrix that the network uses.
        """
        measurement = self.at_scan(int(batch["scan"][0]) if self.scans and "scan" in batch else -1)
        if "sinogram" in batch:
            return batch["sinogram"]
        return measurement.with_noise(measurement.project(batch["image"], batch.get("fine")), batch, stream)

    def with_noise(self, p: Tensor, batch: Batch, stream: str) -> Tensor:
        """Line integrals p [B, 1, V, D] with the noise of the samples of a batch."""
        if self.overfit and stream == "val":
            stream = "train"
        return self.noise(p, [(self.seed, STREAMS[stream], sample) for sample in batch["sample"].tolist()])

    @torch.no_grad()
    def residual(self, reconstruct: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
        """How well an image from every second view predicts the other views, [B], in units of their noise.

        sqrt(mean((A x − y)² / variance)) over the held-out rays of y [B, 1, V, D]: 1 is as good as their noise allows.
        So no truth is needed. The variance is that of `noise`; if it says none, it is the mean square of second
        differences along the bins. These have 6 times the variance of white noise, and hardly any of a smooth object.
        Only rays with a variance count.

        Args:
            reconstruct: y → x, by the projector of this measurement, such as a network. Meanwhile this projector is
                that of every second view, with a step size λ_t as near to its bound as in the whole scan.

        Raises GeometryError for a scan of one view.
        """
        self.at_scan()
        whole = copy.copy(self.projector)
        self.projector.become(self.half_scan().to(y.device))
        try:
            image = reconstruct(y[:, :, : 2 * self.projector.geometry.n_views : 2].contiguous())
        finally:
            self.projector.become(whole)
        variance = self.noise.variance(y)
        if not variance.any():
            variance = y.diff(n=2, dim=-1).square().mean((1, 2, 3), keepdim=True).div(6).expand_as(y)
        squares, variance = ((z[:, :, 1::2]) for z in ((self.projector(image) - y).square(), variance))
        counts = variance > 0
        shares = torch.where(counts, squares / variance.where(counts, 1), 0.0)
        return (shares.sum((1, 2, 3)) / counts.sum((1, 2, 3))).sqrt()

    def half_scan(self) -> FanBeamProjector:
        """The projector of every second view, for `residual`. It is built when it is first used."""
        if self._half is None:
            self._half = part_of(self.projector, 2)
        return self._half

    def project(self, image: Tensor, fine: Tensor | None = None) -> Tensor:
        """A x [B, 1, V, D] of images [B, 1, S, S], or of the same images on the finer grid [B, 1, f·S, f·S] if given.

        Images are projected one at a time. A product with more columns rounds differently, and the last bit can change
        the photon counts that the noise draws. The finer matrix (A only) is built when it is first used, and is not
        part of checkpoints.
        """
        if fine is None:
            return torch.cat([self.projector(x) for x in image.split(1)])
        if self.fine_matrix is None:
            self.fine_matrix = matrix_at(self._geometry, fine.shape[-1])
        matrix = self.fine_matrix.to(fine.device)
        return torch.cat([apply_linear(x, matrix, matrix.transpose) for x in fine.split(1)])


def scan_of(section: Mapping[str, Any], image_size: int) -> FanBeamGeometry:
    """The scan of a section `geometry`, for images of this size. Raises GeometryError if it is impossible."""
    keys = {key: value for key, value in section.items() if key not in ("name", "field_of_view", "fbp_filter")}
    if not all(0 < n <= _LARGEST for n in (image_size, keys["n_views"], keys["n_detectors"])):
        raise GeometryError(f"image_size, n_views or n_detectors is not in 1 to {_LARGEST}")
    if keys["first_angle"] is None:  # half a step between views
        keys["first_angle"] = 0.5 * keys["angle_span"] / keys["n_views"]
    try:
        return FanBeamGeometry(image_size=image_size, pixel_size=section["field_of_view"] / image_size, **keys)
    except GeometryError as error:  # it names its argument; in a config the group comes first
        raise GeometryError(f"geometry.{error}") from error


def part_of(projector: FanBeamProjector, n: int, k: int = 0) -> FanBeamProjector:
    """The projector of views k, k + n, k + 2n, … of a scan, with A† scaled to its step sizes.

    All parts have as many views: what n does not divide is left out at the end. Raises GeometryError for fewer than n.
    """
    geometry = projector.geometry
    n_views = geometry.n_views // n
    if not n_views:
        raise GeometryError(f"n_views={geometry.n_views}: a scan of so few views has none to hold out")
    span = geometry.angle_span if n_views * n == geometry.n_views else n_views * n * geometry.angle_step
    first = math.fmod(geometry.first_angle + k * geometry.angle_step, 2 * math.pi)
    scan = replace(geometry, n_views=n_views, angle_span=span, first_angle=first)
    part = FanBeamProjector(scan, projector.fbp_filter)
    part.scale_filtered_adjoint(projector.safe_step_size())
    return part


def matrix_at(geometry: FanBeamGeometry, image_size: int) -> ScanMatrix:
    """Build A of a scan for images of another size that cover the same field."""
    pixel_size = geometry.pixel_size * geometry.image_size / image_size
    return system_matrix(replace(geometry, image_size=image_size, pixel_size=pixel_size))
