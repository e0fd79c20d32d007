"""What a scanner does and the simulation of training leaves out: functions from an object to its line integrals.

An object x is [B, 1, S, S], in the scaled attenuation of the slices: x = (HU + 1000)/(hu_max + 1000), at REFERENCE_KEV.
`project` is A: x → line integrals [B, 1, V, D] in value × mm. μ is the attenuation of x = 1 in 1/mm. None of them adds
noise: it is drawn afterwards, from what they return.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate, max_pool2d, pad

Project = Callable[[Tensor], Tensor]

REFERENCE_KEV = 70.0
MATERIALS = ("water", "bone", "titanium")
ATTENUATION_AT_REFERENCE = (0.1929, 0.2570, 0.5361)  # cm²/g of the materials at 70 keV, source as below
TITANIUM_DENSITY = 4.506  # g/cm³
SPECTRUM_120_KV = (
    # keV, share of the photons, then cm²/g of water, cortical bone (ICRU 44) and titanium
    (27.2, 0.0327, 0.4390, 1.7272, 6.6041),
    (35.5, 0.1329, 0.3022, 0.8737, 3.0770),
    (45.0, 0.1769, 0.2435, 0.5181, 1.6015),
    (56.1, 0.2438, 0.2127, 0.3487, 0.9035),
    (65.2, 0.1597, 0.1985, 0.2807, 0.6293),
    (74.8, 0.0925, 0.1881, 0.2386, 0.4647),
    (84.7, 0.0711, 0.1801, 0.2113, 0.3625),
    (94.7, 0.0501, 0.1737, 0.1931, 0.2976),
    (104.4, 0.0300, 0.1684, 0.1801, 0.2544),
    (113.4, 0.0101, 0.1642, 0.1711, 0.2263),
)
"""A tungsten tube at 120 kV: SpekPy 2.5.4 (Poludniowski et al. 2021), anode angle 12°, 6 mm of aluminium, in steps of
10 keV, each at its mean energy. Attenuations: the tables of Elam, Ravel and Sieber 2002, as in XrayDB 4.5.8. Ten lines
give the integrals of 0.5 keV steps within 0.3 %, through 40 cm of water or 8 cm of bone."""


def polychromatic(
    integrals: Sequence[Tensor], mu: float, spectrum: Sequence[Sequence[float]] = SPECTRUM_120_KV
) -> Tensor:
    """Line integrals that a detector sees in a beam of many energies, after the scanner's correction for water.

    −log Σ w(E) exp(−Σ_m μ_m(E)/μ_m(70 keV) · μ p_m)/μ, where the detector adds up energy, so w is photons × energy.
    The correction takes the value for the water that would give it, as scanners do. Water alone is then exact, and
    what bone and metal harden beyond it stays.

    Args:
        integrals: p_m of the materials of `MATERIALS`, or of the first ones, in value × mm.
        mu: attenuation of x = 1 in 1/mm.
        spectrum: lines of energy, photons, and the attenuation of each material.
    """
    table = np.asarray(spectrum)
    n_materials = table.shape[1] - 2
    weights = table[:, 0] * table[:, 1]
    weights /= weights.sum()  # of the energies in the signal
    ratios = table[:, 2:] / np.asarray(ATTENUATION_AT_REFERENCE)[:n_materials]  # [E, M], over those at 70 keV
    of_materials = torch.stack([p.double().cpu() for p in integrals], -1)  # [B, 1, V, D, M]
    depths_of_energies = torch.einsum("...m, em -> ...e", of_materials, torch.from_numpy(ratios[:, : len(integrals)]))
    signal = torch.exp(-mu * depths_of_energies) @ torch.from_numpy(weights)
    hardened = -signal.log().numpy()
    # Of water, on a grid that reaches the largest value: no energy is attenuated less than by the smallest ratio.
    depths = np.linspace(0, max(hardened.max(), 0) / ratios[:, 0].min() + 1e-6, 20_000)
    of_water = -np.log((weights * np.exp(-np.outer(depths, ratios[:, 0]))).sum(1))
    return torch.from_numpy(np.interp(hardened, of_water, depths) / mu).to(integrals[0])


def water_and_bone(x: Tensor, hu_max: float) -> tuple[Tensor, Tensor]:
    """An object as the sum of water and bone: up to 100 HU all water, from 1000 HU all bone, linear between."""
    hu = x * (hu_max + 1000) - 1000
    bone = x * ((hu - 100) / 900).clamp(0, 1)
    return x - bone, bone


def constant_scatter(p: Tensor, fraction: float, mu: float) -> Tensor:
    """The same scattered intensity in all bins, as a fraction of the open beam: −log(exp(−μ p) + fraction)/μ."""
    return -torch.log(torch.exp(-mu * p) + fraction) / mu


def smooth_scatter(p: Tensor, fraction: float, mu: float, width: float) -> Tensor:
    """Scatter of the body itself: `fraction` times μ p·exp(−μ p), smoothed along the bins.

    The forward scatter of a ray is that of its path, attenuated (Ohnesorge et al. 1999). `width`: standard deviation of
    the Gaussian in bins. Beyond the detector its last bin goes on.
    """
    radius = math.ceil(3 * width)
    offsets = torch.arange(-radius, radius + 1, dtype=p.dtype, device=p.device)
    kernel = torch.exp(-0.5 * (offsets / width) ** 2)
    primary = torch.exp(-mu * p)
    source = pad(mu * p * primary, (radius, radius, 0, 0), mode="replicate")
    scattered = torch.nn.functional.conv2d(source, (kernel / kernel.sum())[None, None, None])
    return -torch.log(primary + fraction * scattered) / mu


def crosstalk(p: Tensor, share: float, mu: float) -> Tensor:
    """Each bin gives this share of its intensity to each of its two neighbours; what leaves the detector comes back."""
    intensity = pad(torch.exp(-mu * p), (1, 1, 0, 0), mode="replicate")
    mixed = (1 - 2 * share) * intensity[..., 1:-1] + share * (intensity[..., :-2] + intensity[..., 2:])
    return -torch.log(mixed) / mu


def moving(x: Tensor, project: Project, pixels: float, n_positions: int = 8) -> Tensor:
    """An object that moves to the right by so many pixels during the scan, evenly, in some steps.

    Its mean position is that of x, which the reconstruction is compared with.
    """
    parts: list[Tensor] = []
    for k in range(n_positions):
        y = project(shifted(x, pixels * ((k + 0.5) / n_positions - 0.5)))
        views = torch.arange(y.shape[2]) * n_positions // y.shape[2]
        parts.append(y[:, :, views == k])
    return torch.cat(parts, 2)


def shifted(x: Tensor, pixels: float) -> Tensor:
    """An image moved to the right by so many pixels, linear between them; air comes in."""
    theta = torch.tensor([[[1, 0, -2 * pixels / x.shape[-1]], [0, 1, 0]]], dtype=x.dtype, device=x.device)
    grid = affine_grid(theta.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x, grid, align_corners=False)


def disc(size: int, diameter: float, centre: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    """1 inside of a disc, 0 outside, a part in pixels on its rim: [1, 1, S, S].

    In pixels; `centre` is from the middle to the right and down.
    """
    place = torch.arange(size) - (size - 1) / 2
    distance = torch.hypot(place[:, None] - centre[1], place - centre[0])
    return (diameter / 2 + 0.5 - distance).clamp(0, 1)[None, None]


def beside(mask: Tensor, size: int) -> Tensor:
    """Pixels of a grid of `size` with something of a mask in them, or next to one that has: bool [1, 1, size, size]."""
    coarse = max_pool2d(mask, mask.shape[-1] // size)
    return max_pool2d(coarse, 3, stride=1, padding=1) > 0


def cut(x: Tensor, width: int, size: int) -> Tensor:
    """The middle `width` pixels of an image, on a grid of `size`."""
    edge = (x.shape[-1] - width) // 2
    middle = x[..., edge : edge + width, edge : edge + width]
    return interpolate(middle, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
