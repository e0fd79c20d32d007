"""Planted faults that the checklist of `qnmixer.doctor` must name."""

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from qnmixer.commands.checkup.checks import (
    Check,
    check_growth,
    check_run,
    checkpoint_bytes,
    checkup,
    compare_gradients,
    shared_memory_needed,
)
from qnmixer.commands.checkup.rank import STEPS, Report, communicate, held
from qnmixer.data.dataset import EpochSampler
from qnmixer.errors import RankFailed
from qnmixer.parallel.devices import resolve_devices

from ..conftest import tiny_config
from ..nvidia import fake_nvidia_smi
from ..warm import Warm

CPU = torch.device("cpu")
TWO = ["strategy=ddp", "trainer.devices=2"]

# A module of the user's own, which is wrong on single ranks: rank 1 does not reduce its gradient and takes a sample
# twice, rank 0 keeps its losses with their graphs.
FAULTY = """
import os
import torch.distributed as dist
from qnmixer.data.dataset import EpochSampler
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
NOT_FINITE = """
from qnmixer.module import ReconstructionModule

class Module(ReconstructionModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss
"""
ENDING = """
import os, time
from qnmixer.commands.checkup import rank
from qnmixer.module import ReconstructionModule as Module

if os.environ.get("RANK") == "1":
    {fault}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """own(code): the config of two ranks whose module this code defines."""

    def config(code: str, *overrides: str) -> Any:
        name = f"own_module_{abs(hash(code))}"
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        return resolve_devices(tiny_config(*(overrides or TWO), f"module._target_={name}.Module"))

    return config


def by_name(checks: list[Check]) -> dict[str, Check]:
    for check in checks:
        assert (check.status == "FAIL") == bool(check.mend), check.line()
        assert "\n" not in check.line()
    return {check.name: check for check in checks}


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_faults_of_single_ranks_are_found_and_named(warm: Warm, own: Callable[..., Any]) -> None:
    with warm.forking_ranks():
        checks = by_name(list(check_run(own(FAULTY))))
    assert [name for name, check in checks.items() if check.status == "FAIL"] == [
        "gradients",
        "sharding",
        "memory growth",
    ]
    assert checks["communication"].status == "PASS"
    assert checks["gradients"].found.startswith("rank 1: ")
    assert "network." in checks["gradients"].found
    picks = list(EpochSampler(8, shuffle=True, batch_size=2, seed=42, num_replicas=2, rank=1))
    assert f"train: sample {picks[0].n} 2 times" in checks["sharding"].found
    assert f"train: sample {picks[-1].n} 0 times" in checks["sharding"].found
    assert checks["memory growth"].found.startswith("rank 0: 1 more tensors with graphs")


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(("fault", "found"), [
    ("rank.PATIENCE = 2\n    rank.note('importing it')\n    time.sleep(600)", "no progress for 180 s in importing it"),
    pytest.param("os.kill(os.getpid(), 11)", "was killed by SIGSEGV", marks=pytest.mark.long),
])  # fmt: skip
def test_a_rank_that_hangs_or_dies_is_named(warm: Warm, own: Callable[..., Any], fault: str, found: str) -> None:
    with warm.forking_ranks():
        checks = by_name(list(check_run(own(ENDING.format(fault=fault)))))
    assert [name for name, check in checks.items() if check.status == "FAIL"] == ["training"]
    assert checks["training"].found.startswith("rank 1")
    assert found in checks["training"].found


@pytest.mark.parametrize(("collective", "line"), [
    ("all_reduce", "a wrong all-reduce, 1.0 to 1.0 instead of 3.0"), ("broadcast", "weights differ"),
])  # fmt: skip
def test_ranks_that_do_not_talk_are_told(collective: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process stands in for two, with collectives that do nothing but what is wrong."""
    for module, name in ((dist, "init_process_group"), (dist, "all_reduce"), (dist, "broadcast")):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda module: module)
    monkeypatch.setattr("qnmixer.commands.checkup.rank.world_size", lambda: 2)
    if collective != "all_reduce":
        monkeypatch.setattr(dist, "all_reduce", lambda message: message.fill_(3))
        monkeypatch.setattr(dist, collective, lambda weights, of: weights.zero_())
    with pytest.raises(RankFailed, match=line):
        communicate("cpu")


def test_a_gpu_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, "7.0, 535.104.05")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    checks = by_name(list(checkup(tiny_config("trainer.accelerator=auto"), tmp_path)))
    assert {name: check.status for name, check in checks.items()} == {"versions": "FAIL", "training": "SKIP"}
    assert "make install TORCH=cu126, or pip install torch==" in checks["versions"].mend
    assert checks["versions"].mend.endswith(", or use trainer.accelerator=cpu")


def test_a_machine_without_gloo_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        monkeypatch.setattr("qnmixer.commands.checkup.checks.check_run", lambda _: iter(()))
        checks = by_name(list(checkup(config, tmp_path / "new")))
        assert [checks[name].status for name in ("backend", "shared memory", "disk")] == statuses
        assert ("training" in checks) == (not gloo)
    assert "--shm-size" in checks["shared memory"].mend


def test_gradients_are_compared_by_rank_and_parameter() -> None:
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1e-9]), "c": torch.ones(2)}
    noisy = {"a": torch.tensor([3.0, 4.0]) * (1 + 1e-6), "b": torch.tensor([3e-9]), "c": torch.ones(2)}
    assert compare_gradients([expected, noisy], expected, 1e-4).status == "PASS"
    missing = {"a": expected["a"], "b": expected["b"]}
    check = compare_gradients([noisy, expected, missing], expected, 1e-4)
    assert (check.status, check.found.startswith("rank 2: "), "in c," in check.found) == ("FAIL", True, True)
    not_numbers = expected | {"a": torch.full((2,), torch.nan)}
    assert compare_gradients([expected, not_numbers], expected, 1e-4).found.startswith("rank 1: ")


def test_a_leak_is_what_every_step_adds() -> None:
    healthy = [(0, 100), (9, 10**6), (3, 10**7), (3, 10**7 + 8), (4, 10**7), (4, 10**7 + 9000)]
    report = Report(held=healthy)
    assert check_growth([report]).status == "PASS"
    assert check_growth([report, Report()]).status == "SKIP"
    images = Report(held=[(0, step * 2**20) for step in range(STEPS)])
    assert check_growth([report, images]).found == "rank 1: 0 more tensors with graphs and 1 MiB more after each step"
    before = held(CPU)
    kept = [torch.zeros(1000, requires_grad=True) * 2]
    after = held(CPU)
    assert (after[0] - before[0], after[1] - before[1] >= 4 * 1000) == (len(kept), True)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32", pytest.param("16-mixed", marks=pytest.mark.long)])
def test_a_gradient_that_is_not_finite_is_named(own: Callable[..., Any], precision: str) -> None:
    """Also with a GradScaler, where no step would be taken."""
    checks = by_name(list(check_run(own(NOT_FINITE, f"trainer.precision={precision}"))))
    assert checks["finite values"].status == "FAIL"
    assert "the gradient of network." in checks["finite values"].found
