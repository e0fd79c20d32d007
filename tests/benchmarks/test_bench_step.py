import json
import sys
from pathlib import Path

import pytest
import torch

from qnmixer.physics import FanBeamGeometry, FanBeamProjector

from ..warm import Warm

sys.path.insert(0, str(Path(__file__).parent))
from operators import OPERATORS, lacking, stand_in_for_torchvision  # beside this file, where the benches run


@pytest.mark.parametrize(("name", "difference"), [("ASTRA", 1e-4), ("deepinv", 0.03)])
def test_an_adapter_has_our_scan_a_gradient_and_an_fbp_of_unit_gain(name: str, difference: float) -> None:
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
    assert theirs.operator_norm() == pytest.approx(ours.operator_norm(), rel=difference)
    assert float((theirs.fbp(y) * x).sum() / x.square().sum()) == pytest.approx(1, abs=0.1)

    x.requires_grad_()
    (gradient,) = torch.autograd.grad(theirs.filtered_residual(x, y).square().sum(), x, create_graph=True)
    assert gradient.abs().sum() > 0


@pytest.mark.slow
def test_bench_measures_and_writes_what_it_shows(warm: Warm, tmp_path: Path) -> None:
    script, path = Path(__file__).with_name("bench_step.py"), tmp_path / "new folder" / "step.json"
    tiny = "data.image_size=16 geometry.n_views=8 geometry.n_detectors=24 geometry.detector_pitch=40 model.channels=4"
    given = ["--sizes", "16", "--rounds", "1", "--base", tiny, "--variants", "keep", "recompute"]
    done = warm.run(str(script), *given, "--json", str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {tuple(row[1:3]): row[3] for row in json.loads(path.read_text())["rows"]}
    assert all(found["ours", f"{network}, step"] > 0 for network in ("LEARN", "data term"))
    assert all(found["ours", operator] > 0 for operator in ("A", "Aᵀ", "FBP"))
    assert all(found[mode, "step"] > 0 for mode in ("keep", "recompute"))
    for name in ("deepinv", "ASTRA"):  # seconds, or a word why not
        is_shown_absent = f"| {name} | not installed (" in done.stdout
        assert isinstance(found[name, "LEARN, step"], float) != is_shown_absent
    assert f"{found['keep', 'step']:.3g} s (1.00)" in done.stdout
