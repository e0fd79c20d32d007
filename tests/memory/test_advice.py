"""What a run that is out of memory is advised to change."""

import pytest

from qnmixer.memory.plan import Planner, advice, changes
from qnmixer.parallel.device_memory import MIB
from qnmixer.settings.compose import compose
from qnmixer.settings.override import override
from qnmixer.settings.run import Config, effective_batch, parse

TINY = [
    "data.image_size=32",
    "data.batch_size=4",
    "geometry.n_detectors=48",
    "geometry.detector_pitch=20",
    "geometry.n_views=8",
    "model.channels=16",
    "model.n_iterations=2",
]


def config_of(*overrides: str) -> Config:
    return parse(compose("train", [*TINY, *overrides]))


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(config_of())


def test_what_the_run_has_already_or_a_cpu_does_slowly_is_not_advised() -> None:
    config = config_of("memory=recompute", "trainer.precision=16-mixed", "data.batch_size=1")
    assert changes(config) == ["model.n_iterations=1", "model.channels=8"]
    on_cpu, on_gpu = (changes(config_of(f"trainer.accelerator={it}")) for it in ("cpu", "gpu"))
    assert "trainer.precision=bf16-mixed" in on_cpu
    assert not [change for change in on_cpu if "=16-mixed" in change]
    assert "trainer.precision=16-mixed" in on_gpu


def test_the_mildest_that_fit_are_advised_or_the_smallest(planner: Planner) -> None:
    """Each change is an override that makes a step smaller, with the same slices in an optimizer step."""
    config = config_of("model=learn", "model.n_iterations=2", "trainer.accumulate_grad_batches=2")
    needed, peaks = planner.estimate(config).peak, {}
    for change in changes(config):
        changed = override(config, change)
        peaks[change] = planner.estimate(changed).peak
        assert effective_batch(changed) == effective_batch(config)
    assert max(peaks.values()) < needed
    line = advice(planner, config, available=0.99 * needed / MIB)
    assert line.startswith(f"out of memory: a step of this run needs {needed / MIB:,.0f} MiB by the plan")
    mild = [change for change, peak in peaks.items() if peak <= 0.99 * needed][:3]
    assert [line.find(change) > 0 for change in mild] == [True] * 3
    line = advice(planner, config, available=0.0)
    assert f"no simple change fits, the closest are {min(peaks, key=peaks.__getitem__)} (" in line
    # By the plan it fits, and still it failed.
    assert "gaps between tensors, validation or other programs took the rest" in advice(planner, config, 1000.0)
