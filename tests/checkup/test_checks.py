"""Planted faults that the checklist of `qnmixer.doctor` must name, and healthy runs without any FAIL."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qnmixer.build import build_data_module
from qnmixer.checkup.checks import (
    check_communication,
    check_finite,
    check_training,
    checkup,
    compare_gradients,
    sharing_problems,
    shortened,
)
from qnmixer.checkup.machine import (
    Check,
    check_backend,
    check_disk,
    check_precision,
    check_shared_memory,
    check_versions,
    checkpoint_bytes,
    shared_memory_needed,
)
from qnmixer.checkup.rank import GROWTH_STEPS, Report, reference_gradients, short_leak_watch, small_network, untrained
from qnmixer.config import parse, to_plain
from qnmixer.data.sampler import EpochSampler
from qnmixer.errors import DataError
from qnmixer.models.incept_mixer import InceptMixer
from qnmixer.module import ReconstructionModule
from qnmixer.parallel.devices import resolve_devices

from ..conftest import TINY_RUN, TinyConfig
from ..nvidia import fake_nvidia_smi
from ..warm import FORK_RANKS, Warm

NAMES = [
    "versions", "precision", "devices", "backend", "shared memory", "disk", "communication", "training", "gradients",
    "sharding", "memory growth", "finite values",
]  # fmt: skip

# Runs when a Python process starts, and changes a module of it as soon as that is imported.
PLANTER = """
import importlib.machinery, os, sys, time
RANK = os.environ.get("RANK")

class Planter:
    def find_spec(self, name, path=None, target=None):
        if name not in PLANTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), PLANTS[name](module))
        return spec

sys.meta_path.insert(0, Planter())
"""
AT_ONCE = """
for name in PLANTS.keys() & sys.modules.keys():  # in a Python that has loaded them
    PLANTS[name](sys.modules[name])
"""
IN_TRAINING = """
def in_training(*plants):
    left = [*plants]  # a checkup builds several trainers
    def plant(module):
        build = module.build_trainer
        def build_trainer(*args):
            while left:
                left.pop()()
            return build(*args)
        module.build_trainer = build_trainer
    return plant
"""
UNREDUCED = """
def unreduced():
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    start = DDP.__init__
    def hook(state, bucket):
        own = bucket.buffer().clone()
        bucket.buffer().div_(dist.get_world_size())  # as ddp does
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda _: own)
    def init(self, *args, **kwargs):
        start(self, *args, **kwargs)
        if RANK == "1":
            self.register_comm_hook(None, hook)
    DDP.__init__ = init
"""
LEAKING = """
def leaking():
    from qnmixer.module import ReconstructionModule
    training_step, kept = ReconstructionModule.training_step, []
    def keeping(self, *args):
        loss = training_step(self, *args)
        if RANK == "0":
            kept.append(loss)
        return loss
    ReconstructionModule.training_step = keeping
"""
DUPLICATED = """
def duplicated():
    from qnmixer.data.sampler import EpochSampler
    order = EpochSampler.__iter__
    def twice(self):
        picks = list(order(self))
        if RANK == "1" and self.shuffle:
            picks[-1] = picks[-1]._replace(n=picks[0].n)
        return iter(picks)
    EpochSampler.__iter__ = twice
"""


def plant(folder: Path, code: str) -> dict[str, str]:
    """What to add to the environment so that this code runs at the start of each process."""
    (folder / "sitecustomize.py").write_text(f"{PLANTER}{code}\n{AT_ONCE}")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def by_name(checks: list[Check]) -> dict[str, Check]:
    for check in checks:
        assert (check.status == "FAIL") == bool(check.mend), check.line()
        assert "\n" not in check.line()
    return {check.name: check for check in checks}


def test_slices_that_cannot_be_read_fail_with_their_own_fix(
    tiny_config: TinyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_slices(*_: object) -> None:
        raise DataError("data.root=/ct has no usable slice: give another folder")

    monkeypatch.setattr("qnmixer.checkup.checks.train_a_little", without_slices)
    first = next(check_training(resolve_devices(tiny_config())))
    assert (first.status, first.mend) == ("FAIL", "give another folder")


def test_a_gpu_that_torch_cannot_use_fails_with_the_fix() -> None:
    problem = "torch 2.13.0+cpu is built for the CPU", "make install TORCH=cu126"
    check = check_versions(problem, None)
    assert check.status == "FAIL"
    assert check.found.endswith(problem[0])
    assert check.mend == "make install TORCH=cu126, or trainer.accelerator=cpu"
    assert check_versions(None, "H200").found.endswith("built for H200")
    assert check_versions(None, None).status == "SKIP"


def test_a_gpu_without_kernels_is_reported_once(
    tiny_config: TinyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvidia_smi(tmp_path, "7.0, 535.104.05")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    checks = by_name(list(checkup(tiny_config("trainer.accelerator=auto"), tmp_path)))
    assert {name: check.status for name, check in checks.items()} == {
        "versions": "FAIL", "precision": "PASS", "devices": "SKIP", "training": "SKIP"
    }  # fmt: skip
    assert "make install TORCH=cu126, or pip install torch==" in checks["versions"].mend


def test_bf16_on_a_card_without_it() -> None:
    check = check_precision("bf16-mixed", "Tesla V100", bf16=False)
    assert (check.status, check.mend) == ("FAIL", "trainer.precision=16-mixed, or 32")
    assert "Tesla V100" in check.found
    assert check_precision("bf16-mixed", "H200", bf16=True).status == "PASS"
    assert check_precision("16-mixed", "Tesla V100", bf16=False).status == "PASS"


def test_a_backend_that_is_not_there(tiny_config: TinyConfig) -> None:
    several = tiny_config("strategy=ddp", "trainer.devices=2")
    assert check_backend(several, nccl=False, gloo=True).status == "PASS"
    assert "no gloo" in check_backend(several, nccl=True, gloo=False).found
    on_cuda = tiny_config("strategy=ddp", "trainer.devices=2", "trainer.accelerator=cuda")
    assert "no nccl" in check_backend(on_cuda, nccl=False, gloo=True).found


def test_shared_memory_for_the_batches_of_all_workers(tiny_config: TinyConfig) -> None:
    given = ["strategy=ddp", "trainer.devices=2", "data.num_workers=3", "data.prefetch_factor=4"]
    needed = shared_memory_needed(tiny_config(*given))
    assert needed == 2 * 3 * 4 * (2 + 2) * 4 * 16 * 16  # batches of 2 for training and for validation
    assert check_shared_memory(needed, needed).status == "PASS"
    assert "--shm-size" in check_shared_memory(needed - 1, needed).mend
    assert check_shared_memory(None, needed).status == "SKIP"
    # Slices come with finer ones to simulate from, or with their noisy sinograms.
    assert shared_memory_needed(tiny_config(*given, "data.simulation_factor=2")) == 5 * needed
    noisy = tiny_config(*given, "data.simulation_factor=2", "noise=field", "geometry.n_detectors=64")
    assert shared_memory_needed(noisy) == needed + needed * 8 * 64 // 16**2


def test_disk_for_weights_and_optimizer(tiny_config: TinyConfig, tmp_path: Path) -> None:
    adamw, sgd, ema = (
        checkpoint_bytes(tiny_config(given)) for given in ("optimizer=adamw", "optimizer=sgd", "callbacks=ema")
    )
    assert adamw == pytest.approx(1.5 * sgd, rel=0.02)  # three numbers a weight, and two
    assert ema == pytest.approx(2 * sgd, rel=0.02)
    assert check_disk(3 * adamw, adamw, tmp_path).status == "PASS"
    assert check_disk(3 * adamw - 1, adamw, tmp_path).status == "FAIL"


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
    assert sharing_problems([share[:2], [*share[2:], (0, 0.0)]], 4) == []
    assert sharing_problems([share[:2], [(2, 1.0), (1, 1.0)]], 4) == [
        "sample 1 2 times (ranks 0, 1)",
        "sample 3 missing",
    ]
    assert sharing_problems([[*share, (4, 1.0)]], 4) == ["sample 4 does not exist (rank 0)"]
    assert sharing_problems([share, share], 4, together=2) == []
    (problem,) = sharing_problems([share, share[::-1]], 4, together=2)
    assert problem == "rank 1: other samples than rank 0 of the same pipeline"


@pytest.mark.parametrize(
    ("growth", "leaks"),
    [
        (lambda step: 0.1 * step, True),
        (lambda step: 0.1 * step + 3 * (step % 7), True),
        (lambda step: 0.02 * step, False),
        (lambda step: 50.0 * min(step, 16), False),
        (lambda step: 50.0 * (step > 40), False),
        (lambda step: 3.0 * (step % 33), False),
    ],
)
def test_a_leak_is_a_steady_growth(growth: Callable[[int], float], leaks: bool) -> None:
    """MiB after each step."""
    watch = short_leak_watch()
    found = [watch.update(int(2**20 * (300 + growth(step)))) for step in range(GROWTH_STEPS)]
    assert any(found) == leaks


def test_steps_that_a_scaler_may_skip() -> None:
    some, all_ = Report(n_finite=2, n_skipped=3), Report(n_skipped=9, bad_gradient="w", not_finite="mixer (MLP)")
    assert check_finite("16-mixed", [some, some]).status == "PASS"
    assert check_finite("32", [some]).status == "FAIL"
    check = check_finite("16-mixed", [some, all_])
    assert check.status == "FAIL"
    assert "rank 1" in check.found
    assert "mixer (MLP)" in check.found
    without_scaler = check_finite("32", [Report(n_finite=4, n_skipped=1, bad_gradient="w")])
    assert "the gradient of w is not finite in 1 of 5 steps" in without_scaler.found
    assert check_finite("32", [Report()]).status == "SKIP"


@pytest.mark.parametrize(
    "overrides",
    [
        "strategy=pipeline strategy.cut=[4,4,3,3] data.batch_size=4 strategy.microbatch_size=2",
        "strategy=pipeline strategy.schedule=interleaved strategy.stages_per_device=3",
        "strategy=ddp data.batch_size=8 trainer.accumulate_grad_batches=4 model=qn_mixer_paper noise=physical",
        "strategy=fsdp model.patch_size=8 data.image_size=24 model.latent_factor=3 model.latent_channels=9",
        "strategy=ddp +trainer.limit_train_batches=3 trainer.accumulate_grad_batches=3",
    ],
)
def test_what_is_tried_is_a_valid_run(tiny_config: TinyConfig, overrides: str) -> None:
    config = tiny_config("trainer.devices=4", "model.n_iterations=14", *overrides.split())
    run, words = shortened(config)
    assert "from T 14" in words or run.model.n_iterations == 14
    assert run.model.channels == config.model.channels
    assert parse(to_plain(run)) == run
    parse(to_plain(small_network(run)))


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_faults_of_single_ranks_are_found_and_named(warm: Warm, tmp_path: Path) -> None:
    """A gradient that one rank does not reduce, a sample that one has twice, losses that one keeps with graphs."""
    plants = "PLANTS = {'qnmixer.training.trainer': in_training(unreduced, leaking, duplicated)}"
    environment = plant(tmp_path, IN_TRAINING + UNREDUCED + LEAKING + DUPLICATED + plants) | FORK_RANKS
    command = ["-m", "qnmixer.doctor", *TINY_RUN, "strategy=ddp", "trainer.devices=2", "format=json"]
    result = warm.run(*command, env={**os.environ, **environment}, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    outcome: dict[str, Any] = json.loads(result.stdout)
    assert not outcome["ok"]
    checks = by_name([Check(**check) for check in outcome["checks"]])
    assert [name for name, check in checks.items() if check.status == "FAIL"] == [
        "gradients",
        "sharding",
        "memory growth",
    ]
    assert checks["gradients"].found.startswith("rank 1: ")
    assert "network." in checks["gradients"].found
    picks = list(EpochSampler(8, shuffle=True, batch_size=2, seed=42, num_replicas=2, rank=1))
    assert f"train: sample {picks[0].n} 2 times (rank 1)" in checks["sharding"].found
    assert f"train: sample {picks[-1].n} missing" in checks["sharding"].found
    assert checks["memory growth"].found.startswith("rank 0: ")


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        pytest.param("time.sleep(600)", "no progress for 20 s", marks=pytest.mark.long),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_a_rank_that_hangs_or_dies_is_named(
    tiny_config: TinyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, found: str
) -> None:
    code = f"PLANTS = {{'qnmixer.processes.ranks': lambda m: {fault} if RANK == '1' else None}}"
    for name, value in plant(tmp_path, code).items():
        monkeypatch.setenv(name, value)
    check = check_communication(tiny_config("strategy=ddp", "trainer.devices=2"), patience=20)
    assert check.status == "FAIL"
    assert check.found.startswith("rank 1")
    assert found in check.found


def test_an_overflow_of_half_precision_names_the_module(
    tiny_config: TinyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward: Callable[[InceptMixer, Tensor], Tensor] = InceptMixer.forward

    def too_large(self: InceptMixer, x: Tensor) -> Tensor:
        features = forward(self, x)
        return features * 1e30 if features.dtype == torch.float16 else features

    monkeypatch.setattr(InceptMixer, "forward", too_large)
    config = tiny_config("trainer.precision=16-mixed", "trainer.devices=1")
    checks = by_name(list(check_training(config)))
    assert checks["finite values"].status == checks["training"].status == "FAIL"
    assert "first such output was that of regularizers.0 (InceptMixer)" in checks["finite values"].found
    assert "trainer.precision=32" in checks["finite values"].mend
    healthy = by_name(list(check_training(tiny_config("trainer.devices=1"))))
    assert {check.status for check in healthy.values()} == {"PASS"}


def test_the_gradients_of_one_process_are_those_of_a_training_step_with_a_term_of_ones_own(
    tiny_config: TinyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The term has no weights. It is a mean over the batch, as the loss."""
    whole = ReconstructionModule.training_step

    def with_term(self: ReconstructionModule, batch: Any, batch_idx: int) -> torch.Tensor:
        return whole(self, batch, batch_idx) + self.network(self.measure(batch, "train")).square().mean()

    monkeypatch.setattr(ReconstructionModule, "training_step", with_term)
    config = resolve_devices(tiny_config("data.batch_size=3"))
    batch = next(iter(build_data_module(config).train_dataloader()))
    module = untrained(config)
    module.training_step(batch, 0).backward()
    numbers = zip(batch["sample"].tolist(), batch["weight"].tolist(), strict=True)
    expected = reference_gradients(config, [(number, 3) for number in numbers], 1.0)
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)
