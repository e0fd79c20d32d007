"""Training steps on fake CUDA tensors (`rehearsal.py`): checks for GPUs that need no GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_cuda")]

MODELS = ["qn_mixer", "qn_mixer_paper", "learn", "learned_primal_dual", "regformer", "fbpconvnet"]
WITHIN = dict.fromkeys(MODELS, 0.01) | {"qn_mixer": 0.015, "regformer": 0.025}
"""Of the plan's bytes, which are those of operators of the CPU. RegFormer's backward has one map more on a GPU. That of
QN-Mixer, offloaded in half precision, has one vector of the latent more."""

DEMO = ("experiment=demo",)
MEMORY, PRECISION = ("keep", "recompute", "offload"), ("32", "16-mixed", "bf16-mixed")
Job = tuple[str, ...]  # overrides


def overrides_of(model: str, memory: str = "keep", precision: str = "32") -> tuple[str, ...]:
    iterations = [] if model == "fbpconvnet" else ["model.n_iterations=2"]
    return (*DEMO, f"model={model}", *iterations, f"memory={memory}", f"trainer.precision={precision}")


# Each memory mode, precision and network once: test_gpu.py has all of them together.
EVERY = [
    *(("qn_mixer", *both) for both in zip(MEMORY, PRECISION, strict=True)),
    ("qn_mixer_paper", "keep", "32"),
    *((model, "keep", "16-mixed") for model in MODELS[2:]),
]
NOISY = (
    (*overrides_of("learn"), "noise=field"),
    (*overrides_of("learn"), "noise=physical", "data.simulation_factor=2"),
    (*overrides_of("learn"), "noise=mixed"),
)
JOBS: list[Job] = [*(overrides_of(*which) for which in EVERY), *NOISY]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[Job, dict[str, Any]]:
    """All jobs, in one child process, as what makes it believe in a GPU cannot be undone."""
    if shutil.which("g++") is None:
        pytest.skip("fake CUDA takes a C++ compiler: there is no g++ here")
    if torch.version.cuda is not None:
        pytest.skip("fake CUDA takes torch's CPU build: make test-gpu checks the same on a GPU")
    jobs = tmp_path_factory.mktemp("fake_cuda") / "jobs.json"
    jobs.write_text(json.dumps(JOBS))
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.rehearsal", str(jobs)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(JOBS, map(json.loads, done.stdout.splitlines()), strict=True))


def ours(found: dict[str, int]) -> dict[str, int]:
    """What is not torch's GradScaler, which reads whether it has to skip the step, and scales in float64."""
    return {where: n for where, n in found.items() if "torch/amp/grad_scaler.py" not in where}


@pytest.mark.parametrize(("model", "memory", "precision"), EVERY)
def test_a_step_stays_on_the_device(
    rehearsed: dict[Job, dict[str, Any]], model: str, memory: str, precision: str
) -> None:
    """It runs, waits for nothing, computes nothing in float64, and takes the bytes of the plan."""
    found = rehearsed[overrides_of(model, memory, precision)]
    assert "error" not in found, found["traceback"]
    assert found["foreign"] == {}
    assert ours(found["waits"]) == {}
    assert ours(found["float64"]) == {}
    assert found["peak"] == pytest.approx(found["planned"], rel=WITHIN[model])


@pytest.mark.parametrize("overrides", NOISY, ids=lambda overrides: "-".join(overrides[5:]))
def test_noise_is_not_waited_for(rehearsed: dict[Job, dict[str, Any]], overrides: tuple[str, ...]) -> None:
    found = rehearsed[overrides]
    assert "error" not in found, found["traceback"]
    assert (found["waits"], found["float64"], found["foreign"]) == ({}, {}, {})
