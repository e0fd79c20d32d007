"""Promise 7: `run=pretrained` gives its card's numbers. Every command in README and docs runs.

With other paths and, to be quick, smaller sizes.
"""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qnmixer import load_pretrained
from qnmixer.commands.command import TRACEBACK
from qnmixer.data.phantoms.phantoms import phantom
from qnmixer.measurement.build import build_projector
from qnmixer.new import new
from qnmixer.runs.run import latest
from qnmixer.settings.compose import compose
from qnmixer.settings.run import parse

from ..conftest import PHANTOMS
from ..pages import ROOT, STUDIES, commands
from ..warm import Warm
from .commands import write_ct

TINY = [
    "data.image_size=32", "geometry.n_detectors=48", "geometry.detector_pitch=20", "model.channels=8",
    "data.num_workers=0", "trainer.max_steps=2", "trainer.val_every_n_steps=2", "trainer.accelerator=cpu",
    "evaluation.n_pictures=1",
]  # fmt: skip


def marked(command: str) -> Any:
    """What plans or checks at length, or starts several processes, is for make test-all: its own tests are shorter."""
    long = (
        "strategy=" in command
        or " -m " in command.removeprefix("python -m")
        or "compare" in command
        or "robustness" in command
        or "custom" in command
        or "my_conf" in command
        or ("qnmixer.plan" in command and "format=json" not in command)
    )
    extras = re.search(r"compare|robustness|export|calibrate|=task|lodopab|two_detect|helix2fan", command)
    return pytest.param(command, marks=[pytest.mark.long] * long + [pytest.mark.extras] * bool(extras))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Path:
    """A folder with what the paths stand for: DICOM of three patients, a scan, a trained run, a user's own code."""
    place = tmp_path_factory.mktemp("readme")
    for number, patient in enumerate(("L067", "L310", "L333")):
        write_ct(place / "aapm" / patient / "full_3mm" / "1.IMA", number, patient, size=64)
    run(f"python -m qnmixer.train experiment=demo hydra.run.dir={place}/run", place, warm)
    (place / "sinograms").mkdir()
    for k, path in enumerate(["scan.npy", "sinograms/1.npy", "sinograms/2.npy", "sinograms/3.npy"]):
        attenuation = torch.from_numpy(0.0192 * (phantom(32, seed=0, part="test", index=k) + 1000) / 1000)  # in 1/mm
        np.save(place / path, load_pretrained(place / "run").projector(attenuation[None, None])[0, 0].numpy())
    counts = np.random.default_rng(0).poisson(1e4, (3, 8, 16)).astype(np.float64)
    for name in ("air.npy", "counts.npy"):
        np.save(place / name, counts)
    np.save(place / "repeats.npy", -np.log(counts / 1e4))
    new(place / "my_ct")
    shutil.copy(Path(__file__).parents[1] / "own.py", place / "my_file.py")
    (yaml,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "make_it_yours.md").read_text(), re.DOTALL)
    (place / "my_conf" / "loss").mkdir(parents=True)
    (place / "my_conf" / "loss" / "huber.yaml").write_text(yaml)
    for name in ("my_scans.py", "my_module.py", "my_gan.py", "my_slices.py"):
        (place / name).write_text(own(name))
    (place / "pairs").mkdir()
    for part in ("train", "val", "test"):
        torch.save((torch.rand(8, 1, 32, 32), torch.rand(8, 1, 32, 48)), place / "pairs" / f"{part}.pt")
    for part in ("train", "val", "test"):
        (place / "scans" / part).mkdir(parents=True)
        np.save(place / "scans" / part / "1_hu.npy", phantom(32, seed=0, part=part, index=0))
        np.save(place / "scans" / part / "1_scan.npy", np.full((16, 48), 2.0, np.float32))
    return place


def own(file: str) -> str:
    """A file of the user's in the docs, which begins with its name."""
    text = "".join((ROOT / "docs" / name).read_text() for name in ("make_it_yours.md", "other_loops.md"))
    (block,) = re.findall(rf"```python\n(# {file}.*?)```", text, re.DOTALL)
    return str(block)


def run(command: str, place: Path, warm: Warm) -> None:
    """Run a command in `place`, its paths replaced and its sizes made tiny."""
    paths = {"/path/to/dicom": "aapm", "/path/to/aapm": "aapm", "runs/DIR": "run", "runs/compare_small": "sweep"}
    paths |= {
        "/path/to/sinograms": "sinograms",
        "notebooks/studies": str(STUDIES),
        "runs/compare_real": "sweep_of_ct",
        "runs/longer": "sweep",
    }
    if "qnmixer.reconstruct" in command:
        paths["/path/to/dicom"] = "aapm/L067"
    for path, replacement in paths.items():
        command = command.replace(path, str(place / replacement))
    command = command.replace("model.n_iterations=10", "model.n_iterations=3")
    command = command.replace("qnmixer.new my_ct", "qnmixer.new another_ct")  # the fixture has made the other
    change_of_folder, _, command = command.rpartition(" && ")
    words = shlex.split(command)
    if words[0] == "make":
        run_folder = place / f"made{change_of_folder.removeprefix('cd ')}"
        overrides = [*TINY, *PHANTOMS, "model.n_iterations=2", f"hydra.run.dir={run_folder}"]
        if words[1] == "compare":
            sizes = [word for word in TINY if not word.startswith("model.")]
            of_ct = "CT=" in command
            overrides = ["experiment/small=fbp,learn", "seed=1", *sizes, *([] if of_ct else PHANTOMS)]
            words += [f"SWEEP={place}/sweep{'_of_ct' * of_ct}", "COMPARE=data.disc=true"]
        # A Python of the environment that runs this test stands in for .venv, which make would install otherwise.
        folder = place / change_of_folder.removeprefix("cd ") if change_of_folder else ROOT
        stand_in = ["-C", str(folder), "-o", ".venv/.installed", f"BIN={warm.python.parent}"]
        dry_run = ["--dry-run"] if words[1] == "test" else []  # or it would run itself
        # A project's slices are its own.
        arguments = [word for word in overrides if not (change_of_folder and word.startswith("data.n_"))]
        words = ["make", *dry_run, *stand_in, f"ARGS={' '.join(arguments)}", *words[1:]]
    elif words[2] in ("qnmixer.plan", "qnmixer.doctor"):
        words += [word for word in TINY if word.startswith(("data.", "geometry", "model"))]
        words += ["model.n_iterations=4" if "strategy=pipeline" in command else "model.n_iterations=2"]
    elif words[2] == "qnmixer.train":
        phantoms = not any(word.startswith(("data=", "experiment=paper")) for word in words)
        words += [*TINY, *(PHANTOMS if phantoms else ["data.cache_dir=cache"] * ("data=custom" not in words))]
        words += ["callbacks=none"] * ("callbacks" not in command)  # the pictures of `make train` will do
        if "model.n_iterations" not in command:
            words.append("model.n_iterations=2")
        if "hydra/sweeper=search" in command:
            words.append("hydra.sweeper.n_trials=1")
        if "resume=" in command:  # two steps more than it has
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(place)
                resumed = latest() if "resume=latest" in words else place / "run"
                steps = json.loads((resumed / "results.json").read_text())["steps"]
            words = [*words[:3], *command.split()[3:], f"trainer.max_steps={2 + steps}"]
    elif words[2] == "qnmixer.calibrate" and "geometry=" in command:
        words.append("geometry.n_views=56")
    elif words[2] == "qnmixer.robustness":
        words += ["n_slices=1", "data.cache_dir=cache", "evaluation.tv_weight=null", "photons=[1e5]", "logger=csv"]
    elif words[2] == "qnmixer.evaluate" and "data=" in command:
        words.append("data.cache_dir=cache")
    if words[0] == "make":
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(place / "my_ct" / "src")}
        process = subprocess.run(words, cwd=place, capture_output=True, text=True, env=environment)
        assert process.returncode == 0, f"{shlex.join(words)}\n{process.stdout}\n{process.stderr}"
        return
    # In this process, by the call that the module makes: to load torch for each command would take longer than all.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place / change_of_folder.removeprefix("cd "))
        patch.setattr(sys, "argv", words[2:])
        patch.setenv(TRACEBACK, "1")
        importlib.import_module(words[2]).main()


@pytest.mark.slow
@pytest.mark.xdist_group("readme")
@pytest.mark.parametrize("command", [marked(command) for command in commands()])
def test_command(command: str, place: Path, warm: Warm) -> None:
    run(command, place, warm)


def test_the_sinograms_of_the_docs_are_those_of_the_images(tmp_path: Path) -> None:
    """−log of transmission behind water of 0.0206 /mm, as a scanner measures it."""
    hu, projector = phantom(32, seed=0, part="test", index=0), build_projector(parse(compose("train", TINY)))
    attenuation = torch.from_numpy(0.0206 * (hu + 1000) / 1000)[None, None]
    (tmp_path / "test").mkdir()
    np.save(tmp_path / "test" / "1_hu.npy", hu)
    np.save(tmp_path / "test" / "1_scan.npy", projector(attenuation)[0, 0].numpy())
    namespace: dict[str, Any] = {}
    exec(own("my_scans.py"), namespace)
    slices = namespace["MyScans"]("test", tmp_path, 2000.0, water=0.0206)
    x = torch.from_numpy(slices.load(0) + 1000)[None, None] / 3000
    np.testing.assert_allclose(slices.sinogram(0), projector(x)[0, 0], rtol=1e-4, atol=1e-2)
