"""Buffers that each device changes: equal on all, and those of one process where that is possible."""

import pytest
import torch
from torch import Tensor

from qnmixer.measurement.build import build_projector
from qnmixer.parallel.buffers import line_on_buffers
from qnmixer.settings.compose import compose
from qnmixer.settings.run import parse

from ..buffers import Changing, Everything
from ..promises.parity_rank import train as train_here
from ..promises.test_gradients_of_one_process import train
from ..warm import Warm

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("buffers")]  # else each worker would train them

# The weights hardly move: with them, a difference in BatchNorm's variance would move all that comes after it.
TINY = (
    "data.image_size=16 geometry.n_views=8 geometry.n_detectors=24 geometry.detector_pitch=40 data.n_val=1 "
    "data.n_test=1 data.n_train=8 data.num_workers=0 trainer.accelerator=cpu logger=csv trainer.max_steps=3 "
    "data.seed=9 data.hu_max=200 "  # slices on two devices whose means differ
    "callbacks=none trainer.val_every_n_steps=100 optimizer=sgd optimizer.lr=1e-12 model=custom "
    "model._target_=tests.buffers.Everything model.n_iterations=4 model.channels=4"
)
TWO = "trainer.devices=2 data.batch_size=2"
STRATEGIES = {
    "ddp": f"strategy=ddp {TWO}",
    "fsdp": f"strategy=fsdp memory=recompute {TWO}",
    "pipeline": f"strategy=pipeline strategy.schedule=sequential strategy.microbatch_size=4 memory=recompute {TWO}",
    "micro-batches": f"strategy=pipeline strategy.microbatch_size=2 {TWO}",
}
ONE = {"one": "data.batch_size=4", "one recomputed": "data.batch_size=4 memory=recompute"}
ONE["one accumulating"] = "data.batch_size=2 trainer.accumulate_grad_batches=2"


@pytest.fixture(scope="module")
def buffers(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> dict[str, list[dict[str, Tensor]]]:
    """Those of each rank, and of the checkpoint, by strategy."""
    folder = tmp_path_factory.mktemp("buffers")
    configs = {name: parse(compose("train", f"{TINY} {words}".split())) for name, words in (ONE | STRATEGIES).items()}
    for name in configs:
        (folder / name).mkdir()
    results = {name: [train_here(configs[name], folder / name)["buffers"]] for name in ONE}
    job = [{"config": configs[name].plain(), "folder": str(folder / name), "save": True} for name in STRATEGIES]
    train(folder, 2, job, warm)
    for name in STRATEGIES:
        saved = torch.load(folder / name / "last.ckpt", weights_only=True)["state_dict"]
        ranks = [torch.load(folder / name / f"rank_{rank}.pt")["buffers"] for rank in range(2)]
        results[name] = [*ranks, {key: saved[f"network.{key}"] for key in ranks[0]}]
    return results


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> set[str]:
    """The last words of the names of buffers that are not close."""
    return {
        name.split(".")[-1]
        for name, value in expected.items()
        if not torch.allclose(found[name].double(), value.double(), rtol=1e-5, atol=1e-7)
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_ranks_and_the_checkpoint_have_the_same(buffers: dict[str, list[dict[str, Tensor]]], name: str) -> None:
    first, *others = buffers[name]
    assert len(others) == 2
    for other in others:
        assert all(torch.equal(other[key], value) for key, value in first.items())


def test_buffers_against_those_of_one_process(buffers: dict[str, list[dict[str, Tensor]]]) -> None:
    """Only what one device cannot know differs: other slices, and other iterations."""
    (one,), (accumulating,) = buffers["one"], buffers["one accumulating"]
    assert differing(buffers["one recomputed"][0], one) == set()
    assert int(one["count"]) == 12
    assert int(one["regularizers.0.1.num_batches_tracked"]) == 3
    for name in ("ddp", "fsdp"):
        found = buffers[name][0]
        later = {
            key: value
            for key, value in one.items()
            if not key.startswith(("regularizers.1", "regularizers.2", "regularizers.3"))
        }
        assert differing(found, later) == {"running_var"}  # the variance between the devices is missing
    assert differing(buffers["pipeline"][0], one) == {"all"}  # whose iterations are on two devices
    assert differing(buffers["micro-batches"][0], accumulating) == {"all"}
    assert int(accumulating["count"]) == 24
    for name in STRATEGIES:
        assert buffers[name][0]["mask"].tolist() == [0, -torch.inf]
        assert buffers[name][0]["least"].tolist() == [1]


def test_a_line_says_what_buffers_of_several_devices_mean() -> None:
    def line(words: str, kind: type[Changing] = Everything) -> str | None:
        config = parse(compose("train", [*TINY.split(), *words.split()]))
        return line_on_buffers(config, kind(build_projector(config), 4))

    assert line("memory=recompute") is None
    assert line(f"strategy=ddp {TWO}", Changing) is None
    assert line(f"strategy=ddp {TWO}") == (
        "buffers count, first, all, least and 13 more: each device updates them by its own "
        "slices, and they are averaged after each batch. One process gives other values where slices depend on each "
        "other, as in BatchNorm: strategy=single"
    )
    assert "once for each micro-batch; those that several devices change" in str(line(STRATEGIES["micro-batches"]))
