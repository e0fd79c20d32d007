"""data.views and data.arcs: each step of training has one of several scans."""

from typing import Any

import pytest
import torch

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.dataset import EpochSampler
from qnmixer.errors import ConfigError
from qnmixer.measurement.build import training_scans
from qnmixer.memory.plan import Planner
from qnmixer.models.data_term import follow_scan
from qnmixer.module import ReconstructionModule
from qnmixer.module.build import build_module

from ..conftest import config_of, tiny_config, tiny_module

SCANS = ["data.views=[6,8]", "data.arcs=[150,360]"]


def gradients(module: ReconstructionModule, batch: Any) -> list[torch.Tensor]:
    module.zero_grad()
    module.training_step(batch, 0).backward()
    return [p.grad.clone() for p in module.network.parameters() if p.grad is not None]


def test_a_step_at_another_scan_is_that_of_a_network_of_this_scan() -> None:
    """To the gradient: λ_t is absolute there, so the derivative has its factor. Then validation has the run's scan."""
    module = tiny_module(*SCANS)
    batch = next(iter(SliceDataModule(module.config.data).loader("train")))
    at_home = tiny_module()
    at_home.network.load_state_dict(module.network.state_dict())
    seen = set()
    for number, config in enumerate(training_scans(module.config)):
        batch["scan"] = torch.full_like(batch["scan"], number)
        there = build_module(config)
        there.network.load_state_dict(module.network.state_dict())
        factor = follow_scan(there.network, at_home.projector)
        expected = gradients(there, batch)
        sizes = {id(p) for p in there.network.step_sizes}
        factors = [factor if id(p) in sizes else 1.0 for p in there.network.parameters() if p.grad is not None]
        for gradient, reference, scale in zip(gradients(module, batch), expected, factors, strict=True):
            torch.testing.assert_close(gradient, scale * reference, rtol=1e-3, atol=1e-6)
        seen.add(module.measure(batch, "train").shape)
        module.on_train_batch_end(None, batch, 0)
        y = at_home.measure(batch, "val")
        assert torch.equal(module.network(y), at_home.network(y))
        batch.pop("sinogram", None)
    assert len(seen) == 2


def scans_of_steps(seed: int, n_processes: int, start: int = 0) -> list[set[int]]:
    """The scans of all samples of each optimizer step of two epochs, over all processes."""
    config = tiny_config(*SCANS, f"seed={seed}", "data.n_train=10", "trainer.accumulate_grad_batches=2").data
    dataset = SliceDataModule(config).dataset("train")
    samples: list[list[list[int]]] = []
    for rank in range(n_processes):
        share = {"num_replicas": n_processes, "rank": rank, "batch_size": 2 // n_processes, "accumulate": 2}
        sampler = EpochSampler(len(dataset), shuffle=True, seed=seed, **share)
        sampler.start_at(0, start * 2)
        steps = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            numbers = [dataset[pick]["scan"] for pick in sampler]
            n = 4 // n_processes
            steps += [numbers[k : k + n] for k in range(0, len(numbers), n)]
        samples.append(steps)
    return [{number for part in step for number in part} for step in zip(*samples, strict=True)]


def test_the_scan_of_a_step_follows_from_seed_and_step() -> None:
    """Alike for all samples of a step, any number of processes, and a run that is resumed."""
    of_one = scans_of_steps(1, 1)
    assert all(len(scans) == 1 for scans in of_one)
    assert len(set.union(*of_one)) > 1
    assert of_one == scans_of_steps(1, 2)
    assert of_one[1:] == scans_of_steps(1, 1, start=1)
    assert of_one != scans_of_steps(2, 1)


def test_the_plan_is_for_the_largest_scan_with_the_matrices_of_all() -> None:
    """The step that has most views; and real buffers, each storage once."""
    words = ["noise=none", "data.simulation_factor=2"]
    config = tiny_config(*SCANS, *words)
    module = build_module(config)
    batch = next(iter(SliceDataModule(config.data).loader("train")))
    for number in range(config.data.n_scans):  # A of the finer grid is built when it is first used
        module.measure(batch | {"scan": torch.full_like(batch["scan"], number)}, "train")
    module.measure({key: value for key, value in batch.items() if key != "scan"}, "val")
    real = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in module.buffers()}
    footprint = Planner(config).estimate(config)
    assert footprint.operator == pytest.approx(sum(real.values()), rel=1e-3)
    alone = tiny_config("geometry.angle_span=2.6179938779914944", *words)  # 8 views over 150° have no symmetry
    assert footprint.peak - footprint.operator == (
        Planner(alone).estimate(alone).peak - Planner(alone).estimate(alone).operator
    )


@pytest.mark.parametrize(("words", "line"), [
    (["data=lodopab", "geometry=lodopab", "data.root=.", "data.image_size=362", "model=learn"],
     "data.views: the sinograms of data=lodopab were measured"),
    (["datamodule._target_=lightning.LightningDataModule"],
     "data.views does not reach the batches of datamodule._target_=lightning.LightningDataModule"),
])  # fmt: skip
def test_scans_are_of_simulated_slices_only(words: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        config_of("data.views=[6,8]", *words)
