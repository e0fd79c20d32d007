from functools import cache
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn

from qnmixer.errors import ConfigError
from qnmixer.measurement.build import build_geometry, build_network
from qnmixer.measurement.measurement import matrix_at
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.memory.plan import Planner, advice, changes
from qnmixer.memory.plan_config import PlanConfig, device_memory
from qnmixer.memory.report import as_object, largest_batch, levers_table, print_plan, usable
from qnmixer.module.build import build_module
from qnmixer.module.parts import build_optimizer
from qnmixer.parallel.device_memory import MIB, Footprint
from qnmixer.parallel.pipeline import Stage, layouts, loss_of_part, stages_of
from qnmixer.parallel.shapes import without_data
from qnmixer.parallel.tracker import PeakTracker, autocast, batch_of, make_state, n_bytes, optimizer_tensors
from qnmixer.settings.compose import compose
from qnmixer.settings.override import override
from qnmixer.settings.run import Config, effective_batch, parse
from qnmixer.settings.strategies import PipelineConfig

from ..conftest import every_third

SMALL = [
    "data.image_size=32", "data.batch_size=3", "geometry.n_detectors=48", "geometry.detector_pitch=20",
    "geometry.n_views=8", "model.channels=16", "model.n_iterations=8",
]  # fmt: skip
SIMPLE = "model=learn model.n_iterations=4 model.channels=8"
"""A network with few operators."""


def config_of(overrides: str = "") -> Config:
    return parse(compose("train", [*SMALL, *overrides.split()]))


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(config_of())


def test_the_tracker_counts_what_tensors_take() -> None:
    """By kind, each storage once, the peak and not the end."""
    with without_data():
        layer = nn.Linear(256, 1024, bias=False)  # 1 MiB
        layer.register_buffer("table", torch.zeros(2 * MIB // 4))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        for p in layer.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        tracker = PeakTracker()
        tracker.track(layer, optimizer)
        with tracker:
            x = torch.ones(4 * MIB // 4)
            view = x[1:].view(-1)
            del x, view
            torch.ones(3 * MIB // 4)
            end = dict(tracker.current)
    mib = {kind: n / MIB for kind, n in tracker.peak.items()}
    assert mib == {"parameters": 1, "gradients": 1, "optimizer": 1, "operator": 2, "activations": 4}
    assert tracker.peak_bytes == 9 * MIB
    assert sum(end.values()) == 5 * MIB


def test_real_tensors_count_as_torchs_allocator_counts_them() -> None:
    """And as those without data do. The profiler's record of allocations is torch's own."""
    config = config_of("model.n_iterations=4")
    module = build_module(config)
    optimizer = build_optimizer(config.optimizer, module.network)
    make_state(optimizer)
    image, weight = torch.rand(3, 1, 32, 32), torch.ones(3)

    def step() -> None:
        with torch.no_grad():
            y = module.projector(image)
        loss = module.training_step(batch_of(image, weight, y), 0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.network.parameters(), 1.0)
        optimizer.step()

    step()
    with PeakTracker() as tracker:
        tracker.track(module, optimizer, image, weight)
        step()
    optimizer.zero_grad()  # what is freed below was taken below
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    held = n_bytes([*module.parameters(), *module.buffers()]) + n_bytes(optimizer_tensors(optimizer))
    assert tracker.peak_bytes == pytest.approx(held + allocated, rel=0.01)
    assert Planner(config, module.projector).estimate(config).peak == pytest.approx(tracker.peak_bytes, rel=0.01)


def test_the_footprint_of_a_known_network(planner: Planner) -> None:
    """Parts against their own definitions."""
    config = config_of("model.n_iterations=2")
    footprint = planner.estimate(config)
    with without_data():
        n_weights = sum(p.numel() for p in build_network(config, planner.projector).parameters())
    assert footprint.parameters == 4 * n_weights
    assert footprint.optimizer == pytest.approx(2 * footprint.parameters, rel=0.01)  # AdamW's two moments
    assert footprint.operator == sum(b.nbytes for b in planner.projector.buffers())
    assert footprint.peak == sum(footprint.parts().values())
    averaging = planner.estimate(config_of("model.n_iterations=2 callbacks=ema"))
    assert averaging.peak - footprint.peak == footprint.parameters  # the mean of the weights


@pytest.mark.parametrize("strategy", every_third(["single", "pipeline trainer.devices=4 strategy.microbatch_size=3"]))
def test_a_finer_grid_counts_where_a_device_simulates_from_it(planner: Planner, strategy: str) -> None:
    """With noise the workers of the loader simulate."""

    def of(overrides: str) -> Footprint:
        return planner.estimate(config_of(f"{SIMPLE} strategy={strategy} {overrides}"))

    finer = config_of("data.simulation_factor=2")
    matrix = n_bytes(matrix_at(build_geometry(finer), 64).buffers())
    config = config_of(f"{SIMPLE} strategy={strategy}")
    images = config.strategy.batch_of_replica(config) * 4 * 64**2
    coarse, fine = of(""), of("data.simulation_factor=2")
    assert fine.operator - coarse.operator == matrix
    assert fine.activations - coarse.activations == images
    assert of("data.simulation_factor=2 noise=field") == of("noise=field")


def test_growth_is_what_an_iteration_more_adds(planner: Planner) -> None:
    config = config_of("model.n_iterations=2")
    two, three, four = (planner.estimate(override(config, f"model.n_iterations={T}")).peak for T in (2, 3, 4))
    # Of the next two, the second adds more: H has one pair more in each.
    assert three - two < planner.growth(config) < four - three
    assert planner.growth(config) == pytest.approx((four - two) / 2, rel=0.01)
    assert planner.growth(override(config, "model.n_iterations=1")) is None
    regformer = config_of("model=regformer model.channels=18 model.n_iterations=3")  # its blocks alternate
    longer = planner.estimate(override(regformer, "model.n_iterations=5")).peak
    grown = (longer - planner.estimate(regformer).peak) / 2
    assert planner.growth(regformer) == pytest.approx(grown, rel=0.01)


def test_offloading_moves_what_it_saves(planner: Planner) -> None:
    """In half precision no more stays."""
    config = config_of("model.n_iterations=2 data.batch_size=32")
    keep, offload = (planner.estimate(override(config, f"memory={m}")) for m in ("keep", "offload"))
    assert offload.peak < 0.5 * keep.peak
    half = planner.estimate(override(config, "memory=offload trainer.precision=16-mixed"))
    assert half.activations < offload.activations


def test_the_largest_batch_fits_and_one_more_does_not(planner: Planner) -> None:
    def peak(batch: int) -> float:
        return planner.estimate(config_of(f"{SIMPLE} data.batch_size={batch}")).peak / MIB

    batch = int(largest_batch({1: peak(1), 8: peak(8)}, limit=20.0))
    # A line through two batches: which tensors make the peak may differ between them.
    assert peak(batch) <= 1.02 * 20 < 1.02 * peak(batch + 1)
    assert largest_batch({1: 30.0, 8: 200.0}, limit=20.0) == "none"


def test_devices_by_name_and_size() -> None:
    assert [device_memory(name) for name in ("V100-16", "24", "24GB", "0.5gb")] == [16160, 24 * 1024, 24 * 1024, 512]
    for name in ("V10-16", "-3", "0", "nan", "infGB", "big"):
        with pytest.raises(ConfigError, match=f"device={name} is not known"):
            device_memory(name)


def test_levers_say_what_they_save(planner: Planner) -> None:
    """Those that a run does not allow are left out: 1f1b needs an iteration for each device."""
    config = config_of("model.n_iterations=2")
    levers = {"memory=recompute": "time", "strategy=pipeline trainer.devices=4": "devices"}
    title, *table = levers_table(config, planner, levers).splitlines()
    keep, recompute = (planner.estimate(override(config, f"memory={m}")).peak for m in ("keep", "recompute"))
    assert title.endswith(f"memory=keep, adamw: {keep / MIB:,.0f} MiB**")
    assert table[-1] == f"| `memory=recompute` | {recompute / MIB:,.0f} | {1 - recompute / keep:.2%} | time |"


def test_a_run_fits_where_its_peak_is_usable(planner: Planner) -> None:
    config = config_of("model.n_iterations=3")
    assert usable("1.056") < planner.estimate(config).peak / MIB < usable("1.059")
    assert as_object(config, planner, ["1.059", "1.056"])["fits"] == {"1.059": True, "1.056": False}


def test_what_each_strategy_adds_to_one_device(planner: Planner) -> None:
    @cache
    def of(overrides: str) -> Footprint:
        return planner.estimate(config_of(f"model.n_iterations=1 {overrides}"))

    accumulating = "trainer.accumulate_grad_batches=2"
    weights = of("").parameters
    assert of("").strategy == of(accumulating).strategy == of("strategy=ddp").strategy == 0
    assert of("strategy=ddp").gradients == weights
    assert of(f"strategy=ddp {accumulating}").strategy == pytest.approx(weights, rel=0.02)
    sharded = of("strategy=fsdp trainer.devices=4")
    assert sharded.parameters == weights / 4
    assert sharded.optimizer == pytest.approx(weights / 2, rel=0.01)
    assert weights < sharded.strategy < 3 * weights
    assert of(f"strategy=fsdp trainer.devices=4 {accumulating}").strategy == sharded.strategy + weights


def real_peak(config: Config, device: int) -> int:
    """Bytes that a device holds when it runs its stages with real tensors and all micro-batches in flight."""
    keys, size = config.strategy, config.data.image_size
    assert isinstance(keys, PipelineConfig)
    b, n = keys.microbatch_size, keys.n_together(config)
    module = build_module(config)
    network = module.network
    apply_memory_mode(network, config.memory)
    optimizer = build_optimizer(config.optimizer, network)
    make_state(optimizer)
    optimizer.zero_grad()
    image, weight = torch.rand(b * n, 1, size, size), torch.ones(b * n)
    with torch.no_grad():
        y = module.projector(image)
    packings = layouts(network, y[:b], lambda: autocast(config.trainer.precision))
    parts: list[tuple[list[Tensor], list[Tensor]]] = []  # of each micro-batch: received state and gradient
    it = stages_of(network.n_iterations, keys.devices_per_replica(config))[device]
    stage = Stage(network, it, packings[it.start], lambda: autocast(config.trainer.precision))
    for _ in range(n):
        states = [packings[it.start].empty(b, "cpu")] if it.start else []
        gradients = [] if it.stop == network.n_iterations else [packings[it.stop].empty(b, "cpu").detach()]
        parts.append((states, gradients))
    tracker, made = PeakTracker(), []
    tracker.track(module, optimizer, image, weight, y)
    tracker.track(*(tensor for states, gradients in parts for tensor in (*states, *gradients)))
    most = keys.in_flight(config, device)
    with tracker, torch.autocast("cpu", enabled=False):
        for k, (states, gradients) in enumerate(parts):
            if k >= most:
                made.pop(0).backward(*parts[k - most][1])
            part = slice(k * b, (k + 1) * b)
            made.append(stage(*states, y=y[part]))
            if not gradients:
                with autocast(config.trainer.precision):
                    made[-1] = loss_of_part(module, batch_of(image, weight, y), 0, made[-1], part.start, {})
        for output, (_, gradients) in zip(made, parts[-most:], strict=True):
            output.backward(*gradients)
    return tracker.peak_bytes


@pytest.mark.parametrize(
    ("overrides", "device"),
    [("data.batch_size=2 memory=recompute strategy.microbatch_size=2", 1), ("data.batch_size=2", 0)],
)
def test_planned_devices_of_a_pipeline_hold_what_real_ones_do(planner: Planner, overrides: str, device: int) -> None:
    """The plan is an upper bound."""
    config = config_of(f"{SIMPLE} data.image_size=64 strategy=pipeline trainer.devices=4 {overrides}")
    planned = Planner(config).devices(config)[device].footprint.peak
    assert real_peak(config, device) == pytest.approx(0.97 * planned, rel=0.03)


@pytest.mark.long
def test_the_run_is_planned_by_its_fullest_device(planner: Planner) -> None:
    config = config_of("strategy=pipeline data.batch_size=1")  # devices left open: 4 are assumed
    devices = planner.devices(config)
    assert [device.iterations for device in devices] == [range(k, k + 2) for k in (0, 2, 4, 6)]
    assert [device.in_flight for device in devices] == [4, 3, 2, 1]
    assert planner.estimate(config).peak == max(device.footprint.peak for device in devices)
    told = as_object(override(config, "trainer.devices=4"), planner, [])
    assert max(told["devices"]) == told["peak_mib"]  # type: ignore[call-overload]
    assert told["idle_share"] == pytest.approx(3 / 7, abs=1e-4)  # (devices − 1) / (micro-batches + devices − 1)
    in_turns = override(config, "trainer.devices=4 strategy.schedule=sequential")
    assert in_turns.strategy.idle_share(in_turns) == 3 / 4
    of_all, of_one = (max(plan.footprint.activations for plan in planner.devices(it)) for it in (config, in_turns))
    assert of_one < 0.42 * planner.estimate(config_of("data.batch_size=1")).activations < of_all


def test_the_tables_of_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    small = [*SMALL, *SIMPLE.split(), "strategy=pipeline", "trainer.devices=4", "data.batch_size=2", "device=V100-16"]
    print_plan(PlanConfig.parse(compose("plan", small)))
    printed = capsys.readouterr().out
    rows = {line.split()[1] for line in printed.splitlines() if line.startswith("│")}
    assert {"0", "3", "keep", "recompute", "offload", "V100-16"} <= rows
    assert "each device is idle 27% of the time" in printed


# What a run that is out of memory is advised to change


def test_what_the_run_has_already_or_a_cpu_does_slowly_is_not_advised() -> None:
    config = config_of("model.n_iterations=2 memory=recompute trainer.precision=16-mixed data.batch_size=1")
    assert changes(config) == ["model.n_iterations=1", "model.channels=8"]
    on_cpu, on_gpu = (changes(config_of(f"trainer.accelerator={it}")) for it in ("cpu", "gpu"))
    assert "trainer.precision=bf16-mixed" in on_cpu
    assert not [change for change in on_cpu if "=16-mixed" in change]
    assert "trainer.precision=16-mixed" in on_gpu


def test_the_mildest_that_fit_are_advised_or_the_smallest(planner: Planner) -> None:
    """Each change is an override that makes a step smaller, with the same slices in an optimizer step."""
    config = config_of("model=learn data.batch_size=4 model.n_iterations=2 trainer.accumulate_grad_batches=2")
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
