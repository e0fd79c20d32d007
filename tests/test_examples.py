"""The scripts of notebooks/examples: each run as a user does, and what it prints and writes."""

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
import torch

import qnmixer
from qnmixer.evaluation.metrics import psnr
from qnmixer.models.bfgs import split_scale
from qnmixer.models.qn_mixer import QNState
from qnmixer.physics import FanBeamGeometry, FanBeamProjector

from .conftest import csv_rows, environment
from .pages import ROOT
from .warm import Done, Warm

EXAMPLES = sorted(path for path in (ROOT / "notebooks" / "examples").glob("*.py") if path.stem != "with_deepinv")

Again = Callable[[], Done]
SMALLER = {
    "own_network": {
        "SIZE, VIEWS = 64, 16": "SIZE, VIEWS = 32, 16",
        "ITERATIONS, CHANNELS = 4, 24": "ITERATIONS, CHANNELS = 4, 12",
        "STEPS, BATCH = 75,": "STEPS, BATCH = 40,",
        "N_TEST = 16, 32\n": "N_TEST = 4, 8\n",
    },
    "own_optimizer_step": {
        "SEEDS = 0, 1\n": "SEEDS = (0,)\n",
        "STEPS, BATCH = 20,": "STEPS, BATCH = 12,",
        "ITERATIONS, CHANNELS = 4,": "ITERATIONS, CHANNELS = 3,",
        "N_TEST = 16\n": "N_TEST = 4\n",
    },
    "sweep": {
        "STEPS = 20\n": "STEPS = 6\n",
        "data.n_val=16": "data.n_val=4",
        "data.n_test=32": "data.n_test=8",
        "model.channels=16": "model.channels=8",
    },
    "uncertainty_by_symmetries": {"SYMMETRIES = 8  #": "SYMMETRIES = 2  #"},
}
"""Constants of a script, which its user may change too: as they stand, it takes twice as long."""


@pytest.mark.slow
@pytest.mark.parametrize(("path", "changes"), [
    *(pytest.param(path, SMALLER.get(path.stem, {}), id=path.stem) for path in EXAMPLES),
    *(pytest.param(path, {}, marks=pytest.mark.long) for path in EXAMPLES if path.stem in SMALLER),
])  # fmt: skip
def test_example(
    path: Path, changes: dict[str, str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, warm: Warm
) -> None:
    text = path.read_text()
    for constant, smaller in changes.items():
        assert text.count(constant) == 1
        text = text.replace(constant, smaller)
    script = tmp_path_factory.mktemp("script") / path.name
    script.write_text(text)

    def run() -> Done:
        done = warm.run(str(script), cwd=tmp_path, env=environment())
        assert done.returncode == 0, done.stderr
        return done

    folder = tmp_path / "runs" / "examples" / path.stem
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "scan.dcm").touch()  # of an earlier call
    first = run()
    CHECKS[path.stem](first.stdout, folder, run)
    assert [*tmp_path.iterdir(), *(tmp_path / "runs").iterdir(), *folder.parent.iterdir()] == [
        tmp_path / "runs", folder.parent, folder,
    ]  # fmt: skip  # it writes nowhere else


@pytest.mark.long
def test_with_deepinv(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In few steps: its A and Aᵀ are adjoint, its FBP is ours, and each method gives an image of the slice."""
    runpy.run_path(str(ROOT / "notebooks" / "benchmarks" / "operators.py"))["stand_in_for_torchvision"]()
    pytest.importorskip("deepinv")
    names = runpy.run_path(str(ROOT / "notebooks" / "examples" / "with_deepinv.py"))
    projector = FanBeamProjector(names["SCAN"]).double()
    physics = names["Scan"](projector)
    x = torch.rand(2, 1, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert abs(float(physics.adjointness_test(x))) < 1e-9 * float(physics.A(x).square().sum())
    assert float(physics.compute_norm(x[:1], verbose=False)) == pytest.approx(1, rel=0.01)
    torch.testing.assert_close(physics.A_dagger(physics.A(x)), projector.fbp(projector(x)))
    for constant, smaller in {"STEPS": 6, "DENOISER_STEPS": 20, "N_TEST": 1, "SAMPLES": 2}.items():
        monkeypatch.setitem(names["denoiser"].__globals__, constant, smaller)
    names["main"]()
    values = [float(cells[1]) for cells in table(capsys.readouterr().out)]
    assert len(values) == 5
    assert all(value > 8 for value in values)
    assert values[4] > values[3]  # a mean of samples has less noise than one


def own_step(name: str, r: torch.Tensor, earlier: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """The step s_t of a class of own_optimizer_step.py after the step s."""
    projector = FanBeamProjector(FanBeamGeometry.paper(8, 16))
    network = example("own_optimizer_step")[name](projector, n_iterations=2, channels=4)
    torch.nn.init.ones_(network.trust[0])  # the method itself, and nothing of −r
    unit, scale = split_scale(s)
    return network.direction(1, r, QNState(torch.zeros(2, 1, 16, 16), (), unit, scale, earlier))[0].detach()


def test_barzilai_borwein_is_newtons_step_where_the_curvature_is_the_same_everywhere() -> None:
    r, s = torch.randn(2, 2, 256, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(own_step("BarzilaiBorweinMixer", r, r - 2 * s, s), -r / 2)  # of the curvature 2


def test_conjugate_gradients_are_conjugate() -> None:
    """After an exact line search on a quadratic, the next direction d has dᵀ A s = 0."""
    r, diagonal = torch.randn(2, 2, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = diagonal.abs() + 1
    s = -(r * r).sum(1, keepdim=True) / (r * A * r).sum(1, keepdim=True) * r
    d = own_step("ConjugateGradientMixer", r + A * s, r, s)
    cosine = (d * A * s).sum(1) / (d.norm(dim=1) * (A * s).norm(dim=1))
    assert cosine.abs().max() < 1e-6


def number(pattern: str, text: str) -> float:
    """The one number of a printed line."""
    (found,) = re.findall(pattern, text)
    return float(found)


def table(text: str) -> list[list[str]]:
    """The rows of a printed table, without its heading."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def images(size: int, n: int) -> torch.Tensor:
    hu = np.stack([qnmixer.phantom(size, seed=7, part="test", index=index) for index in range(n)])
    return (torch.from_numpy(hu)[:, None].clamp(-1000, 2000) + 1000) / 3000


def check_own_network(stdout: str, folder: Path, _: Again) -> None:
    """What it says of the network holds for its checkpoint, on other phantoms, which are scanned without noise."""
    said = number(r"network (\S+) dB", stdout) - number(r"FBP (\S+) dB", stdout)
    module = example("own_network")["Reconstruction"].load_from_checkpoint(folder / "best.ckpt", weights_only=True)
    truth = images(module.hparams["size"], 8)
    with torch.no_grad():
        y = module.network.projector(truth)
        found = float((psnr(module.network(y), truth) - psnr(module.network.projector.fbp(y), truth)).mean())
    assert min(said, found) > 6  # 11 and 10
    assert (folder / "picture.png").stat().st_size > 10_000


def check_measured_scan_to_dicom(stdout: str, folder: Path, _: Again) -> None:
    """Positions, HU and orientation of the files, in place of an earlier call's; the scan is the same each time."""
    hu, spacing = {}, 400 / 256
    for name in ("scan", "scan_fbp"):
        image = pydicom.dcmread(folder / "images" / f"{name}.dcm")
        hu[name] = image.pixel_array * float(image.RescaleSlope) + float(image.RescaleIntercept)
        assert np.abs(hu[name] - np.load(folder / "images" / f"{name}.npy")).max() <= 0.5
        assert [*image.PixelSpacing] == [spacing, spacing]
        assert [*image.ImageOrientationPatient] == [1, 0, 0, 0, 1, 0]
    fine = qnmixer.phantom(512, seed=0, part="test", index=3)
    truth = fine.reshape(256, 2, 256, 2).mean((1, 3))
    error = {name: np.sqrt(np.mean((image - truth)[truth > -500] ** 2)) for name, image in hu.items()}
    assert error["scan"] < error["scan_fbp"] / 3
    assert number(r"network (\S+) HU", stdout) == pytest.approx(error["scan"], abs=0.06)
    assert number(r"FBP (\S+) HU", stdout) == pytest.approx(error["scan_fbp"], abs=0.06)
    assert number(r"pixels on (\S+) mm", stdout) == 400
    assert number(r"centre of bone: (\S+) mm", stdout) < spacing
    in_object, in_file = map(float, re.findall(r"(\S+) HU in the", stdout))
    assert abs(in_object - in_file) < 5
    counts = np.load(folder / "counts.npy")
    example("measured_scan_to_dicom")["write_scan"](folder)
    assert np.array_equal(np.load(folder / "counts.npy"), counts)


def check_own_optimizer_step(stdout: str, folder: Path, _: Again) -> None:
    """Every method learns, each by its own step."""
    *methods, fbp = table(stdout)
    assert [row[0] for row in methods] == ["BFGS", "Barzilai-Borwein", "conjugate gradients", "gradients"]
    assert min(float(row[1]) for row in methods) > float(fbp[1]) + 5
    assert len({row[4] for row in methods}) == 4  # PSNR of each seed
    assert (folder / "table.md").read_text() in stdout


def check_uncertainty_by_symmetries(stdout: str, folder: Path, _: Again) -> None:
    """The mean is better than one image, errors grow with the spread, and the interval covers about what it says."""
    single, mean = map(float, re.findall(r"(\S+) HU for", stdout))
    assert mean < single
    assert number(r"spread and error: (\S+)", stdout) > 0.25
    rows = [[float(cell.rstrip("%")) for cell in row[1:]] for row in table(stdout)]
    spreads, errors, inside = zip(*rows, strict=True)
    assert len(rows) == 5
    assert spreads == tuple(sorted(spreads))
    assert errors[-1] > 3 * errors[0]
    assert all(error > 2 * spread for spread, error in zip(spreads, errors, strict=True))  # as its text says
    covered = number(r"(\S+)% of the others", stdout)
    assert covered == pytest.approx(sum(inside) / 5, abs=0.1)
    assert 80 < covered <= 100
    assert (folder / "picture.png").stat().st_size > 50_000


def check_sweep(stdout: str, folder: Path, again: Again) -> None:
    """A row for each setting, as its run folder says, the best by validation first; the second call trains nothing."""
    rows = csv_rows(folder / "table.csv")
    assert {(row["T"], row["learning rate"]) for row in rows} == {(t, lr) for t in "24" for lr in ("0.003", "0.012")}
    assert [[*row.values()] for row in rows] == table(stdout[stdout.index("| T |") :])
    for row in rows:
        run = folder / f"T{row['T']}_lr{row['learning rate']}"
        results = json.loads((run / "results.json").read_text())
        assert results["best"]["val/psnr"] == pytest.approx(float(row["val PSNR"]), abs=0.006)
        (line,) = re.findall(r"QN-Mixer \| (\S+) ±", (run / "evaluation" / "table.md").read_text())
        assert line == f"{float(row['test PSNR']):.2f}"
        assert float(row["over FBP"]) > 4
    values = [float(row["val PSNR"]) for row in rows]
    assert values == sorted(values, reverse=True)
    assert f"chosen by validation: T = {rows[0]['T']}, learning rate {rows[0]['learning rate']}" in stdout
    assert again().stdout == stdout[stdout.index("\n| T |") :]


def example(name: str) -> dict[str, Any]:
    """The classes of a script, which is not run."""
    return runpy.run_path(str(ROOT / "notebooks" / "examples" / f"{name}.py"))


CHECKS: dict[str, Callable[[str, Path, Again], None]] = {
    "measured_scan_to_dicom": check_measured_scan_to_dicom,
    "own_network": check_own_network,
    "own_optimizer_step": check_own_optimizer_step,
    "sweep": check_sweep,
    "uncertainty_by_symmetries": check_uncertainty_by_symmetries,
}
