"""Planted faults that the checklist of `qnmixer.doctor` must name."""

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from qnmixer.engine.checkup.checks import (
    Check,
    check_communication,
    check_finite,
    check_growth,
    check_run,
    checkpoint_bytes,
    checkup,
    compare_gradients,
    shared_memory_needed,
    sharing_problems,
    shortened,
)
from qnmixer.engine.checkup.rank import STEPS, Report, held
from qnmixer.engine.data.dataset import EpochSampler
from qnmixer.engine.parallel.devices import resolve_devices

from ..conftest import TinyConfig
from ..nvidia import fake_nvidia_smi
from ..warm import Warm

CPU = torch.device("cpu")
TWO = ["strategy=ddp", "trainer.devices=2"]

# A module of the user's own, which is wrong on single ranks: rank 1 does not reduce its gradient and takes a sample
# twice, rank 0 keeps its losses with their graphs.
FAULTY = """
import os
import torch.distributed as dist
from qnmixer.engine.data.dataset import EpochSampler
from qnmixer.module import ReconstructionModule

RANK, order = os.environ.get("RANK"), EpochSampler.__iter__

def twice(self):
    picks = list(order(self))
    if self.shuffle:
        picks[-1] = picks[-1]._replace(n=picks[0].n)
    return iter(picks)

def unreduced(state, bucket):
    own = bucket.buffer().clone()
    bucket.buffer().div_(dist.get_world_size())  # as ddp does
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda _: own)

if RANK == "1":
    EpochSampler.__iter__ = twice

class Module(ReconstructionModule):
    kept = []

    def on_train_start(self):
        if RANK == "1":
            self.trainer.strategy.model.register_comm_hook(None, unreduced)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if RANK == "0":
            self.kept.append(loss)
        return loss
"""
ENDING = """
import os, time
from qnmixer.module import ReconstructionModule as Module

if os.environ.get("RANK") == "1":
    {fault}
"""


@pytest.fixture
def own(tiny_config: TinyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """own(code): the config of two ranks whose module this code defines."""

    def config(code: str) -> Any:
        name = f"own_module_{abs(hash(code))}"
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        return resolve_devices(tiny_config(*TWO, f"module._target_={name}.Module"))

    return config


def by_name(checks: list[Check]) -> dict[str, Check]:
    for check in checks:
        assert (check.status == "FAIL") == bool(check.mend), check.line()
        assert "\n" not in check.line()
    return {check.name: check for check in checks}


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_faults_of_single_ranks_are_found_and_named(warm: Warm, own: Callable[[str], Any]) -> None:
    with warm.forking_ranks():
        checks = by_name(list(check_run(own(FAULTY))))
    assert [name for name, check in checks.items() if check.status == "FAIL"] == [
        "gradients",
        "sharding",
        "memory growth",
    ]
    assert checks["communication"].found.startswith("2 ranks: sums right")
    assert checks["gradients"].found.startswith("rank 1: ")
    assert "network." in checks["gradients"].found
    picks = list(EpochSampler(8, shuffle=True, batch_size=2, seed=42, num_replicas=2, rank=1))
    assert f"train: sample {picks[0].n} 2 times (rank 1)" in checks["sharding"].found
    assert f"train: sample {picks[-1].n} 0 times" in checks["sharding"].found
    assert checks["memory growth"].found == "rank 0: 1 more tensors with their graphs after each step"


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        pytest.param("time.sleep(600)", "no progress for 20 s in building the network", marks=pytest.mark.long),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
    ],
)
def test_a_rank_that_hangs_or_dies_is_named(warm: Warm, own: Callable[[str], Any], fault: str, found: str) -> None:
    with warm.forking_ranks():
        checks = by_name(list(check_run(own(ENDING.format(fault=fault)), patience=20)))
    assert [name for name, check in checks.items() if check.status == "FAIL"] == ["training"]
    assert checks["training"].found.startswith("rank 1")
    assert found in checks["training"].found


def test_ranks_that_do_not_talk_are_named(tiny_config: TinyConfig) -> None:
    fine = Report(total=(3.0, 3.0), weights=[0.5])
    for wrong, found in (
        (Report(), "rank 1: no progress for 180 s in all-reduce"),
        (Report(total=(2.0, 3.0), weights=[0.5]), "rank 1: a wrong all-reduce, (2.0, 3.0)"),
        (Report(total=(3.0, 3.0), weights=[0.7]), "rank 1: weights differ from rank 0 after three steps of ddp"),
    ):
        check = check_communication(tiny_config(*TWO), [fine, wrong], "rank 1: no progress for 180 s in all-reduce")
        assert (check.status, check.found) == ("FAIL", found)


def test_a_gpu_without_kernels_is_reported_once(
    tiny_config: TinyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvidia_smi(tmp_path, "7.0, 535.104.05")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    checks = by_name(list(checkup(tiny_config("trainer.accelerator=auto"), tmp_path)))
    assert {name: check.status for name, check in checks.items()} == {"versions": "FAIL", "training": "SKIP"}
    assert "make install TORCH=cu126, or pip install torch==" in checks["versions"].mend
    assert checks["versions"].mend.endswith(", or use trainer.accelerator=cpu")


def test_a_machine_without_gloo_memory_and_disk(
    tiny_config: TinyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first keeps training from being tried."""
    config = tiny_config(*TWO, "data.num_workers=1")
    needed = 3 * checkpoint_bytes(config)
    for free, gloo, statuses in (
        (needed, False, ["FAIL", "PASS", "PASS"]),
        (shared_memory_needed(config) - 1, True, ["PASS", "FAIL", "FAIL"]),
    ):
        monkeypatch.setattr(dist, "is_gloo_available", lambda gloo=gloo: gloo)
        usage = namedtuple("usage", "free")(free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        monkeypatch.setattr("qnmixer.engine.checkup.checks.check_run", lambda _: iter(()))
        checks = by_name(list(checkup(config, tmp_path / "new")))
        assert [checks[name].status for name in ("backend", "shared memory", "disk")] == statuses
        assert ("training" in checks) == (not gloo)
    assert "--shm-size" in checks["shared memory"].mend


def test_gradients_are_compared_by_rank_and_parameter() -> None:
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1e-9]), "c": torch.ones(2)}
    noisy = {"a": torch.tensor([3.0, 4.0]) * (1 + 1e-6), "b": torch.tensor([3e-9]), "c": torch.ones(2)}
    assert compare_gradients([expected, noisy], expected, 1e-4, 4).status == "PASS"
    missing = {"a": expected["a"], "b": expected["b"]}
    check = compare_gradients([noisy, expected, missing], expected, 1e-4, 4)
    assert check.status == "FAIL"
    assert check.found.startswith("rank 2: ")
    assert "in c," in check.found
    not_numbers = expected | {"a": torch.full((2,), torch.nan)}
    assert compare_gradients([expected, not_numbers], expected, 1e-4, 4).found.startswith("rank 1: ")


def test_samples_that_are_not_shared_out_once() -> None:
    share = [(n, 1.0) for n in range(4)]
    assert sharing_problems({0: share[:2], 2: [*share[2:], (0, 0.0)]}, 4) == []
    found = sharing_problems({0: share[:2], 2: [(2, 1.0), (1, 1.0), (4, 1.0)]}, 4)
    assert found == ["sample 1 2 times (ranks 0, 2)", "sample 3 0 times", "sample 4 1 times (rank 2)"]


def test_a_leak_is_what_every_step_adds() -> None:
    healthy = [(0, 100), (9, 10**6), (3, 10**7), (3, 10**7 + 8), (4, 10**7), (4, 10**7 + 9000)]
    report = Report(n_finite=STEPS, held=healthy)
    assert check_growth([report]).status == "PASS"
    assert check_growth([report, Report()]).status == "SKIP"
    images = Report(n_finite=STEPS, held=[(0, step * 2**20) for step in range(STEPS)])
    assert check_growth([report, images]).found == "rank 1: 1 MiB more after each step"
    before = held(CPU)
    kept = [torch.zeros(1000, requires_grad=True) * 2]
    after = held(CPU)
    assert (after[0] - before[0], after[1] - before[1] >= 4 * 1000) == (len(kept), True)


def test_steps_that_a_scaler_may_skip() -> None:
    some, all_ = Report(n_finite=2, n_skipped=3), Report(n_skipped=9, bad_gradient="w")
    assert check_finite("16-mixed", [some, some]).status == "PASS"
    assert check_finite("32", [some]).status == "FAIL"
    check = check_finite("16-mixed", [some, all_])
    assert (check.status, "rank 1" in check.found) == ("FAIL", True)
    without_scaler = check_finite("32", [Report(n_finite=4, n_skipped=1, bad_gradient="w")])
    assert "the gradient of w is not finite in 1 of 5 steps" in without_scaler.found
    assert check_finite("32", [Report()]).status == "SKIP"


def test_a_cpu_tries_fewer_iterations(tiny_config: TinyConfig) -> None:
    config = tiny_config("trainer.devices=4", "model.n_iterations=14", "strategy=ddp")
    run, words = shortened(config)
    assert (run.model.T, run.model.channels, words) == (3, config.model.channels, " (shortened on a CPU)")
    pipeline = tiny_config("trainer.devices=4", "model.n_iterations=14", "strategy=pipeline")
    assert shortened(pipeline) == (pipeline, "")
