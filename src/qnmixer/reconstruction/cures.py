"""What helps a trained network on another scan than its own, without training: stable steps, a start at TV, passes.

They are put on from outside, in plain torch. At the scan of the training they do nothing, unless asked.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from qnmixer.errors import ConfigError
from qnmixer.models.data_term import safe_step_size
from qnmixer.models.total_variation import TotalVariation
from qnmixer.models.unrolled import UnrolledNetwork, at_image
from qnmixer.physics import FanBeamGeometry, FanBeamProjector

_OUTSIDE = (
    "this scan is outside of where the network holds: {}. Total variation is likely better: "
    "python -m qnmixer.robustness compares the two"
)
_MOST_PASSES, _PASSES_FROM_TV = 4, 2
"""TV is nearer to y than the network's images are. From there the residual rises, while the images still gain."""
_CHANGE = 0.01
"""Of ‖x‖: a pass that changes an image by less may lose a tenth of a dB though its residual falls (32 and 48 views)."""
_FEWEST_VIEWS = 0.45
"""Views as a share of those in training, below which total variation is better, and the better start."""
_TV_ITERATIONS = 400
_TV_WEIGHT = 7.2e-4
"""Times 1/√V: errors of y differ from view to view, so Aᵀ/‖A‖² makes them smaller by √V. With 64 views it is 9e-5."""


@dataclass(frozen=True)
class Cures:
    """What the user chooses, as in `conf/reconstruct.yaml`. Raises ConfigError for other values."""

    passes: int | Literal["auto"] = "auto"
    start: Literal["auto", "fbp", "tv"] = "auto"
    mix: float = 0.0

    def __post_init__(self) -> None:
        if self.passes != "auto" and not (isinstance(self.passes, int) and self.passes >= 1):
            raise ConfigError(f"passes={self.passes} must be auto, or a whole number from 1")
        if self.start not in ("auto", "fbp", "tv"):
            raise ConfigError(f"start={self.start} is not known: choose auto, fbp or tv")
        if not (isinstance(self.mix, int | float) and 0 <= self.mix <= 1):
            raise ConfigError(f"mix={self.mix} must be a share of total variation, from 0 to 1")


NO_CHOICE = Cures()


class Scans(NamedTuple):
    """What training steps drew, as data.views and data.arcs: numbers of views, and degrees."""

    views: Sequence[int] = ()
    arcs: Sequence[float] = ()

    def nearest(self, scan: FanBeamGeometry, trained: FanBeamGeometry) -> FanBeamGeometry:
        """The scan of training that is nearest to a scan. A network also holds between the scans that it has seen."""
        if not (self.views or self.arcs):
            return trained
        views, arcs = self.views or [trained.n_views], [math.radians(arc) for arc in self.arcs]
        shortest, longest = (pick(arcs or [abs(trained.angle_span)]) for pick in (min, max))
        n_views = min(max(scan.n_views, min(views)), max(views))
        span = min(max(abs(scan.angle_span), shortest), longest)
        span = math.copysign(span, trained.angle_span)
        return replace(trained, n_views=n_views, angle_span=span, first_angle=scan.first_angle)


ONE_SCAN = Scans()


def put_on(
    network: UnrolledNetwork[Any],
    trained: FanBeamProjector,
    cures: Cures = NO_CHOICE,
    variance: Callable[[Tensor], Tensor] = torch.zeros_like,
    scans: Scans = ONE_SCAN,
) -> str:
    """Put cures on a network, by its scan and those of its training. Returns a line on what they are and cost, or "".

    `variance`: of the noise, as for `TotalVariation`.
    """
    scan, T = network.projector.geometry, network.n_iterations
    nearest = scans.nearest(scan, trained.geometry)
    same = scan == nearest and network.projector.fbp_filter == trained.fbp_filter
    why = outside_of_training(scan, nearest)
    fewer = abs(scan.angle_step) > 1.001 * abs(nearest.angle_step)
    starts_at_tv = cures.start == "tv" or (cures.start == "auto" and bool(why))
    most = _PASSES_FROM_TV if starts_at_tv else _MOST_PASSES
    passes = cures.passes if cures.passes != "auto" else most if why or fewer else 1
    while_it_falls = cures.passes == "auto" and not starts_at_tv
    growth = 1.0 if same else spread_steps(network)
    words = [f"data steps spread: an eigenvector grew {growth:.2g} times in an iteration"] * (growth > 1)
    if not network.has_weights or T < 2 or ((starts_at_tv or passes > 1 or cures.mix) and not _has_start(network)):
        words += [f"{network.title} has no start: passes, start and mix change nothing"] * (cures != NO_CHOICE)
        starts_at_tv = False
    elif starts_at_tv or passes > 1 or cures.mix:
        weight = _TV_WEIGHT / math.sqrt(scan.n_views)
        tv = TotalVariation(network.projector, _TV_ITERATIONS, weight, gap=0, variance=variance)
        reason = f" ({why})" if cures.start == "auto" else ""
        words += [f"start=tv{reason}: {_TV_ITERATIONS} iterations of TV come first"] * starts_at_tv
        falls = "while |A x - y| falls, at most " * while_it_falls
        words += [f"passes={cures.passes}: {falls}{passes} times {T} iterations"] * (passes > 1)
        cost = "" if starts_at_tv else f", {_TV_ITERATIONS} iterations"
        words += [f"mix={cures.mix:g}: {cures.mix:.0%} of the image is that of TV{cost}"] * (cures.mix > 0)
        network.loop = CuredLoop(network.loop, passes, while_it_falls, tv, starts_at_tv, cures.mix)
    if why and network.has_weights and not starts_at_tv:
        words.append(_OUTSIDE.format(why))
    return "; ".join(words)


def outside_of_training(scan: FanBeamGeometry, trained: FanBeamGeometry) -> str:
    """Why a network is likely worse than total variation on another scan than that of its training, else "".

    It follows from the two scans alone: an arc that does not see each line, if that of the training is longer; and few
    views. The limits are measured: on the test patients of the shipped weights, 64 views in training, the network fell
    below total variation between 32 and 23 views, and by 6 dB on 150°. On 180° plus the fan angle it lost nothing.
    """
    needed, arc = min(scan.short_scan, abs(trained.angle_span)), abs(scan.angle_span)
    if arc < needed * (1 - 1e-6):
        whose = "180° plus the fan angle" if needed == scan.short_scan else "that of the training"
        return f"its arc of {math.degrees(arc):.4g}° is shorter than {math.degrees(needed):.4g}°, {whose}"
    if scan.n_views < _FEWEST_VIEWS * trained.n_views:
        return f"its {scan.n_views} views are fewer than {_FEWEST_VIEWS:g} times the {trained.n_views} of the training"
    return ""


@torch.no_grad()
def spread_steps(network: UnrolledNetwork[Any]) -> float:
    """Spread the data steps of an iteration, where an eigenvector of A†A grows in them. Returns by how much it grew.

    Steps λ_1 … λ_n multiply an eigenvector with the eigenvalue μ by p(μ) = Π (1 − λ_i μ). For small μ p depends on the
    sum of the steps only, so the sum stays. Of all p with this sum, Chebyshev's polynomial on [a, ρ] is smallest over
    [a, ρ], and below a it lies between 0 and 1. The sum sets a. With a = 0 it is 2n²/ρ, the largest with |p| ≤ 1: a
    larger sum is cut to it, which for one step is 2/ρ.
    """
    rho, growth = 1 / safe_step_size(network.projector, network.data_term), 1.0
    mu = torch.linspace(0, 1, 1001, dtype=torch.float64)[:, None]
    for steps in network.step_sizes:
        relative = steps.detach().cpu().double().flatten() * rho
        grown = float((1 - relative * mu).prod(1).abs().max())
        if grown > 1 + 1e-6:
            growth = max(growth, grown)
            steps.copy_((chebyshev_steps(len(relative), float(relative.sum())) / rho).view(steps.shape))
    return growth


def chebyshev_steps(n: int, total: float) -> Tensor:
    """n steps for eigenvalues in [0, 1], float64: one over Chebyshev's nodes on the [a, 1] that gives them this sum.

    They are in Leja's order: then what rounds in the first steps does not grow in the next.
    """
    cosines = ((2 * torch.arange(n, dtype=torch.float64) + 1) * math.pi / (2 * n)).cos()
    low, high = 0.0, 1.0  # of a: the sum falls from 2n² to n
    for _ in range(60):
        a = (low + high) / 2
        low, high = (a, high) if (2 / (1 + a + (1 - a) * cosines)).sum() > total else (low, a)
    nodes = (1 + low + (1 - low) * cosines) / 2
    order, distance = [0], torch.zeros_like(nodes)
    for _ in range(n - 1):
        distance += (nodes - nodes[order[-1]]).abs().log()  # −∞ for those taken
        order.append(int(distance.argmax()))
    return 1 / nodes[order]


@dataclass
class CuredLoop:
    """Runs the iterations of a network from a better start, and again from its own image: for `network.loop`."""

    loop: Callable[..., Any]
    passes: int
    while_it_falls: bool  # each image goes on as long as its residual falls
    tv: TotalVariation
    starts_at_tv: bool
    share: float = 0.0  # of total variation in the image at the end

    def __call__(self, network: UnrolledNetwork[Any], iterations: range, y: Tensor, state: Any) -> Any:
        """The state after some iterations. The first ones begin at TV, and the last ones are followed by the passes."""
        is_first, is_last = iterations.start == 0, iterations.stop == network.n_iterations
        starts, mixes = is_first and self.starts_at_tv, is_last and self.share > 0
        with torch.no_grad():
            tv_image = self.tv(y) if starts or mixes else y
        state = at_image(state, tv_image) if starts else state
        state = self.loop(network, iterations, y, state)
        if is_last and self.passes > 1:
            state = self._further_passes(network, y, state)
        if mixes:
            state = at_image(state, torch.lerp(network.image(state), tv_image, self.share))
        return state

    def _further_passes(self, network: UnrolledNetwork[Any], y: Tensor, state: Any) -> Any:
        """The state after the other passes, in which each image goes on while its residual falls."""
        image, going = network.image(state), torch.arange(len(y), device=y.device)
        misfit = _misfit(network, image, y)
        for _ in range(self.passes - 1):
            part = y[going]
            again = at_image(network.start(part), image[going])
            x = network.image(self.loop(network, range(network.n_iterations), part, again))
            nearer = _misfit(network, x, part)
            change = (x - image[going]).flatten(1).norm(dim=1) / image[going].flatten(1).norm(dim=1)
            falls = ((nearer < misfit[going]) & (change >= _CHANGE)) | (not self.while_it_falls)
            going = going[falls]
            if not len(going):
                break
            image, misfit = image.index_copy(0, going, x[falls]), misfit.index_copy(0, going, nearer[falls])
        return at_image(state, image)


@torch.no_grad()
def _misfit(network: UnrolledNetwork[Any], x: Tensor, y: Tensor) -> Tensor:
    """‖A x − y‖ of each sample, [B]."""
    return (network.projector(x) - y).flatten(1).norm(dim=1)


@torch.no_grad()
def _has_start(network: UnrolledNetwork[Any]) -> bool:
    """Whether the state of x₀ can have another image."""
    scan = network.projector.geometry
    state = network.start(next(network.projector.buffers()).new_zeros(1, 1, scan.n_views, scan.n_detectors))
    x = torch.ones_like(network.image(state))
    try:
        return torch.equal(network.image(at_image(state, x)), x)
    except (AttributeError, RuntimeError, TypeError):
        return False
