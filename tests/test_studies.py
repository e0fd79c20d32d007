"""The scripts behind tables of the documents: notebooks/studies/*.py."""

import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
import torch

from qnmixer.evaluation.statistics import half_width
from qnmixer.models.data_term import back_projection
from qnmixer.physics import FanBeamGeometry, FanBeamProjector

from .pages import STUDIES
from .sets import integrals_of

sys.path.append(str(STUDIES))  # where Python looks for what a script imports from beside it
SCRIPTS = {path.stem: runpy.run_path(str(path)) for path in STUDIES.glob("*.py")}
SLICES = [("TV", [30.0, 32.0, 36.0, 40.0]), ("QN-Mixer", [33.0, 34.0, 38.0, 43.0])]
PATIENTS = ["1", "1", "2", ""]  # of the last slice nobody knows


@pytest.mark.parametrize("kind", ["fbp", "adjoint"])
def test_the_eigenvalues_are_those_of_the_dense_matrix(kind: str) -> None:
    projector = FanBeamProjector(FanBeamGeometry(16, 4.0, 6, 24, 5.0, 200.0, 100.0))
    images = torch.eye(256).view(256, 1, 16, 16)
    dense = back_projection(projector, kind, projector(images)).view(256, 256).double()
    expected = torch.linalg.eigvals(dense).real.sort(descending=True).values[:144].numpy()  # as many as rays
    assert SCRIPTS["data_term"]["eigenvalues"](projector)[kind] == pytest.approx(expected, abs=1e-4 * expected[0])


def test_patients_count_equally(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["number,slice,method,psnr,ssim,window_psnr,window_ssim,patient"]
    for method, psnrs in SLICES:
        pairs = zip(psnrs, PATIENTS, strict=True)
        lines += [f"{number},a,{method},{psnr},90,,80,{patient}" for number, (psnr, patient) in enumerate(pairs)]
    (tmp_path / "images.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "table.md").write_text("**Warning: one**\n\n**three patients**\n")
    values = SCRIPTS["patients"]["read_images"](tmp_path / "images.csv")
    assert values["TV"]["psnr"] == {"1": 31.0, "2": 36.0, "slice 3": 40.0}
    SCRIPTS["patients"]["main"](tmp_path)
    printed = capsys.readouterr().out

    def cell(*of_patients: float) -> str:
        half_width = 4.3027 * stdev(of_patients) / math.sqrt(3)  # t of 2 degrees of freedom
        return f"{mean(of_patients):.2f} ± {half_width:.2f}"

    expected = f"{cell(33.5, 38, 43)} | 90.00 ± 0.00 | {cell(2.5, 2, 3)}"
    assert f"| QN-Mixer | {expected} |" in printed
    assert "over 3 patients" in printed
    assert printed.startswith("**Warning: one**\n\n**three patients**\n\n|")


def test_every_arm_begins_at_its_parents_image() -> None:
    """And the paper's H, brought in, is H itself."""
    study, settings = SCRIPTS["curvature"], {"n_iterations": 3, "channels": 4, "detail_channels": 0, "data_steps": 1}
    torch.manual_seed(0)
    projector = FanBeamProjector(FanBeamGeometry(16, 4.0, 6, 24, 5.0, 200.0, 100.0))
    parent = study["FromZero"](projector, **settings, hessian="identity")
    for weight in parent.parameters():
        weight.data += 0.01 * torch.randn_like(weight)
    y = projector(torch.rand(2, 1, 16, 16))
    arms = {arm: study["branch"](parent, arm, settings | {"learned_trust": False}) for arm in study["ARMS"]}
    for arm, network in arms.items():
        study["bring_in"](arm, network, 0)
        torch.testing.assert_close(network(y), parent(y), rtol=0, atol=1e-6)
    study["bring_in"]("paper's H", arms["paper's H"], study["N_RAMP"])
    plain = study["FromZero"](projector, **settings, hessian="bfgs", learned_trust=False)
    plain.load_state_dict(parent.state_dict())
    torch.testing.assert_close(arms["paper's H"](y), plain(y), rtol=0, atol=1e-5)
    assert (plain(y) - parent(y)).abs().max() > 1e-3


def test_the_criterion_of_curvature() -> None:
    study = SCRIPTS["curvature"]
    d = [0.1 * k for k in range(-4, 6)]  # mean 0.05
    at_bound = [value - 0.05 + half_width(d) for value in d]  # its interval begins at 0, so p is 0.05
    assert study["p_value"](at_bound) == pytest.approx(0.05, abs=1e-4)
    assert study["holm"]({"a": 0.01, "b": 0.04, "c": 0.02}, 4) == pytest.approx({"a": 0.04, "c": 0.06, "b": 0.08})
    for shift, p, verdict in ((0.5, 0.01, "pays"), (0.5, 0.06, "not decided"), (0.0, 1.0, "not decided")):
        assert study["verdict"]([value + shift for value in d], p) == verdict
    assert study["verdict"]([value / 10 for value in d], 0.01) == "does not pay"
    assert study["verdict"](d[:9], 0.01).startswith("no verdict")


def test_matthews_correlation_is_that_of_pearson() -> None:
    """For two classes both are one number; the closed form of a square in a square is checked by hand."""
    rng = np.random.default_rng(0)
    truth, prediction = rng.random((2, 40, 40)) < [[[0.3]], [[0.4]]]
    prediction |= truth & (rng.random(truth.shape) < 0.7)
    matthews = SCRIPTS["htc"]["matthews"]
    assert matthews(prediction, truth) == pytest.approx(np.corrcoef(prediction.ravel(), truth.ravel())[0, 1])
    assert (matthews(truth, truth), matthews(~truth, truth), matthews(truth | True, truth)) == pytest.approx((1, -1, 0))
    half, quarter = (np.arange(8) < n for n in (4, 2))
    assert matthews(quarter, half) == pytest.approx((2 * 4 - 0) / math.sqrt(2 * 4 * 4 * 6))


def test_otsus_threshold_is_that_of_skimage() -> None:
    filters, rng = pytest.importorskip("skimage.filters"), np.random.default_rng(0)
    image = np.concatenate([rng.normal(0, 0.2, 3000), rng.normal(1, 0.3, 1000)])
    step = np.ptp(image) / 256
    assert SCRIPTS["htc"]["otsu"](image) == pytest.approx(filters.threshold_otsu(image), abs=step)


def test_a_scan_of_any_start_is_one_of_the_first_angle_and_a_turned_image() -> None:
    """A disc off the axis, whose line integrals are known: FBP of its scan from 0 on, turned, has it at its place."""
    (x, y), radius, start = (9.0, 4.0), 6.0, math.radians(50)
    geometry = FanBeamGeometry(48, 1.0, 60, 96, 1.0, 410.66, 143.08)
    chords = integrals_of([(x, y, radius, 1.0)], replace(geometry, first_angle=geometry.first_angle + start))
    fbp = FanBeamProjector(geometry).fbp(torch.from_numpy(chords.astype(np.float32))[None, None])
    image = SCRIPTS["htc"]["turned"](fbp[0, 0], start, 96).numpy()
    axis = (np.arange(96) - 47.5) / 2
    truth = np.hypot(axis - x, -axis[:, None] - y) < radius
    assert SCRIPTS["htc"]["matthews"](image > 0.5, truth) > 0.97


def test_a_scan_says_its_disc_and_the_curve_of_its_beam() -> None:
    """A solid disc off the axis, seen by a beam of two energies with photon noise."""
    geometry, centre, radius = FanBeamGeometry(64, 1.2, 61, 560, 0.2, 410.66, 143.08, angle_span=0.5), (1.0, -0.5), 34.8
    chords = integrals_of([(*centre, radius, 1.0)], geometry)
    counts = np.random.default_rng(0).poisson(4e4 * (np.exp(-0.03 * chords) + np.exp(-0.06 * chords)))
    disc = SCRIPTS["htc"]["disc_of"](-np.log(counts / 8e4) + 0.015, geometry.angles(), geometry)
    assert (*disc.centre, disc.radius) == pytest.approx((*centre, radius), abs=0.1)
    assert disc.air == pytest.approx(0.015, abs=1e-3)
    assert disc.photons == pytest.approx(8e4, rel=0.1)
    p = -np.log((np.exp(-0.03 * 25) + np.exp(-0.06 * 25)) / 2)
    assert disc.curve @ (p, p**2) == pytest.approx(25, abs=0.3)


def test_what_the_choice_without_truth_costs_and_where_a_search_of_weights_ends() -> None:
    names = SCRIPTS["without_truth"]
    assert names["cost_of_choice"]([(2.0, 30.0), (1.0, 29.5), (3.0, 31.0)]) == 1.5
    assert names["best_power"](lambda weight: -abs(math.log10(weight) - 2), 1.0) == pytest.approx(100)
