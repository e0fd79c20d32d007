"""A, Aᵀ and FBP of deepinv and of ASTRA, by the names of our projector, for the same scan."""

import importlib
import importlib.util
import math
import sys
import types
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec

import numpy as np
import torch
from torch import Tensor, nn

from qnmixer.physics import FanBeamGeometry, FanBeamProjector


class DeepInv(nn.Module):
    """`deepinv.physics.Tomography` with the same fan beam. Its A sums samples a pixel apart, so mm are a factor.

    It does not weight slanted rays. Where it pads an image by an odd number, as at 64² and 256², the image is half a
    pixel off the axis. Both are left as they are: the table says how far its A is from ours.
    """

    def __init__(self, geometry: FanBeamGeometry) -> None:
        super().__init__()
        from deepinv.physics import Tomography  # type: ignore[import-not-found]  # an optional extra

        self.geometry = geometry
        scan = {
            "pixel_spacing": geometry.pixel_size, "source_radius": geometry.source_to_axis,
            "detector_radius": geometry.axis_to_detector, "n_detector_pixels": geometry.n_detectors,
            "detector_spacing": geometry.detector_pitch,
        }  # fmt: skip
        angles = torch.from_numpy(np.rad2deg(geometry.angles()) + 90).float()  # its source starts at the left
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # how it builds its grids
            self.physics = Tomography(angles, geometry.image_size, normalize=False, fan_beam=True, fan_parameters=scan)

    def forward(self, x: Tensor) -> Tensor:
        """A x."""
        return self.physics.A(x).mT * self.geometry.pixel_size

    def adjoint(self, y: Tensor) -> Tensor:
        """Aᵀ y."""
        return self.physics.A_adjoint(y.mT * self.geometry.pixel_size)

    def fbp(self, y: Tensor) -> Tensor:
        """Its FBP."""
        return self.physics.fbp(y.mT / self.geometry.pixel_size)


class Astra(nn.Module):
    """ASTRA on the CPU, along lines, image by image. It has no FBP of a fan there: a ramp by torch, then Aᵀ."""

    def __init__(self, geometry: FanBeamGeometry) -> None:
        super().__init__()
        import astra  # type: ignore[import-not-found]  # an optional extra

        self.geometry = geometry
        half = geometry.image_size * geometry.pixel_size / 2
        volume = astra.create_vol_geom(geometry.image_size, geometry.image_size, -half, half, -half, half)
        bins = geometry.detector_pitch, geometry.n_detectors, geometry.angles()
        scan = astra.create_proj_geom("fanflat", *bins, geometry.source_to_axis, geometry.axis_to_detector)
        operator = astra.OpTomo(astra.create_projector("line_fanflat", scan, volume))
        self.project, self.backproject = batched(operator.FP), batched(operator.BP)
        n = np.fft.fftfreq(2 * geometry.n_detectors, 1 / (2 * geometry.n_detectors))
        kernel = np.where(n % 2, -1 / (np.pi * np.where(n, n, 1)) ** 2, 0)
        kernel[0] = 1 / 4
        gain = math.pi / geometry.n_views / geometry.pixel_size**2
        self.register_buffer("ramp", torch.from_numpy(gain * np.fft.rfft(kernel).real).float())

    def forward(self, x: Tensor) -> Tensor:
        """A x."""
        return self.project(x)

    def adjoint(self, y: Tensor) -> Tensor:
        """Aᵀ y."""
        return self.backproject(y)

    def fbp(self, y: Tensor) -> Tensor:
        """Aᵀ after the ramp."""
        n = y.shape[-1]
        return self.adjoint(torch.fft.irfft(torch.fft.rfft(y, 2 * n) * self.ramp, 2 * n)[..., :n])


def batched(apply: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensor], Tensor]:
    """A function of arrays, image by image, as one of tensors."""
    return lambda x: torch.stack([torch.from_numpy(apply(one.contiguous().numpy())) for one in x[:, 0]])[:, None]


OPERATORS: dict[str, Callable[[FanBeamGeometry], nn.Module]] = {
    "ours": FanBeamProjector,
    "deepinv": DeepInv,
    "ASTRA": Astra,
}


def lacking(operator: str) -> str:
    """Why it cannot be measured here, "" if it can."""
    try:
        importlib.import_module({"ours": "qnmixer"}.get(operator, operator.lower()))
    except ImportError as error:
        return f"not installed ({error})"
    return ""


def stand_in_for_torchvision() -> None:
    """Let `import torchvision` succeed where it is missing: deepinv imports it, but its Tomography does not use it."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_StandIn())


class _StandIn:
    """Makes empty modules, any name of which is an empty class."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = _empty_class
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def _empty_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
