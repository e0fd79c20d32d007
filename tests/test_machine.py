"""Cores and memory as the machine and the files of a control group give them."""

import math
import os
from pathlib import Path

import pytest
import torch

from qnmixer import machine
from qnmixer.errors import GeometryError
from qnmixer.machine import n_cores, threads_each, wait_briefly
from qnmixer.parallel.device_memory import MIB, memory_of
from qnmixer.parallel.devices import choose_device
from qnmixer.physics import FanBeamGeometry, FanBeamProjector

from .conftest import environment
from .warm import Warm

# In a process of its own, as a command is: with Python's thresholds, and nothing frozen.
LOADS = """
import gc, sys
gc.unfreeze()
gc.set_threshold(700, 10, 10)
from qnmixer.machine import collect_garbage_as_before, collect_garbage_rarely
usual = gc.get_threshold()
collect_garbage_as_before()  # in a program, which no command has started
assert gc.get_freeze_count() == 0
collect_garbage_rarely()
collect_garbage_rarely()
assert gc.get_threshold()[0] > 20 * usual[0]
from qnmixer.settings.compose import compose
from qnmixer.settings.run import parse
from qnmixer.training.worker import function_that_trains
function_that_trains(parse(compose("train", ["experiment=demo"])))
assert gc.get_threshold() == usual
assert gc.get_freeze_count() > 300_000
assert "pydicom" not in sys.modules
"""
SLURM = "0::/slurm/job_7/step_0\n"
V1 = "4:memory:/docker/ab\n"


def test_cores_of_others_on_a_cluster_are_not_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert [threads_each(n) for n in (1, 2, 3, 4)] == [3, 1, 1, 1]
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert threads_each(4) == 16


@pytest.mark.slow
def test_a_command_looks_for_garbage_rarely_until_it_trains_and_training_needs_no_dicom(cold: Warm) -> None:
    assert cold.run("-c", LOADS, cwd=Path.cwd(), env=environment()).returncode == 0


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY"])
def test_how_threads_wait_is_left_to_a_user_who_set_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    wait_briefly()
    assert os.environ == before
    monkeypatch.delenv(name)
    wait_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.delenv("GOMP_SPINCOUNT")


@pytest.mark.parametrize(("groups", "files", "n", "memory"), [
    (None, {}, 64, math.inf),
    ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n"}, 64, math.inf),
    ("0::/\n", {"cpu.max": "150000 100000\n", "memory.max": "1048576\n"}, 1, MIB),
    (SLURM, {"slurm/job_7/memory.max": "1048576\n", "slurm/job_7/step_0/memory.max": "max\n"}, 64, MIB),
    (V1, {"memory/memory.limit_in_bytes": "1048576"}, 64, math.inf),
], ids=["no Linux", "no limit", "docker", "slurm", "version 1"])  # fmt: skip
def test_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str | None, files: dict[str, str], n: int, memory: float
) -> None:
    monkeypatch.setattr(machine, "_OWN_GROUP", tmp_path / "groups")
    monkeypatch.setattr(machine, "_ALL_GROUPS", tmp_path)
    if groups is not None:
        (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert n_cores() == n
    assert machine.memory() == min(memory, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if n == 1:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(4)
            choose_device("cpu")
            assert torch.get_num_threads() == 1
        finally:
            torch.set_num_threads(before)
    if math.isfinite(memory):
        assert memory_of(torch.device("cpu")) * MIB <= memory // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        with pytest.raises(GeometryError, match="this machine has 0 GiB"):
            FanBeamProjector(FanBeamGeometry.paper(image_size=256, n_views=64))
