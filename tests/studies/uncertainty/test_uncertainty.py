"""`evaluation=uncertainty`: its coverage against known errors, and the command on an untrained network."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pydicom import dcmread

from qnmixer import reconstruct
from qnmixer.evaluate import check, evaluate
from qnmixer.reconstruction.uncertainty import groups_of, smooth_deviation
from qnmixer_studies.uncertainty.coverage import Pixels, by_patient, coverage, factors_for, half_widths_of_factors

from ...saved import TINY, run, save


def patient(seed: int, scale: float = 3.0) -> Pixels:
    """Normal errors, of `scale` times the deviation where it is large and twice that where it is small."""
    generator = np.random.default_rng(seed)
    group = np.repeat(np.arange(10), 20_000)
    ratio = np.abs(generator.standard_normal(len(group))) * np.where(group < 5, 2 * scale, scale)
    return Pixels(ratio, group, generator.uniform(-950, 1000, len(group)))


def test_each_tenth_has_the_factor_of_its_errors() -> None:
    """1σ and 1.96σ. So a deviation that says nothing of the errors still covers the stated share of each tenth."""
    for level, sigmas in ((math.erf(1 / math.sqrt(2)), 1.0), (0.95, 1.96)):
        factors = factors_for(level, [patient(0), patient(1)])
        assert factors == pytest.approx([6 * sigmas] * 5 + [3 * sigmas] * 5, rel=0.03)
        for shares in coverage(factors, [patient(2)]).values():
            assert shares == pytest.approx([level], abs=0.02)


def test_patients_count_equally_and_give_an_interval() -> None:
    """However many pixels one has. Factors of 3 and of 6, for one each, have an interval as wide as that."""
    small, large = patient(0), patient(1, scale=6)
    slices = [small, large, large]
    of_two = by_patient(slices, [0, 1, 1])
    assert [len(pixels.ratio) for pixels in of_two] == [200_000, 400_000]
    assert factors_for(0.68, of_two) == pytest.approx(factors_for(0.68, [small, large]))
    assert len(by_patient(slices, [None] * 3)) == 3
    alike, unlike = half_widths_of_factors(0.68, [small, patient(2)]), half_widths_of_factors(0.68, [small, large])
    assert all(a is not None and b is not None and 5 * a < b for a, b in zip(alike, unlike, strict=True))
    assert half_widths_of_factors(0.68, [small]) == [None] * 10


def test_the_deviation_is_smooth_and_never_zero() -> None:
    """The blur keeps the mean of squares; tenths are equal parts of the body."""
    deviation = torch.zeros(1, 1, 64, 64)
    assert torch.equal(smooth_deviation(deviation), torch.full_like(deviation, 2.0))
    deviation[..., 32, 32] = 100
    smooth = smooth_deviation(deviation)[0, 0]
    assert float((smooth.square() - 4).sum()) == pytest.approx(100**2, rel=1e-3)
    assert float(smooth.max()) < 12
    assert smooth[32, 32] > smooth[32, 36] > smooth[32, 44]
    body = torch.zeros(64, 64, dtype=torch.bool)
    body[:50, :40] = True
    noise = torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    assert groups_of(noise, body)[body].bincount().tolist() == pytest.approx([200] * 10, abs=1)


def test_one_command_scales_on_validation_slices_and_another_writes_the_map(tmp_path: Path) -> None:
    network = save(tmp_path / "run", *TINY, "data.n_val=2", "data.n_test=3")
    path = network / "checkpoints" / "best.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    generator = torch.Generator().manual_seed(0)  # the regulariser starts at zero, and then keeps every symmetry
    for weights in checkpoint["state_dict"].values():
        weights += 0.05 * torch.randn(weights.shape, generator=generator)
    torch.save(checkpoint, path)
    folder = tmp_path / "uncertainty"
    words = [f"run={network}", "evaluation=uncertainty", "accelerator=cpu", f"hydra.run.dir={folder}"]
    code, _, stderr = run(evaluate, check, "evaluate", *words)
    assert (code, stderr) == (1, "error: evaluation=uncertainty is the deviation over symmetries: give symmetries=8\n")
    code, stdout, stderr = run(evaluate, check, "evaluate", *words, "symmetries=8")
    assert (code, stderr) == (0, "")
    assert "deviation over 8 turns and flips" in stdout
    text = (folder / "table.md").read_text()
    assert "chosen on validation patients: 2," in text
    assert "over 3 patients" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| tenth")]
    assert len(rows) == 10
    for row in rows:
        assert [float(row[column]) for column in (2, 5)] == pytest.approx([68, 95], abs=3)
    record = json.loads((folder / "results.json").read_text())
    assert record["status"] == "done"
    assert record["uncertainty"]["uncertainty/95/all_pixels"] <= 100

    hu = np.full((16, 16), -1000, np.float32)
    hu[4:12, 4:12] = 40
    np.save(tmp_path / "a.npy", hu)
    words = [f"run={network}", f"input={tmp_path / 'a.npy'}", "accelerator=cpu", "symmetries=8"]
    words += [f"uncertainty={folder / 'uncertainty.json'}"]
    for level, n_views in ((0.95, 8), (0.68, 12)):
        output = tmp_path / f"{level}"
        code, stdout, stderr = run(
            reconstruct.reconstruct, reconstruct.check, "reconstruct", *words,
            f"output={output}", f"level={level}", f"geometry.n_views={n_views}",
        )  # fmt: skip
        assert code == 0, stderr
        assert f"covers {level:.0%} of the errors, measured on 2 patients" in stdout
        assert ("another scan" in stdout) == (n_views == 12)
        values = np.load(output / "a_uncertainty.npy")
        pytest.importorskip("highdicom")
        dataset = dcmread(output / "a_uncertainty.dcm")
        assert dataset.SOPClassUID.name == "Parametric Map Storage"
        assert f"{level:.0%}" in dataset.SeriesDescription
        np.testing.assert_array_equal(np.frombuffer(dataset.FloatPixelData, np.float32), values.ravel())
        image = dcmread(output / "a.dcm")
        assert dataset.FrameOfReferenceUID == image.FrameOfReferenceUID
        shared = dataset.SharedFunctionalGroupsSequence[0]
        assert shared.PixelMeasuresSequence[0].PixelSpacing == image.PixelSpacing
    assert (np.load(tmp_path / "0.68" / "a_spread.npy") >= 0).all()
    code, _, stderr = run(
        reconstruct.reconstruct, reconstruct.check, "reconstruct", *words, f"output={tmp_path / 'c'}", "level=0.5"
    )
    assert (code, stderr.count("\n")) == (1, 1)
    assert "choose 0.68, 0.95" in stderr
