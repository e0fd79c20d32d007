"""Cores that other programs use, measured beside a program that is busy."""

import os
import subprocess
import sys
import time

import pytest

from qnmixer.engine.processes.cores import CoreUse, threads_each, wait_briefly

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how busy each core is")


@linux
def test_a_busy_program_takes_a_core_and_our_own_work_takes_none() -> None:
    cores = len(os.sched_getaffinity(0))
    alone, end = CoreUse(), time.monotonic() + 0.5
    while time.monotonic() < end:  # our own work
        pass
    free_alone = alone.free()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        beside = CoreUse()
        time.sleep(0.5)
        free_beside = beside.free()
    finally:
        busy.kill()
        busy.wait()
    assert free_alone is not None
    assert free_beside is not None
    # Other tests may run meanwhile. So a machine that is full shows no difference.
    assert 0 <= free_beside <= cores - 0.4
    assert free_beside < free_alone + 0.1


@linux
def test_cores_of_others_on_a_cluster_are_not_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert [threads_each(n) for n in (1, 2, 3, 4)] == [3, 1, 1, 1]
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert threads_each(4) == 16


def test_a_system_that_does_not_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert CoreUse().free() is None


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
