"""What a trained network gets on another scan than its own: when, and that it does what it says."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qnmixer.errors import ConfigError
from qnmixer.models.data_term import safe_step_size
from qnmixer.models.total_variation import TotalVariation
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.reconstruction.cures import (
    CuredLoop,
    Cures,
    Scans,
    at_image,
    chebyshev_steps,
    put_on,
    spread_steps,
)
from qnmixer.reconstruction.reconstructor import Reconstructor, on_scan

from ..conftest import config_of

TRAINED = FanBeamGeometry.paper(16, image_size=64)


class Descent(UnrolledNetwork[Tensor]):
    """Some iterations of steps along the data term only, each of several λ."""

    def __init__(self, projector: FanBeamProjector, relative: list[float], n_iterations: int = 2) -> None:
        super().__init__(n_iterations)
        self.projector = projector
        steps = torch.tensor(relative) * safe_step_size(projector, "fbp")
        self.step_sizes = nn.ParameterList([steps.clone() for _ in range(n_iterations)])

    def step(self, t: int, y: Tensor, state: Tensor) -> Tensor:
        for step in self.step_sizes[t]:
            state = state - step * self.projector.filtered_residual(state, y)
        return state


@pytest.fixture(scope="module")
def projectors() -> dict[str, FanBeamProjector]:
    """Scans at 64 × 64: that of a training with 16 views, and others."""
    scans = {f"{n_views} views": FanBeamGeometry.paper(n_views, image_size=64) for n_views in (6, 8, 32)}
    scans |= {"trained": TRAINED, "150°": replace(TRAINED, angle_span=math.radians(150))}
    return {name: FanBeamProjector(scan) for name, scan in scans.items()}


def disc(*radii: float) -> Tensor:
    """Discs at 64 × 64, [B, 1, 64, 64]."""
    y, x = torch.meshgrid(*[torch.arange(64.0) - 31.5] * 2, indexing="ij")
    return torch.stack([((x - 4) ** 2 + y**2 < radius**2) / 3.0 for radius in radii])[:, None]


@pytest.mark.parametrize(("n", "total"), [(1, 1.7), (2, 5.0), (4, 8.9), (4, 9.94), (4, 31.0), (7, 20.0), (64, 200.0)])
def test_steps_of_any_number_keep_their_sum_and_no_eigenvector_grows(n: int, total: float) -> None:
    steps = chebyshev_steps(n, total)
    factors = 1 - steps * torch.linspace(0, 1, 4001, dtype=torch.float64)[:, None]
    assert float(steps.sum()) == pytest.approx(total, rel=1e-9)
    assert float(factors.prod(1).abs().max()) <= 1 + 1e-9
    assert float(factors.cumprod(1).abs().max()) < 1 + total / n  # nor does much in the first steps of many
    if n > 1 and total > 2 * n:
        assert abs(1 - total / n) ** n > 1  # equal steps do


def test_no_eigenvector_grows_on_a_scan(projectors: dict[str, FanBeamProjector]) -> None:
    """Through the real A†A: its largest eigenvector, by power iteration, with y = 0."""
    projector = projectors["8 views"]
    x = torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(0)) - 0.5
    for _ in range(40):
        x = projector.filtered_adjoint(projector(x))
        x = x / x.norm()
    y = torch.zeros(1, 1, 8, 512)
    network, single, stable = (Descent(projector, steps) for steps in ([2.3] * 4, [2.3], [1.9] * 4))
    with torch.no_grad():
        assert network.step(0, y, x).norm() > 2.5
        assert spread_steps(network) == pytest.approx(1.3**4, rel=1e-3)
        assert network.step(0, y, x).norm() < 1
        assert float(network.step_sizes[0].sum()) == pytest.approx(9.2 * safe_step_size(projector, "fbp"))
        spread_steps(single)  # one step cannot be spread
        assert float(single.step_sizes[0]) == pytest.approx(2 * safe_step_size(projector, "fbp"))
        before = [steps.clone() for steps in stable.step_sizes]
        assert spread_steps(stable) == pytest.approx(1)
        assert all(map(torch.equal, before, stable.step_sizes))


@pytest.mark.parametrize(("scan", "at_tv", "passes"), [
    ("trained", False, 1), ("8 views", False, 4), ("6 views", True, 2), ("32 views", False, 1), ("150°", True, 2),
])  # fmt: skip
def test_the_scan_says_when(scan: str, at_tv: bool, passes: int, projectors: dict[str, FanBeamProjector]) -> None:
    network = Descent(projectors[scan], [1.0])
    line, loop = put_on(network, projectors["trained"]), network.loop
    assert ("start=tv" in line, "passes=auto" in line) == (at_tv, passes > 1)
    if not at_tv and passes == 1:
        assert (line, loop) == ("", UnrolledNetwork.run)
    else:
        assert isinstance(loop, CuredLoop)
        assert (loop.starts_at_tv, loop.passes, loop.while_it_falls, loop.share) == (at_tv, passes, not at_tv, 0)


def test_a_network_of_many_scans_holds_between_them(projectors: dict[str, FanBeamProjector]) -> None:
    """Nothing is put on it there. Beyond them it is as another network with the nearest scan."""
    scans = Scans(views=[8, 16], arcs=[150, 360])
    for scan in ("trained", "8 views", "150°"):
        network = Descent(projectors[scan], [1.9, 1.9])
        assert put_on(network, projectors["trained"], scans=scans) == ""
    assert "passes=auto" in put_on(Descent(projectors["6 views"], [1.0]), projectors["trained"], scans=scans)
    assert "start=tv" in put_on(Descent(projectors["6 views"], [1.0]), projectors["trained"])


@torch.no_grad()
def test_each_image_has_passes_while_its_residual_falls(projectors: dict[str, FanBeamProjector]) -> None:
    """Slow descent comes nearer in each pass, but not to an empty sinogram; steps that are too long go away."""
    y = projectors["8 views"](disc(0, 10))
    slow, diverging = (Descent(projectors["8 views"], [step]) for step in (0.3, 2.5))
    images = [slow(y)]
    for _ in range(3):
        images.append(slow.run(range(2), y, images[-1]))
    first = diverging(y)
    put_on(slow, projectors["trained"])
    tv = TotalVariation(projectors["8 views"], 10, 1e-3, gap=0)
    diverging.loop = CuredLoop(diverging.loop, 4, True, tv, starts_at_tv=False)
    cured = slow(y)
    assert torch.equal(cured[0], images[0][0])
    torch.testing.assert_close(cured[1], images[3][1])
    assert float((cured[1] - images[2][1]).abs().max()) > 1e-4
    torch.testing.assert_close(diverging(y), first)
    torch.testing.assert_close(cured, torch.cat([slow(part) for part in y.split(1)]))


NETWORKS = [
    ["model=qn_mixer_small", "model.channels=8"], ["model=learn", "model.channels=4"],
    ["model=learn_pp", "model.channels=4"], ["model=learned_primal_dual", "model.channels=4"],
    ["model=regformer", "model.channels=12"], ["model=itnet", "model.channels=4", "model.depth=1"],
]  # fmt: skip
SCAN = ["experiment=demo", "data.image_size=16", "geometry.n_views=16", "geometry.n_detectors=32"]


@pytest.mark.parametrize("words", NETWORKS)
@torch.no_grad()
def test_every_unrolled_network_starts_at_an_image(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    trained = Reconstructor(config_of(*SCAN, *words, "model.n_iterations=2"))
    network = on_scan(trained, trained.config, Cures(passes=2, start="tv", mix=0.25)).network
    said = capsys.readouterr().out
    assert "start=tv: 400 iterations of TV come first; passes=2: 2 times 2 iterations; mix=0.25: 25%" in said
    y = trained.projector(torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0)))
    loop: Any = network.loop
    loop.tv.n_iterations = 5
    tv_image = image = loop.tv(y)
    for _ in range(2):
        image = network.image(network.run(range(2), y, at_image(network.start(y), image)))
    image = 0.75 * image + 0.25 * tv_image
    torch.testing.assert_close(network(y), image)
    torch.testing.assert_close(network.iterates(y)[-1], image)  # one iteration at a time
    assert torch.equal(on_scan(trained, trained.config).network(y), trained(y))  # bit for bit


def test_a_u_net_has_no_start(capsys: pytest.CaptureFixture[str]) -> None:
    trained = Reconstructor(config_of(*SCAN, "model=fbpconvnet", "model.channels=4"))
    on_scan(trained, trained.config, Cures(passes=3))
    assert capsys.readouterr().out == "FBPConvNet has no start: passes, start and mix change nothing\n"


@pytest.mark.parametrize(
    ("choice", "word"), [({"passes": 0}, "passes=0"), ({"start": "cg"}, "start=cg"), ({"mix": 2}, "mix=2")]
)
def test_a_choice_that_there_is_not(choice: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Cures(**choice)
