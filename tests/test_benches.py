"""The benches of notebooks/benchmarks measure and write what they show, on tiny settings."""

import sys
from collections.abc import Iterable

import pytest
import torch

from qnmixer.physics import FanBeamGeometry, FanBeamProjector

from .pages import ROOT

sys.path.insert(0, str(ROOT / "notebooks" / "benchmarks"))  # where the benches run
import bench_memory
import bench_step
from count_operators import counts_of_a_step
from measuring import Row, markdown
from operators import OPERATORS, lacking, stand_in_for_torchvision

Figures = dict[tuple[str, str], float | str]


def figures(rows: Iterable[Row]) -> Figures:
    return {(row.line, row.column): row.value for row in rows}


def test_the_operators_of_a_training_step() -> None:
    """Of the full network, with T = 14. Up to a batch of about ten their number sets the time of a step on a GPU."""
    counts = counts_of_a_step("optimizer=muon")
    assert counts["forward"] + counts["backward"] <= 7500
    assert counts["optimizer"] <= 500


@pytest.mark.slow
@pytest.mark.long
def test_operators_and_steps() -> None:
    stand_in_for_torchvision()
    found = figures(bench_step.operator_rows(16, rounds=1))
    assert all(found["ours", operator] > 0 for operator in ("A", "Aᵀ", "FBP"))
    for name in ("deepinv", "ASTRA"):  # milliseconds, or a word why not
        assert isinstance(found[name, "A"], str) == bool(lacking(name))
    scan = "data.image_size=16 geometry.n_views=8 geometry.n_detectors=24 geometry.detector_pitch=40 model.channels=4"
    rows = [*bench_step.variant_rows(f"experiment=demo {scan}", ["keep", "recompute"], rounds=1)]
    found = figures(rows)
    assert all(found[mode, "step"] > 0 for mode in ("keep", "recompute"))
    assert f"| keep | {found['keep', 'step']:.3g} s (1.00) |" in markdown(rows)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_the_plan_is_within_ten_percent_of_real_steps() -> None:
    """One config alone, and four devices of a pipeline, each of which holds a third of the activations."""
    rows = [*bench_memory.plan_rows(bench_memory.CONFIGS[3]), *bench_memory.pipeline_rows(*bench_memory.PIPELINES[0])]
    found = figures(rows)
    ratios = [value for (_, column), value in found.items() if column == "planned : measured"]
    assert ratios == pytest.approx([1.0] * 6, abs=0.1)
    for (line, column), value in found.items():
        if "device" in line and "of one" in column:
            assert value <= 0.35


@pytest.mark.parametrize(("name", "difference"), [("ASTRA", 1e-4), ("deepinv", 0.03)])
def test_an_adapter_has_our_scan_and_an_fbp_of_unit_gain(name: str, difference: float) -> None:
    """deepinv's A is only near ours, and half a pixel off unless it pads by an even number, as here."""
    stand_in_for_torchvision()
    if lacking(name):
        pytest.skip(f"{name} is not installed")
    size = 66
    geometry = FanBeamGeometry.paper(16, size)
    ours, theirs = FanBeamProjector(geometry), OPERATORS[name](geometry)
    rows, columns = torch.meshgrid(*2 * [torch.arange(float(size))], indexing="ij")
    spots = [((rows - i) ** 2 + (columns - j) ** 2).div(-50).exp() for i, j in ((20, 40), (30, 15))]  # off the centre
    x = torch.stack(spots)[:, None]
    y = ours(x)
    assert (theirs(x) - y).norm() < difference * y.norm()
    assert (theirs.adjoint(y) - ours.adjoint(y)).norm() < difference * ours.adjoint(y).norm()
    assert float((theirs.fbp(y) * x).sum() / x.square().sum()) == pytest.approx(1, abs=0.1)


def test_every_figure_is_in_a_table() -> None:
    rows = [Row("A step (× ours)", "theirs", "64²", 1.5, "s", 1.25), Row("A step (× ours)", "theirs", "peak", 1234.5)]
    text = markdown([*rows, Row("A step (× ours)", "absent", "64²", "not installed")])
    assert text == (
        "\n## A step (× ours)\n\n|  | 64² | peak |\n|---|---|---|\n"
        "| theirs | 1.5 s (1.25) | 1,234 |\n| absent | not installed |  |\n"
    )
