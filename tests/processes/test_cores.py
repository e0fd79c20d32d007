import os

import pytest

from qnmixer.engine.processes.cores import threads_each, wait_briefly


def test_cores_of_others_on_a_cluster_are_not_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert [threads_each(n) for n in (1, 2, 3, 4)] == [3, 1, 1, 1]
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert threads_each(4) == 16


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
