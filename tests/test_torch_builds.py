"""The choice of torch's build, on machines that a stand-in for nvidia-smi describes."""

import sys
from pathlib import Path

import pytest

from qnmixer.torch_builds import BUILDS, CHOICES, GPU, TORCH, NoBuildError, choose, decide, fix, runs_on, visible_gpus

from .nvidia import fake_nvidia_smi

ROOT = Path(__file__).resolve().parents[1]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]

V100, P100, RTX_2080, A100, RTX_5090 = (7, 0), (6, 0), (7, 5), (8, 0), (12, 0)
OLD, MIDDLE, NEW = "470.256.02", "535.104.05", "580.65.06"


@pytest.fixture(autouse=True)
def x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TORCH_INDEX"):
        monkeypatch.delenv(name, raising=False)


def gpus(driver: str, *capabilities: tuple[int, int]) -> list[GPU]:
    return [GPU(capability, driver) for capability in capabilities]


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((7, 0), CU130, False),
        ((7, 0), ["sm_70", "sm_80"], True),
        ((8, 9), ["sm_86"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_86"], False),
        ((9, 0), ["sm_50", "compute_70"], True),
        ((7, 0), ["compute_75"], False),
        ((12, 1), CU130, True),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["compute_90a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["compute_100f"], False),
    ],
)
def test_which_builds_run_on_which_gpus(capability: tuple[int, int], built: list[str], runs: bool) -> None:
    assert runs_on(capability, built) == runs


@pytest.mark.parametrize(
    ("machine", "build"),
    [
        ([], "cpu"),
        (gpus(NEW, V100, V100, V100, V100), "cu126"),
        (gpus(MIDDLE, P100), "cu126"),
        (gpus(NEW, (6, 1)), "cu126"),
        (gpus(NEW, RTX_2080), "cu130"),
        (gpus(NEW, A100), "cu130"),
        (gpus("580", A100), "cu130"),
        (gpus("579.99", A100), "cu126"),
        (gpus("525.60.13", A100), "cu126"),
        (gpus(NEW, (8, 9), (9, 0)), "cu130"),
        (gpus(NEW, RTX_5090), "cu130"),
        (gpus(NEW, (12, 1)), "cu130"),
        (gpus(NEW, V100, A100), "cu126"),
        (gpus(NEW, RTX_2080, RTX_5090), "cu130"),
    ],
)
def test_the_build_for_a_machine(machine: list[GPU], build: str) -> None:
    assert choose(machine) == build


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (gpus(NEW, V100, RTX_5090), "for compute capability 12.0, compute capability 7.0 together: leave some"),
        (gpus(NEW, (3, 7)), "no build of torch .* has kernels for this GPU .*3.7"),
        (gpus(OLD, A100), "driver 470.256.02 is too old .* needs 525.60.13 or newer"),
        (gpus("525.60.12", V100), "driver 525.60.12 is too old"),
        (gpus("570.10", RTX_5090), "driver 570.10 is too old .* needs 580 or newer"),
    ],
)
def test_a_machine_without_a_build_is_refused(machine: list[GPU], said: str) -> None:
    with pytest.raises(NoBuildError, match=said):
        choose(machine)


def test_on_arm_the_builds_have_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert choose(gpus(NEW, (11, 0))) == "cu130"
    assert choose(gpus(MIDDLE, (9, 0))) == "cu126"
    with pytest.raises(NoBuildError):
        choose(gpus(NEW, RTX_2080))


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == []
    fake_nvidia_smi(tmp_path, "7.0, 535.104.05", "7.0, 535.104.05")
    assert visible_gpus() == gpus(MIDDLE, V100, V100)
    fake_nvidia_smi(tmp_path, "No devices were found", code=6)
    assert visible_gpus() == []
    fake_nvidia_smi(tmp_path, 'Field "compute_cap" is not a valid field to query.', code=2)
    with pytest.raises(NoBuildError, match=r"not a valid field.*: repair or update the driver"):
        visible_gpus()
    fake_nvidia_smi(tmp_path, "[N/A], 390.1")
    with pytest.raises(NoBuildError, match="no compute capability"):
        visible_gpus()


@pytest.mark.parametrize(
    ("visible", "order", "left"),
    [
        ("", None, []),
        ("-1", None, []),
        ("0", "PCI_BUS_ID", [V100]),
        ("1", "PCI_BUS_ID", [RTX_5090]),
        ("0", None, [V100, RTX_5090]),  # CUDA's own order has the fastest first: which one it is, is not known
        ("GPU-b", None, [RTX_5090]),
        ("MIG-c", None, [V100, RTX_5090]),
    ],
)
def test_gpus_that_the_environment_hides_do_not_count(
    visible: str, order: str | None, left: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvidia_smi(tmp_path, "7.0, 580.65.06", "12.0, 580.65.06", uuids=("GPU-aa", "GPU-bb"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if order is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert visible_gpus() == gpus(NEW, *left)


def test_the_fix_is_pinned_and_of_a_build_that_exists() -> None:
    said = fix(gpus(MIDDLE, V100))
    assert said.startswith("make install TORCH=cu126, or pip install ")
    assert f"pip install torch=={TORCH}+cu126 --index-url https://download.pytorch.org/whl/cu126" in said
    assert "update the driver" in fix(gpus(OLD, A100))


def test_a_word_that_is_no_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoBuildError, match="TORCH=cu128 is no build"):
        decide("cu128")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert decide("auto") == ("cpu", "macOS has one build")
    with pytest.raises(NoBuildError, match="has no CUDA"):
        decide("cu126")


def test_the_lock_and_the_table_are_of_one_torch() -> None:
    assert f"\ntorch=={TORCH} \\\n" in (ROOT / "requirements.lock").read_text()
    assert {build.name for builds in BUILDS.values() for build in builds} | {"cpu"} == set(CHOICES)
