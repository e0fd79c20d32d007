"""Which tests count as equal: in the tables of `compare`, and as training slices in `evaluate`."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qnmixer.data.cache import to_square
from qnmixer.data.phantoms.phantoms import phantom
from qnmixer.evaluation.evaluate_config import EvaluateConfig
from qnmixer.evaluation.evaluate_run import on_test
from qnmixer.evaluation.pictures import MethodImages, SliceImages
from qnmixer.evaluation.scores import titles_of, used_in_training
from qnmixer.runs.terminal import Console
from qnmixer.settings.compose import compose
from qnmixer_studies.comparison.compare import compare
from qnmixer_studies.comparison.compare_config import CompareConfig
from qnmixer_studies.comparison.methods import ComparedMethod, Comparison
from qnmixer_studies.comparison.report import write_comparison

from ...conftest import TINY
from .test_compare import write_sweep

pytestmark = pytest.mark.xdist_group("equal tests")  # their jobs are evaluated once

Change = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
SIZE = 128
JOB = ["data=numpy", "noise=field", "data.seed=7", "seed=1"]
FBP = [word for word in TINY if not word.startswith("model.")] + ["model=fbp"]  # what is tested does not matter


@cache
def slice_hu(number: int) -> np.ndarray[Any, Any]:
    return phantom(SIZE, seed=0, part="test", index=number).round()


def write_folder(root: Path, change: Change = np.asarray, first: int = 0, names: str = "p") -> Path:
    """Five patients with two slices each."""
    for number in range(5):
        (root / f"{names}{number}").mkdir(parents=True)
        for k in range(2):
            hu = change(slice_hu(first + 2 * number + k)).astype(np.float32)
            np.save(root / f"{names}{number}" / f"{k}.npy", hu)
    return root


def pad(hu: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.pad(hu, ((9, 30), (20, 19)), constant_values=-1024)


def smaller(hu: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return to_square(hu.astype(np.float32), 96)


PAIRS: dict[str, tuple[dict[str, Any], list[str], str, str]] = {
    # name: how the other folder is written, other words of its job, in what compare says that the tests differ, and of
    # how many slices evaluate says that they (6 of train, 2 of val, 2 of test) were used in training
    "same": ({}, [], "", "6 of the slices were used"),
    "renamed": ({"names": "q"}, [], "", "6 of the slices were used"),
    "other slices": ({"first": 40}, [], "slices", ""),
    "other scan": ({}, ["geometry.n_views=12"], "scan", "6 of the slices were used"),
    "other noise": ({}, ["noise=field", "noise.photons=2e4"], "noise", "6 of the slices were used"),
    "no noise": ({}, ["noise=none"], "noise", "6 of the slices were used"),
    "other seed": ({}, ["seed=2"], "", "6 of the slices were used"),
    "other split": ({}, ["data.seed=8"], "slices", "6 of the slices were used"),
    "finer simulation": ({}, ["data.simulation_factor=2"], "scan", "6 of the slices were used"),
    "other scale": ({}, ["data.hu_max=1500"], "slices", "6 of the slices were used"),
    "other grid": ({}, ["data.image_size=32", "geometry.detector_pitch=20"], "slices and scan", "6 of the slices were"),
    "resampled": ({"change": smaller}, [], "slices", "6 of the slices look like training slices"),
    "flipped": ({"change": np.fliplr}, [], "slices", "6 of the slices were used"),
    "turned": ({"change": np.rot90}, [], "slices", "6 of the slices were used"),
    "padded": ({"change": pad}, [], "slices", "6 of the slices were used"),
    "flipped and resampled": ({"change": lambda hu: smaller(np.fliplr(hu))}, [], "slices", "6 of the slices look like"),
}


EVALUATE = ["data=numpy", "data.split=all", "data.num_workers=0"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, ComparedMethod]]:
    """The folder of a job for each name, the first one trained on slices of its own, and their evaluations."""
    place = tmp_path_factory.mktemp("pairs")
    words = [[*TINY, *JOB, f"data.root={write_folder(place / 'ct')}"]]
    for name, (written, others, _, _) in PAIRS.items():
        root = write_folder(place / name.replace(" ", "_"), **written)
        words.append([*FBP, *JOB, *others, f"data.root={root}"])
    config = CompareConfig.parse(compose("compare", [f"sweep={place}/sweep", "accelerator=cpu"]))
    found = compare(config, [write_sweep(place / "sweep", words)], [])
    names = ["trained", *PAIRS]
    return place, {names[int(job.folder.name)]: replace(it, jobs=[job]) for it in found.methods for job in it.jobs}


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_said_of_a_pair_of_tests(name: str, jobs: tuple[Path, dict[str, ComparedMethod]]) -> None:
    """`compare` has a job on each; `evaluate` the weights of the first, on the slices and the noise of the second."""
    place, methods = jobs
    _, words, differs, seen = PAIRS[name]
    image = torch.zeros(16, 16)
    slice_ = SliceImages("slice 0", image, [MethodImages("A", [image])], [-160, 240])
    shown = {(methods["trained"].jobs[0].test, 0): slice_}
    found = Comparison([place / "sweep"], [methods["trained"], methods[name]], titles_of({}), shown)
    assert len(found.tables) == 1 + bool(differs)
    number = [*PAIRS].index(name) + 1
    says = f"which differ in {differs}, so each has its own table. Jobs of test 1: sweep/0; test 2: sweep/{number}"
    assert found.warning == (f"Jobs had other tests, {says}" if differs else "")
    if not differs:  # their slices are paired
        write_comparison(place / "out", found, Console(quiet=True))
        assert "## Differences" in (place / "out" / "comparison.md").read_text()
    overrides = [*EVALUATE, f"data.root={place}/{name.replace(' ', '_')}", *(word for word in words if "noise" in word)]
    config = EvaluateConfig.parse(compose("evaluate", [f"run={place}/sweep/0", "accelerator=cpu", *overrides]))
    _, slices, before = on_test(config, config.run, overrides)
    said = used_in_training(slices.trained("test", before))
    assert [line.startswith(seen) for line in said] == [True] * bool(seen)
