"""The benches measure and write what they show: all but one in processes of their own, on tiny settings."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qnmixer.physics import FanBeamGeometry, FanBeamProjector

from ..warm import Warm

sys.path.insert(0, str(Path(__file__).parent))
import report  # beside this file, where the benches run
from operators import OPERATORS, lacking, stand_in_for_torchvision

SCAN = "data.image_size=16 geometry.n_views=8 geometry.n_detectors=24 geometry.detector_pitch=40"
TINY = f"{SCAN} data.batch_size=2 model.n_iterations=2 model.channels=4 model.n_mixer_layers=1"
of_linux = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


Figures = dict[tuple[str, str], float]


def measured(folder: Path, bench: str, *arguments: str, warm: Warm | None = None) -> tuple[Figures, str]:
    """What a bench writes, by line and column, and what it prints."""
    script, path = Path(__file__).with_name(f"bench_{bench}.py"), folder / "new folder" / "figures.json"
    words = [str(script), *arguments, "--json", str(path)]
    run = [sys.executable, *words]
    done = warm.run(*words, cwd=folder) if warm else subprocess.run(run, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == [path.parent]
    rows = json.loads(path.read_text())["rows"]
    return {(line, column): value for _, line, column, value, *_ in rows}, done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_steps(warm: Warm, tmp_path: Path) -> None:
    given = ["--sizes", "16", "--rounds", "1", "--base", f"{SCAN} model.channels=4", "--variants", "keep", "recompute"]
    found, printed = measured(tmp_path, "step", *given, warm=warm)
    assert all(found["ours", f"{network}, step"] > 0 for network in ("LEARN", "data term"))
    assert all(found["ours", operator] > 0 for operator in ("A", "Aᵀ", "FBP"))
    assert all(found[mode, "step"] > 0 for mode in ("keep", "recompute"))
    for name in ("deepinv", "ASTRA"):  # seconds, or a word why not
        is_shown_absent = f"| {name} | not installed (" in printed
        assert isinstance(found[name, "LEARN, step"], float) != is_shown_absent
    assert f"{found['keep', 'step']:.3g} s (1.00)" in printed


@pytest.mark.slow
@pytest.mark.long
def test_loader_waiting_and_start(tmp_path: Path) -> None:
    overrides = f"{TINY} data.num_workers=1 trainer.accelerator=cpu"
    given = ["--slices", "4", "--steps", "3", "--trainings", "demo", "--overrides", overrides]
    found, _ = measured(tmp_path, "data", *given)
    assert all(value > 0 for value in found.values())
    assert found["demo, 16², T = 2, batch 2", "waiting for data"] < 100
    assert found["train --help", "until its end"] < found["train, demo", "until the first step has ended"]


@pytest.mark.slow
@pytest.mark.long
@of_linux
def test_the_memory_of_a_series_is_flat(tmp_path: Path) -> None:
    found, _ = measured(tmp_path, "reconstruction", "--slices", "60", "--inputs", "slices", "--overrides", TINY)
    assert found["60 slices", "speed"] > 0
    assert found["60 slices", "peak"] > 100
    assert found["60 slices", "peak, all : a quarter"] == pytest.approx(1, abs=0.1)


@pytest.mark.slow
@pytest.mark.long
@of_linux
def test_the_plan_is_within_ten_percent_of_real_steps(tmp_path: Path) -> None:
    """One config alone, and four devices of a pipeline, each of which holds a third of the activations."""
    found, _ = measured(tmp_path, "memory", "--configs", "3", "--pipelines", "0")
    ratios = [value for (_, column), value in found.items() if column == "planned : measured"]
    assert ratios == pytest.approx([1.0] * 6, abs=0.1)
    for (line, column), value in found.items():
        if "device" in line and "of one" in column:
            assert value <= 0.35


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


def test_every_figure_is_in_a_table_and_beside_that_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("before", 2.0), ("after", 1.5)):
        rows = [["A step (× ours)", "theirs", "64²", seconds, "s", seconds]]
        rows += [["A step (× ours)", "absent", "64²", "not installed", "s", None]]
        (tmp_path / name).mkdir()
        (tmp_path / name / "step.json").write_text(json.dumps({"machine": "abacus, 2 cores", "rows": rows}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["report.py", "after", "--before", "before", "--output", "new/bench.md"])
    report.main()
    printed = capsys.readouterr().out
    assert printed == Path("new/bench.md").read_text()
    assert "on one machine: abacus, 2 cores" in printed
    assert "| theirs | 1.5 s (1.50); 0.75 of before |" in printed
    assert "| absent | not installed |" in printed
    monkeypatch.setattr(sys, "argv", ["report.py", "new"])
    with pytest.raises(SystemExit, match="holds nothing that make bench wrote"):
        report.main()
