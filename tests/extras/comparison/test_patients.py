"""The table over patients, from the images.csv of an evaluation."""

import math
from pathlib import Path
from statistics import mean, stdev

import pytest

from qnmixer.extras.comparison.patients import main, read_images

SLICES = [("TV", [30.0, 32.0, 36.0, 40.0]), ("QN-Mixer", [33.0, 34.0, 38.0, 43.0])]
PATIENTS = ["1", "1", "2", ""]  # of the last slice nobody knows


def test_patients_count_equally(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["number,slice,method,psnr,ssim,window_psnr,window_ssim,patient"]
    for method, psnrs in SLICES:
        pairs = zip(psnrs, PATIENTS, strict=True)
        lines += [f"{number},a,{method},{psnr},90,,80,{patient}" for number, (psnr, patient) in enumerate(pairs)]
    (tmp_path / "images.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "table.md").write_text("**Warning: one**\n\n**three patients**\n")
    values = read_images(tmp_path / "images.csv")
    assert values["TV"]["psnr"] == {"1": 31.0, "2": 36.0, "slice 3": 40.0}
    main(tmp_path)
    printed = capsys.readouterr().out

    def cell(*of_patients: float) -> str:
        half_width = 4.3027 * stdev(of_patients) / math.sqrt(3)  # t of 2 degrees of freedom
        return f"{mean(of_patients):.2f} ± {half_width:.2f}"

    expected = f"{cell(33.5, 38, 43)} | 90.00 ± 0.00 | {cell(2.5, 2, 3)}"
    assert f"| QN-Mixer | {expected} |" in printed
    assert "over 3 patients" in printed
    assert printed.startswith("**Warning: one**\n\n**three patients**\n\n|")
