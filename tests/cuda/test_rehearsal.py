"""Training steps on fake CUDA tensors (`rehearsal.py`): checks for GPUs that need no GPU.

python -m tests.cuda.rehearsal --by-file experiment=demo    # where the operators of a step come from
"""

import json
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_cuda")]

BUDGET = {
    "demo": 1800,
    "qn_mixer": 910,
    "qn_mixer_paper": 605,
    "learn": 175,
    "learned_primal_dual": 195,
    "regformer": 315,
    "fbpconvnet": 240,
}
"""Most operators of a training step, memory=keep in 32, with T = 2; of the demo as it is. Lower them with the code."""

TIMES = {"keep": 1.0, "recompute": 1.25, "offload": 1.65, "32": 1.0, "16-mixed": 1.65, "bf16-mixed": 1.6}
"""Most operators with a memory mode and a precision, as multiples of those."""

WITHIN = dict.fromkeys(BUDGET, 0.01) | {"regformer": 0.025}
"""Of the plan's bytes. RegFormer's backward has one map more than the plan, which is run with operators of the CPU."""

DEMO = ("experiment=demo",)
MODELS = [model for model in BUDGET if model != "demo"]
MEMORY, PRECISION = ("keep", "recompute", "offload"), ("32", "16-mixed", "bf16-mixed")
Job = tuple[tuple[str, ...], str | None]  # overrides, and what is planted into each iteration


def overrides_of(model: str, memory: str = "keep", precision: str = "32") -> tuple[str, ...]:
    iterations = [] if model == "fbpconvnet" else ["model.n_iterations=2"]
    return (*DEMO, f"model={model}", *iterations, f"memory={memory}", f"trainer.precision={precision}")


EVERY = [
    *product(["qn_mixer"], MEMORY, PRECISION),
    ("qn_mixer_paper", "keep", "32"),
    *product(MODELS[2:], MEMORY, PRECISION[:1]),
    *product(MODELS[2:], MEMORY[:1], PRECISION[1:]),
]
NOISY = (
    (*overrides_of("learn"), "noise=field"),
    (*overrides_of("learn"), "noise=physical", "data.simulation_factor=2"),
    (*overrides_of("learn"), "noise=mixed"),
)
FAULTS = ("wrong device", ".item()", "float64", "doubled loop", "kept tensor", "more each time")
JOBS: list[Job] = [
    (DEMO, None),
    *((overrides_of(*which), None) for which in EVERY),
    *((overrides, None) for overrides in NOISY),
    *((overrides_of("learn"), fault) for fault in FAULTS),
]
REPEATED: list[Job] = [(overrides_of("qn_mixer"), None), (overrides_of("learn"), "more each time")]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[Job, dict[str, Any]]:
    """All jobs, in one child process, as what makes it believe in a GPU cannot be undone."""
    if shutil.which("g++") is None:
        pytest.skip("fake CUDA takes a C++ compiler: there is no g++ here")
    if torch.version.cuda is not None:
        pytest.skip("fake CUDA takes torch's CPU build: make test-gpu checks the same on a GPU")
    jobs = tmp_path_factory.mktemp("fake_cuda") / "jobs.json"
    words = [{"overrides": job[0], "fault": job[1], "n_steps": 3 if job in REPEATED else 2} for job in JOBS]
    jobs.write_text(json.dumps(words))
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.rehearsal", "--jobs", str(jobs)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(JOBS, map(json.loads, done.stdout.splitlines()), strict=True))


def ours(found: dict[str, int]) -> dict[str, int]:
    """What is not torch's GradScaler, which reads whether it has to skip the step, and scales in float64."""
    return {where: n for where, n in found.items() if "torch/amp/grad_scaler.py" not in where}


def n_operators(found: dict[str, Any]) -> int:
    return sum(found["operators"].values())


@pytest.mark.parametrize(("model", "memory", "precision"), EVERY)
def test_a_step_stays_on_the_device(
    rehearsed: dict[Job, dict[str, Any]], model: str, memory: str, precision: str
) -> None:
    """It runs, waits for nothing, computes nothing in float64, and takes the bytes of the plan."""
    found = rehearsed[overrides_of(model, memory, precision), None]
    assert "error" not in found, found["traceback"]
    assert found["foreign"] == {}
    assert ours(found["waits"]) == {}
    assert ours(found["float64"]) == {}
    assert found["peak"] == pytest.approx(found["planned"], rel=WITHIN[model])
    assert n_operators(found) <= BUDGET[model] * TIMES[memory] * TIMES[precision]


def test_the_demo_has_no_more_operators_than_it_may(rehearsed: dict[Job, dict[str, Any]]) -> None:
    assert n_operators(rehearsed[DEMO, None]) <= BUDGET["demo"]


def test_each_step_does_what_the_last_one_did(rehearsed: dict[Job, dict[str, Any]]) -> None:
    """The same operators in the same order, of the same shapes, as `trainer.cuda_graph=true` needs."""
    assert rehearsed[overrides_of("qn_mixer"), None]["change"] is None


@pytest.mark.parametrize("overrides", NOISY, ids=lambda overrides: "-".join(overrides[5:]))
def test_noise_is_not_waited_for(rehearsed: dict[Job, dict[str, Any]], overrides: tuple[str, ...]) -> None:
    found = rehearsed[overrides, None]
    assert "error" not in found, found["traceback"]
    assert (found["waits"], found["float64"], found["foreign"]) == ({}, {}, {})


def test_what_is_planted_is_found(rehearsed: dict[Job, dict[str, Any]]) -> None:
    """Each claim above fails where it should."""
    plain = overrides_of("learn")
    assert "FakeTensorDeviceMismatchError" in rehearsed[plain, "wrong device"]["error"]
    assert rehearsed[plain, ".item()"]["waits"] == {".item() in models/unrolled.py": 2}
    assert rehearsed[plain, "float64"]["float64"].keys() == {"_to_copy in models/unrolled.py", "_to_copy in autograd"}
    assert n_operators(rehearsed[plain, "doubled loop"]) > BUDGET["learn"]
    assert rehearsed[plain, "more each time"]["change"].startswith("forward: add -> ")
    kept = rehearsed[plain, "kept tensor"]
    assert kept["peak"] > 1.01 * kept["planned"]
