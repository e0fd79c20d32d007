import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import qnmixer
from qnmixer.measurement.build import build_network, build_noise, build_projector
from qnmixer.models import TotalVariation
from qnmixer.module.base import RunModule
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.reconstruction.cures import outside_of_training
from qnmixer.reconstruction.reconstructor import Reconstructor, on_scan

from ..conftest import config_of
from ..saved import save

SCAN = ["experiment=demo", "data.image_size=16", "geometry.n_views=16", "geometry.n_detectors=32"]


def largest_eigenvalue(projector: FanBeamProjector) -> float:
    """Of A†A, from the whole matrix."""
    size = projector.geometry.image_size
    basis = torch.eye(size**2).view(-1, 1, size, size)
    columns = projector.filtered_adjoint(projector(basis)).flatten(1)
    return float(torch.linalg.eigvalsh(columns.double()).max())


def step_sizes(module: Reconstructor | RunModule) -> Tensor:
    return torch.cat([step_size.detach().flatten() for step_size in module.network.step_sizes])


@pytest.mark.parametrize(("words", "change"), [
    ("model=qn_mixer_small model.channels=8", {"n_views": 10}),
    ("model=qn_mixer_small model.channels=8", {"angle_span": 2.0}),
    ("model=qn_mixer_small model.channels=8", {"fbp_filter": "hann"}),
    ("model=qn_mixer_small model.channels=8 model.shared_step_size=true", {"n_views": 10}),
    ("model=learn model.channels=4 model.data_term=fbp", {"angle_span": 2.0}),
    ("model=learn_pp model.channels=4 model.data_term=fbp", {"fbp_filter": "hann"}),
    ("model=regformer model.channels=12", {"n_views": 10}),
    ("model=itnet model.channels=4 model.depth=1", {"angle_span": 2.0}),
])  # fmt: skip
def test_step_sizes_follow_the_scan(words: str, change: dict, capsys: pytest.CaptureFixture[str]) -> None:
    """λ of a trained network stays the same part of 2/ρ(A†A), for every network with steps along FBP."""
    trained = Reconstructor(config_of(*SCAN, "model.n_iterations=2", *words.split()))
    with torch.no_grad():
        for step_size in trained.network.step_sizes:
            step_size.fill_(0.3)
    scanned = on_scan(trained, trained.config.changed(geometry=trained.config.geometry.changed(**change)))
    radii = [largest_eigenvalue(module.projector) for module in (trained, scanned)]
    assert abs(radii[0] / radii[1] - 1) > 0.05
    torch.testing.assert_close(step_sizes(scanned) * radii[1], step_sizes(trained) * radii[0], rtol=1e-3, atol=0)
    others = trained.state_dict().keys() - {name for name in trained.state_dict() if "step_sizes" in name}
    assert all(torch.equal(trained.state_dict()[name], scanned.state_dict()[name]) for name in others)
    line, *_ = capsys.readouterr().out.splitlines()  # next, what cures it gets
    key, value = next(iter(change.items()))
    assert f"geometry.{key}=" in line
    assert f"not {value}" in line
    assert f"{radii[0] / radii[1]:.3f}"[:4] in line


FULL = FanBeamGeometry.paper(64)
SHORT, PARALLEL = replace(FULL, angle_span=math.radians(120)), replace(FULL, beam="parallel")


@pytest.mark.parametrize(("scan", "trained", "why"), [
    (replace(FULL, n_views=29), FULL, ""),
    (replace(FULL, n_views=28), FULL, "its 28 views are fewer than 0.45 times the 64 of the training"),
    (replace(FULL, n_views=128), FULL, ""),
    (replace(FULL, angle_span=math.radians(219)), FULL, ""),
    (replace(FULL, angle_span=-math.radians(218)), FULL, "its arc of 218° is shorter than 218.9°, 180° plus"),
    (replace(PARALLEL, angle_span=math.pi), PARALLEL, ""),
    (replace(PARALLEL, angle_span=3.0), PARALLEL, "its arc of 171.9° is shorter than 180°, 180° plus the fan"),
    (SHORT, SHORT, ""),  # it learned to do without the missing lines
    (replace(SHORT, angle_span=2.0), SHORT, "its arc of 114.6° is shorter than 120°, that of the training"),
    (FULL, SHORT, ""),
])  # fmt: skip
def test_where_a_network_holds_follows_from_scans(scan: FanBeamGeometry, trained: FanBeamGeometry, why: str) -> None:
    reason = outside_of_training(scan, trained)
    assert reason.startswith(why)
    assert bool(reason) == bool(why)


def test_who_loads_a_network_for_such_a_scan_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is computed. Total variation, which has no weights, holds anywhere."""
    for model in (["model=learn", "model.n_iterations=1", "model.channels=2"], ["model=tv", "model.n_iterations=1"]):
        run = save(tmp_path / model[0], *SCAN, *model)
        for views, arc in ((16, 2.0), (7, None), (8, None)):
            qnmixer.load_pretrained(run, n_views=views, **({} if arc is None else {"angle_span": arc}))
            outside = "this scan is outside of where the network holds: its " in capsys.readouterr().out
            assert outside == (model[0] == "model=learn" and views != 8)


@pytest.mark.parametrize(("words", "change"), [
    ("model=learn model.data_term=adjoint model.n_iterations=2", {"n_views": 10}),
    ("model=fbpconvnet", {"n_views": 10}),
    ("model=qn_mixer_small model.n_iterations=2", {"first_angle": torch.pi / 16, "name": "other"}),  # the same angle
])  # fmt: skip
def test_on_its_own_scan_or_where_it_has_its_scale_a_network_stays_bit_for_bit(
    words: str, change: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = Reconstructor(config_of(*SCAN, "model.channels=4", *words.split()))
    scanned = on_scan(trained, trained.config.changed(geometry=trained.config.geometry.changed(**change)))
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), scanned.parameters(), strict=True))
    lines = ["the network was trained with geometry.n_views=16, not 10"] * ("n_views" in change)
    assert capsys.readouterr().out.splitlines()[:1] == lines
    assert (scanned.projector is trained.projector) == (lines == [])


def test_total_variation_knows_the_noise_that_slices_get_now() -> None:
    """Also that of an evaluation, which may be another than the config began with."""
    config, quiet = (config_of("experiment=demo", "model=tv", f"noise={it}") for it in ("physical", "none"))
    network = build_network(config, build_projector(config))
    assert isinstance(network, TotalVariation)
    y = torch.full((1, 1, 2, 3), 50.0)
    assert torch.equal(network.variance(y), build_noise(config).variance(y))
    config.noise = quiet.noise
    assert not network.variance(y).any()
