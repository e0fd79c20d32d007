"""`evaluation=uncertainty`: its coverage against normal errors, and the command on an untrained network."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from qnmixer.evaluate import check, evaluate
from qnmixer.extras.uncertainty.coverage import by_patient, coverages, covered_by, factor_for

from ...saved import TINY, run, save


def test_normal_errors_are_covered_as_they_should_be() -> None:
    """An error that is normal with three times the deviation: 1σ and 1.96σ, in every group."""
    generator = torch.Generator().manual_seed(0)
    deviation = torch.rand(200_000, generator=generator) + 0.1
    curves = coverages(3 * deviation * torch.randn(200_000, generator=generator), deviation)
    patients = by_patient([curves, curves], [0, 1])
    for level, sigmas in ((math.erf(1 / math.sqrt(2)), 1.0), (0.95, 1.96)):
        assert factor_for(level, patients) == pytest.approx(3 * sigmas, rel=0.02)
        assert covered_by(3 * sigmas, patients) == pytest.approx(np.full((2, 3), level), abs=0.02)


def test_a_deviation_that_says_nothing_fails_in_the_tenths() -> None:
    """Errors of one size: the mean coverage can be scaled, that of the tenths cannot."""
    deviation = torch.linspace(0.1, 1, 10_000)
    curves = coverages(torch.randn(10_000, generator=torch.Generator().manual_seed(0)), deviation)[None]
    overall, least, most = covered_by(factor_for(0.68, curves), curves)[0]
    assert overall == pytest.approx(0.68, abs=0.01)
    assert least < 0.4
    assert most > 0.8


def test_a_deviation_of_zero_covers_an_error_of_zero_only() -> None:
    curves = coverages(torch.tensor([0.0, 1.0]), torch.zeros(2))
    assert (curves[0] == 0.5).all()
    assert factor_for(0.6, curves[None]) == math.inf


def test_patients_count_equally() -> None:
    curves = [np.full((3, 1), value) for value in (0.0, 1.0, 1.0, 0.5)]
    assert by_patient(curves, [0, 0, 0, 1])[:, 0, 0] == pytest.approx([2 / 3, 0.5])


def test_one_command_scales_on_validation_slices_and_tests_on_others(tmp_path: Path) -> None:
    network = save(tmp_path / "run", *TINY, "data.n_val=2", "data.n_test=3")
    path = network / "checkpoints" / "best.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    generator = torch.Generator().manual_seed(0)  # the regulariser starts at zero, and then keeps every symmetry
    for weights in checkpoint["state_dict"].values():
        weights += 0.05 * torch.randn(weights.shape, generator=generator)
    torch.save(checkpoint, path)
    folder = tmp_path / "uncertainty"
    given = [f"run={network}", "evaluation=uncertainty", "accelerator=cpu", f"hydra.run.dir={folder}"]
    code, _, stderr = run(evaluate, check, "evaluate", *given)
    assert (code, stderr) == (1, "error: evaluation=uncertainty is the deviation over symmetries: give symmetries=8\n")
    code, stdout, stderr = run(evaluate, check, "evaluate", *given, "symmetries=8")
    assert (code, stderr) == (0, "")
    assert "deviation over 8 turns and flips" in stdout
    text = (folder / "table.md").read_text()
    assert "chosen on 2 validation patients" in text
    assert "over 3 test patients" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| 68", "| 95"))]
    assert len(rows) == 2
    for row, level in zip(rows, (68, 95), strict=True):
        assert float(row[2]) == pytest.approx(level, abs=1)
        assert 0 <= float(row[3].split(" ± ")[0]) <= 100
    record = json.loads((folder / "results.json").read_text())
    assert record["status"] == "done"
    assert len(record["uncertainty"]) == 10


@pytest.mark.parametrize("key", ["symmetries=8", "geometry.n_views=6"])
def test_an_evaluation_by_task_takes_neither(key: str, tmp_path: Path) -> None:
    network = save(tmp_path / "run", *TINY)
    code, _, stderr = run(evaluate, check, "evaluate", f"run={network}", "evaluation=task", key)
    assert code == 1
    assert stderr.endswith(f"leave out {key.partition('.')[0].partition('=')[0]}=…\n")
