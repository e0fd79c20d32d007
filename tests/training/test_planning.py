import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from qnmixer.cli import compose
from qnmixer.config import Config, ConfigError, device_memory, override, parse
from qnmixer.training.build import build_projector
from qnmixer.training.plan_report import _largest_batch, as_object, levers_table, usable
from qnmixer.training.planning import MIB, Planner, _PeakTracker, _without_data, track_step

SMALL = [
    "data.image_size=32",
    "data.batch_size=3",
    "geometry.n_detectors=48",
    "geometry.detector_pitch=20",
    "geometry.n_views=8",
    "model.channels=16",
    "model.n_iterations=8",
]

VARIANTS = [
    "memory=keep trainer.precision=bf16-mixed loss=ssim_mix",
    "memory=recompute trainer.precision=16-mixed trainer.accumulate_grad_batches=4 optimizer=adafactor",
    "memory=recompute memory.segment=2 model.n_iterations=9 model.hessian_gradient=detach",
    "memory=recompute model.shared_regularizer=false model.codec=strided model.latent_channels=1",
    "memory=offload data.image_size=128 model.hessian=identity",
    "model.n_iterations=1 optimizer=sgd model.data_term=adjoint",
]


def config_of(overrides: str = "") -> Config:
    return parse(compose("train", [*SMALL, *overrides.split()]))


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(config_of())


def test_what_is_relied_on_of_torchs_private_tracker() -> None:
    """Kinds by name, bytes, the peak and not the end, and nothing left behind."""
    resize = torch.UntypedStorage.resize_
    with _without_data():
        layer = nn.Linear(256, 1024, bias=False)  # 1 MiB
        layer.register_buffer("table", torch.zeros(2 * MIB // 4))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        for p in layer.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        tracker = _PeakTracker()
        tracker.track_external(layer, optimizer)
        with tracker:
            tracker.reset_mod_stats()
            x = torch.ones(4 * MIB // 4)
            del x
            torch.ones(3 * MIB // 4)
        (peak,) = tracker.get_tracker_snapshot("peak").values()
        (end,) = tracker.get_tracker_snapshot().values()
    mib = {str(kind).rpartition(".")[2]: n / MIB for kind, n in peak.items()}
    assert mib == {"PARAM": 1, "BUFFER": 2, "GRAD": 1, "ACT": 4, "TEMP": 0, "OPT": 1, "OTH": 0, "Total": 9}
    assert end["Total"] == 5 * MIB
    assert torch.UntypedStorage.resize_ is resize


def test_the_footprint_of_a_known_network(planner: Planner) -> None:
    """Parts against their own definitions."""
    config = config_of()
    footprint = track_step(config, planner.projector)
    with _without_data():
        from qnmixer.training.build import build_network

        n_weights = sum(p.numel() for p in build_network(config, planner.projector).parameters())
    assert footprint.parameters == 4 * n_weights
    assert footprint.optimizer == pytest.approx(2 * footprint.parameters, rel=0.01)  # AdamW's two moments
    assert footprint.operator == sum(b.nbytes for b in planner.projector.buffers())
    assert footprint.peak == sum(footprint.parts().values())


@pytest.mark.parametrize("overrides", VARIANTS)
def test_short_steps_give_long_ones_within_a_percent(planner: Planner, overrides: str) -> None:
    config = config_of(overrides)
    if config.data.image_size != 32:
        planner = Planner(config)
    assert planner.estimate(config).peak == pytest.approx(track_step(config, planner.projector).peak, rel=0.01)


def test_growth_is_what_an_iteration_more_adds(planner: Planner) -> None:
    config = config_of()
    longer = track_step(override(config, "model.n_iterations=9"), planner.projector)
    prediction = planner.predict(config)
    assert prediction.per_iteration == longer.peak - prediction.footprint.peak


def test_offloading_moves_what_it_saves(planner: Planner) -> None:
    """What leaves the device is found on the host."""
    config = config_of("data.image_size=128 data.batch_size=2")
    planner = Planner(config)
    keep, offload = (track_step(override(config, f"memory={m}"), planner.projector) for m in ("keep", "offload"))
    assert keep.host == 0
    assert offload.peak < 0.5 * keep.peak
    assert offload.host > keep.peak - offload.peak


def test_planning_leaves_random_numbers_and_the_operator_as_they_were() -> None:
    config = config_of("model.data_term=adjoint model.n_iterations=1")
    planner = Planner(config)
    norms = planner.projector.fbp_spectral_radius(), planner.projector.operator_norm()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    planner.predict(config)
    assert torch.equal(torch.rand(3), expected)
    fresh = build_projector(config)
    assert norms == (fresh.fbp_spectral_radius(), fresh.operator_norm())
    assert norms == (planner.projector.fbp_spectral_radius(), planner.projector.operator_norm())


@pytest.mark.parametrize("limit", [20.0, 60.0])
def test_the_largest_batch_fits_and_one_more_does_not(planner: Planner, limit: float) -> None:
    def peak(batch: int) -> float:
        return planner.estimate(config_of(f"model.n_iterations=2 data.batch_size={batch}")).peak / MIB

    batch = int(_largest_batch({1: peak(1), 8: peak(8)}, limit))
    assert peak(batch) <= limit < peak(batch + 1)


def test_no_batch_fits_into_too_little() -> None:
    assert _largest_batch({1: 30.0, 8: 200.0}, limit=20.0) == "none"


@pytest.mark.parametrize(("name", "mib"), [("V100-16", 16160), ("24", 24 * 1024), ("24GB", 24 * 1024), ("0.5gb", 512)])
def test_devices_by_name_and_size(name: str, mib: float) -> None:
    assert device_memory(name) == mib


@pytest.mark.parametrize("name", ["V10-16", "-3", "0", "nan", "infGB", "big"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device={name} is not known"):
        device_memory(name)


def test_levers_say_what_they_save(planner: Planner) -> None:
    config = config_of("model.n_iterations=5")
    lines = levers_table(config, planner, {"memory=recompute": "time"}).splitlines()
    keep, recompute = (planner.estimate(override(config, f"memory={m}")).peak for m in ("keep", "recompute"))
    assert lines[0].endswith(f"memory=keep, adamw: {keep / MIB:,.0f} MiB**")
    assert f"| `memory=recompute` | {recompute / MIB:,.0f} | {1 - recompute / keep:.2%} | time |" in "\n".join(lines)


def test_a_run_fits_where_its_peak_is_usable(planner: Planner) -> None:
    prediction = planner.predict(config_of())
    plan = as_object(prediction, ["1.063", "1.06"])
    assert usable("1.06") < prediction.footprint.peak / MIB < usable("1.063")
    assert plan["fits"] == {"1.063": True, "1.06": False}


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "qnmixer.plan", *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_the_command_prints_one_object() -> None:
    done = plan(*SMALL, "model.n_iterations=2", "format=json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert {"parameters", "gradients", "optimizer", "activations"} <= set(told["parts"])
    assert sum(told["parts"].values()) == pytest.approx(told["peak_mib"], abs=0.01)
    assert 0 < told["per_iteration_mib"] < told["peak_mib"]


@pytest.mark.slow
def test_the_command_prints_tables_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = plan(*SMALL, "model.n_iterations=2", "device=1.2")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("recompute", "16-mixed, bf16-mixed", "batch 8", "adafactor", "1.2"):
        assert word in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["device=V10"], "device=V10 is not known"),
        (["format=jsn"], "format=jsn is not known: did you mean json?"),
        (["model.n_iteration=3"], "unknown key model.n_iteration: did you mean model.n_iterations?"),
        (["formt=json"], "unknown key formt: did you mean format?"),
    ],
)
@pytest.mark.slow
def test_bad_input_is_one_line(overrides: list[str], message: str) -> None:
    done = plan(*overrides)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message}")
