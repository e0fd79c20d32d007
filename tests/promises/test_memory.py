"""Promise 4: Peak memory flat in T under recompute; plan within 5 % of a real step; out of memory is answered with
overrides that fit.

What `plan` says, and runs whose memory does not suffice.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qnmixer.data.phantoms.phantoms import phantom
from qnmixer.parallel.device_memory import MIB

from ..conftest import TINY as COMMON
from ..conftest import environment, python
from ..memory.test_plan import SIMPLE, SMALL
from ..saved import save
from ..warm import Warm
from .commands import Command

pytestmark = pytest.mark.slow


def test_the_command_prints_one_object(command: Command, tmp_path: Path) -> None:
    outcome = command(tmp_path, "plan", *SMALL, "model.n_iterations=2", "format=json")
    assert (outcome.code, outcome.stderr) == (0, "")
    plan = json.loads(outcome.stdout)
    assert {"parameters", "gradients", "optimizer", "activations"} <= set(plan["parts"])
    assert sum(plan["parts"].values()) == pytest.approx(plan["peak_mib"], abs=0.01)
    assert 0 < plan["per_iteration_mib"] < plan["peak_mib"]
    assert (plan["strategy"], plan["devices"]) == ("single", [plan["peak_mib"]])
    assert "idle_share" not in plan


def test_the_command_prints_tables_and_leaves_nothing(command: Command, tmp_path: Path) -> None:
    outcome = command(tmp_path, "plan", *SMALL, *SIMPLE.split(), "strategy=pipeline", "device=1.2")
    assert (outcome.code, outcome.stderr) == (0, "")
    pipeline_words = ["on 4 devices, assumed", "in flight", "sequential", "idle"]
    for word in ["recompute", "16-mixed, bf16-mixed", "batch 8", "adamw", "1.2", *pipeline_words]:
        assert word in outcome.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build maps more address space than the limit")
def test_a_run_that_does_not_fit_ends_with_one_line(warm: Warm, tmp_path: Path) -> None:
    """A real allocation that the system refuses."""
    limit = 3 * 2**30
    program = f"""
import resource, runpy
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
runpy.run_module("qnmixer.train", run_name="__main__", alter_sys=True)
"""
    command = ["-c", program, *SMALL, "model.n_iterations=2", "data.image_size=128", "data.batch_size=96", "logger=csv"]
    command += ["model.channels=64", "data.num_workers=0", "trainer.max_steps=2", "trainer.accelerator=cpu"]
    command += ["data.n_train=96", "data.n_val=1", "data.n_test=1", f"hydra.run.dir={tmp_path}"]
    process = warm.run(*command, cwd=tmp_path)
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: out of memory: a step of this run needs")
    assert float(re.search(r"but ([\d,]+) MiB", line)[1].replace(",", "")) < limit / MIB  # type: ignore[index]
    assert "try memory=recompute (" in line


# Everything is imported and then the address space ends so many MiB above what it takes.
_LIMITED = """
import resource, sys
import qnmixer.reconstruction.reconstruct
from qnmixer.reconstruct import main
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = now + int(sys.argv.pop(1)) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is read from /proc")
def test_a_batch_that_does_not_fit_is_halved(tmp_path: Path) -> None:
    """Real allocations that the system refuses, 150 MiB above what is there."""
    save(tmp_path / "a", *COMMON, "data.image_size=128", "model.n_iterations=1", "model.channels=32")
    np.save(tmp_path / "a.npy", np.stack([phantom(32, seed=0, part="test", index=k) for k in range(64)]))
    # Freed memory goes back to the system. Else it depends on chance how much of the address space is left.
    variables = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    words = ["run=a", "input=a.npy", "output=out", "accelerator=cpu", "formats=[npy]", "batch_size=64"]
    process = python(tmp_path, "-c", _LIMITED, "150", *words, **variables)
    assert process.returncode == 0, process.stderr
    lines = process.stderr.splitlines()
    matches = [
        re.fullmatch(r"warning: out of memory with (\d+) slices at once: .* batch_size=(\d+)", line) for line in lines
    ]
    assert matches
    assert matches[0][1] == "64"  # type: ignore[index]
    assert all(match and int(match[2]) == int(match[1]) // 2 for match in matches)
    assert len(list((tmp_path / "out").glob("*.npy"))) == 64


_PEAK = """
import runpy
try:
    runpy.run_module("qnmixer.reconstruct", run_name="__main__")
finally:
    with open("/proc/self/status") as status:
        print(*(line.split()[1] for line in status if line.startswith("VmHWM:")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_long_series_needs_the_memory_of_a_short_one(warm: Warm, tmp_path: Path) -> None:
    """All its slices together have 100 MiB."""
    save(tmp_path / "a", *COMMON)
    hu, peaks = phantom(512, seed=0, part="test", index=0).astype(np.float32), []
    for n in (10, 100):
        (folder := tmp_path / str(n)).mkdir()
        for k in range(n):
            np.save(folder / f"{k}.npy", hu)
        words = ["run=a", f"input={n}", f"output=out{n}", "accelerator=cpu", "formats=[npy]"]
        process = warm.run("-c", _PEAK, *words, cwd=tmp_path, env=environment())
        assert process.returncode == 0, process.stderr
        peaks.append(int(process.stdout.splitlines()[-1]))
    assert len(list((tmp_path / "out100").iterdir())) == 100
    assert peaks[1] == pytest.approx(peaks[0], rel=0.08)
