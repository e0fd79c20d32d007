"""Each perturbation against a closed form or published values."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer_studies.robustness.perturbations import (
    ATTENUATION_AT_REFERENCE,
    SPECTRUM_120_KV,
    TITANIUM_DENSITY,
    beside,
    constant_scatter,
    crosstalk,
    cut,
    disc,
    moving,
    polychromatic,
    shifted,
    smooth_scatter,
    water_and_bone,
)

MU = 0.0576  # 1/mm of x = 1, if that is 2000 HU
RAYS = torch.linspace(0, 120, 24, dtype=torch.float64).view(1, 1, 2, 12)


def flat(value: float) -> Tensor:
    return torch.full((1, 1, 3, 20), value, dtype=torch.float64)


# NIST XCOM (Hubbell and Seltzer 1995), cm²/g: water, ICRU-44 cortical bone, titanium
NIST = {
    30: (0.3756, 1.331, 4.972), 40: (0.2683, 0.6655, 2.214), 50: (0.2269, 0.4242, 1.213), 60: (0.2059, 0.3148, 0.7661),
    80: (0.1837, 0.2229, 0.4052), 100: (0.1707, 0.1855, 0.2721),
}  # fmt: skip


def test_the_attenuations_of_the_spectrum_are_those_of_nist() -> None:
    """From another table than the one that it was made from."""
    energies, published = np.log([*NIST]), np.log([*NIST.values()])
    for energy, _, *ours in [(70.0, 1.0, *ATTENUATION_AT_REFERENCE), *SPECTRUM_120_KV]:
        if 30 <= energy <= 100:
            of_nist = [math.exp(np.interp(math.log(energy), energies, column)) for column in published.T]
            assert ours == pytest.approx(of_nist, rel=0.03)  # the interpolation is 2 % high between lines
    assert sum(line[1] for line in SPECTRUM_120_KV) == pytest.approx(1, abs=0.005)


def test_water_is_exact_after_the_correction_and_bone_is_hardened() -> None:
    torch.testing.assert_close(polychromatic([RAYS], MU), RAYS, rtol=1e-5, atol=1e-5)
    bone = polychromatic([0 * RAYS, RAYS], MU)
    thin = polychromatic([0 * RAYS, RAYS / 1e4], MU) * 1e4
    assert (bone / RAYS)[0, 0, 1, -1] < 0.9 * (thin / RAYS)[0, 0, 1, -1]
    weights = np.array([energy * photons for energy, photons, *_ in SPECTRUM_120_KV])
    means = (weights[:, None] * np.array([line[2:] for line in SPECTRUM_120_KV])).sum(0) / weights.sum()
    expected = means[1] / means[0] * ATTENUATION_AT_REFERENCE[0] / ATTENUATION_AT_REFERENCE[1]  # to first order
    assert (thin / RAYS)[0, 0, 1, -1].item() == pytest.approx(expected, rel=1e-3)


def test_a_beam_of_two_energies_by_hand() -> None:
    spectrum = [(50.0, 2.0, 0.2269, 0.4242), (100.0, 1.0, 0.1707, 0.1855)]  # equal weights, as 50 · 2 = 100 · 1
    water, bone = 30.0, 10.0
    (low, high) = (
        0.5 * math.exp(-MU * (water * w / ATTENUATION_AT_REFERENCE[0] + bone * b / ATTENUATION_AT_REFERENCE[1]))
        for _, _, w, b in spectrum
    )
    (corrected,) = polychromatic([flat(water), flat(bone)], MU, spectrum).unique()
    ratios = [line[2] / ATTENUATION_AT_REFERENCE[0] for line in spectrum]
    again = sum(0.5 * math.exp(-MU * corrected.item() * ratio) for ratio in ratios)  # the water that looks the same
    assert again == pytest.approx(low + high, rel=1e-6)


def test_one_energy_changes_nothing() -> None:
    spectrum = [(70.0, 1.0, *ATTENUATION_AT_REFERENCE)]
    mixed = polychromatic([RAYS, RAYS / 2, RAYS / 3], MU, spectrum)
    torch.testing.assert_close(mixed, RAYS * (1 + 1 / 2 + 1 / 3), rtol=1e-5, atol=1e-5)


def test_soft_tissue_is_water_and_dense_bone_is_bone() -> None:
    hu = torch.tensor([-1000.0, 0, 100, 550, 1000, 1800])
    water, bone = water_and_bone((hu + 1000) / 3000, 2000)
    torch.testing.assert_close(water + bone, (hu + 1000) / 3000)
    torch.testing.assert_close(bone / (water + bone).clamp_min(1e-9), torch.tensor([0, 0, 0, 0.5, 1, 1]))


def test_constant_scatter_of_a_flat_object() -> None:
    expected = -math.log(math.exp(-MU * 80) + 0.01) / MU
    torch.testing.assert_close(constant_scatter(flat(80), 0.01, MU), flat(expected))
    deep = constant_scatter(flat(1e4), 0.01, MU)
    torch.testing.assert_close(deep, flat(-math.log(0.01) / MU))  # nothing else arrives


def test_smooth_scatter_of_a_flat_object_and_of_one_ray() -> None:
    expected = 80 - math.log(1 + 0.1 * MU * 80) / MU
    torch.testing.assert_close(smooth_scatter(flat(80), 0.1, MU, 3.0), flat(expected))
    p = flat(0)
    p[..., 10] = 1 / MU
    scattered = torch.exp(-MU * smooth_scatter(p, 0.1, MU, 1.5)) - torch.exp(-MU * p)
    bins = np.arange(20) - 10
    gauss = np.exp(-0.5 * (bins / 1.5) ** 2) * (abs(bins) <= 5)
    assert scattered[0, 0, 0].numpy() == pytest.approx(0.1 / math.e * gauss / gauss.sum(), abs=1e-12)


def test_crosstalk_is_a_matrix_that_keeps_the_sum() -> None:
    p = 50 * torch.rand(1, 1, 3, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mixing = np.eye(20) * 0.9 + 0.05 * (np.eye(20, k=1) + np.eye(20, k=-1))
    mixing[0, 0] = mixing[-1, -1] = 0.95
    intensity = torch.exp(-MU * p)
    mixed = torch.exp(-MU * crosstalk(p, 0.05, MU))
    torch.testing.assert_close(mixed, intensity @ torch.from_numpy(mixing).T)
    torch.testing.assert_close(mixed.sum(-1), intensity.sum(-1))


def scan(n_views: int = 16, span: float = 2 * math.pi) -> FanBeamProjector:
    return FanBeamProjector(FanBeamGeometry(64, 4.0, n_views, 96, 4.0, 500.0, 250.0, angle_span=span))


def test_a_disc_moves_as_its_centre_does() -> None:
    """The mean bin of a view is where the centre's ray meets the detector: tan γ = (d cos β)/(R + d sin β)."""
    projector = scan()
    geometry = projector.geometry
    y = moving(disc(64, 16.0), projector, 8.0)
    measured = ((y * torch.from_numpy(geometry.bin_positions()).float()).sum(-1) / y.sum(-1))[0, 0]
    beta = geometry.angles()
    d = 4.0 * 8.0 * ((np.arange(16) // 2 + 0.5) / 8 - 0.5)  # eight positions of two views
    expected = geometry.source_to_detector * d * np.cos(beta) / (geometry.source_to_axis - d * np.sin(beta))
    assert measured.numpy() == pytest.approx(expected, abs=0.35)  # mm; a bin is 4 mm
    torch.testing.assert_close(moving(disc(64, 16.0), projector, 0.0), projector(disc(64, 16.0)), rtol=1e-4, atol=1e-3)


def test_a_shift_by_whole_pixels_is_exact() -> None:
    x = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    moved = shifted(x, 3.0)
    torch.testing.assert_close(moved[..., 3:], x[..., :-3], rtol=1e-4, atol=1e-5)
    assert moved[..., :3].abs().max() < 1e-5


def test_a_metal_pin_is_as_thick_as_its_diameter_and_opaque() -> None:
    projector = scan()
    pin = disc(64, 10.0, (6.0, -4.0))
    assert pin.sum().item() == pytest.approx(math.pi * 25, rel=0.01)
    rows, columns = torch.nonzero(pin[0, 0], as_tuple=True)
    assert columns.double().mean().item() - 31.5 == pytest.approx(6.0)
    assert rows.double().mean().item() - 31.5 == pytest.approx(-4.0)
    assert projector(pin).amax().item() == pytest.approx(10 * 4.0, rel=0.03)
    # 0.5361 cm²/g × 4.506 g/cm³ = 0.2416/mm: NIST has 0.241 ± 1 % between its lines of 60 and 80 keV
    attenuation = ATTENUATION_AT_REFERENCE[2] * TITANIUM_DENSITY / 10
    assert attenuation == pytest.approx(0.241, rel=0.02)
    around = beside(torch.nn.functional.interpolate(pin, scale_factor=2), 64)[0, 0]
    assert around[rows, columns].all()
    assert around[rows, columns + 1].all()
    assert around.sum() < 2.5 * pin.sum()


def test_a_body_beyond_the_field_has_its_own_chord_and_fills_the_image() -> None:
    """A disc of 0.9 of the wide grid: the field of the image is 2/3 of it, inside the disc but for its corners."""
    wide = FanBeamProjector(FanBeamGeometry(96, 4.0, 16, 128, 4.0, 500.0, 250.0))
    body = disc(96, 0.9 * 96)
    assert wide(body).amax().item() == pytest.approx(0.9 * 96 * 4.0, rel=0.02)
    image = cut(body, 64, 32)
    assert image.shape == (1, 1, 32, 32)
    torch.testing.assert_close(image[..., 16, :], torch.ones(1, 1, 32), rtol=1e-4, atol=1e-4)
    ramp = torch.arange(96.0).expand(1, 1, 96, 96)
    torch.testing.assert_close(cut(ramp, 64, 32)[..., 5, 5], torch.tensor([[16 + 2 * 5 + 0.5]]), rtol=1e-4, atol=1e-3)
