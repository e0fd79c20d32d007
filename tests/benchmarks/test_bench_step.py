import json
import sys
from pathlib import Path

import pytest
import torch

from qnmixer.models import QNMixer
from qnmixer.physics import FanBeamGeometry, FanBeamProjector

from ..models.conftest import FIGURE
from ..warm import Warm

sys.path.insert(0, str(Path(__file__).parent))
from plain_qn_mixer import PlainOperator, PlainQNMixer  # beside this file, where the benches run


@pytest.mark.parametrize("n_views", [12, 10])
def test_the_plain_network_computes_the_same(n_views: int) -> None:
    """Operator, regulariser, and the loop, on a run in which the safeguard has nothing to do (asserted)."""
    torch.manual_seed(0)
    geometry = FanBeamGeometry(16, 25.0, n_views, 24, 40.0, 600.0, 290.0, 0.1)
    projector = FanBeamProjector(geometry)
    operator = PlainOperator(geometry, torch.device("cpu"))
    x = torch.rand(2, 1, 16, 16)
    y = projector(x)
    torch.testing.assert_close(operator.forward(x), y, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(operator.fbp(y), projector.fbp(y), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(operator.filtered_adjoint(y), projector.filtered_adjoint(y), rtol=1e-4, atol=1e-4)

    network = QNMixer(projector, n_iterations=5, channels=8, **FIGURE)
    (G,) = network.regularizers
    torch.nn.init.normal_(G.expansion.project, std=0.02)
    plain = PlainQNMixer(network, operator)
    torch.testing.assert_close(plain.G(x), G(x), rtol=1e-4, atol=1e-6)

    for G in (network.regularizers[0], plain.G):
        G.forward = lambda x: 0.9 * x  # of nearly quadratic J: zᵀs is well above the bound
    (*_, state) = network.states(y)
    assert network.diagnostics(state)["skipped_pairs"] == 0
    rows = state.history.rows.detach()  # a pair is divided by the same number
    s, z = rows[:, 0:-1:2], rows[:, 1::2]
    assert ((s * z).sum(-1) > 0.5 * s.square().sum(-1)).all()
    for net in (network, plain):
        (net(y) - x).square().sum().backward()
    torch.testing.assert_close(plain(y), network(y), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(plain.encoder.weight.grad, network.codec.encoder.weight.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_bench_measures_and_writes_what_it_shows(warm: Warm, tmp_path: Path) -> None:
    script, path = Path(__file__).with_name("bench_step.py"), tmp_path / "new folder" / "step.json"
    short = ["--sizes", "16", "--iterations", "2", "--rounds", "1", "--variants", "keep", "recompute"]
    done = warm.run(str(script), *short, "--json", str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(path.read_text())["sizes"]
    assert list(found["steps"]) == ["plain", "keep", "recompute", "keep, our additions"]
    assert found["steps"]["plain"]["times_as_fast"] == 1.0
    assert [row["part"] for row in found["parts"]] == [
        "operator", "regulariser", "codec", "BFGS", "optimizer", "simulation"
    ]  # fmt: skip
    assert all(row["over_floor"] == row["seconds"] / row["floor"] > 0 for row in found["parts"])
    assert f"{found['steps']['keep']['seconds']:.3f}" in done.stdout
    assert f"{found['slowdown_beside_busy_core']:.2f} times as long" in " ".join(done.stdout.split())
