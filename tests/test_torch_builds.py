"""The choice of torch's build, on machines that a stand-in for nvidia-smi describes."""

import sys
from pathlib import Path

import pytest

from qnmixer.torch_builds import GPU, TORCH, NoBuildError, choose, decide, fix, visible_gpus

from .nvidia import fake_nvidia_smi
from .pages import ROOT

V100, P100, RTX_2080, A100, RTX_5090 = (7, 0), (6, 0), (7, 5), (8, 0), (12, 0)
OLD, MIDDLE, NEW = "470.256.02", "535.104.05", "580.65.06"


def gpus(driver: str, *capabilities: tuple[int, int]) -> list[GPU]:
    return [GPU(capability, driver) for capability in capabilities]


@pytest.mark.parametrize(("machine", "build"), [
    ([], "cpu"), (gpus(MIDDLE, P100), "cu126"), (gpus(NEW, V100), "cu126"), (gpus("580", A100), "cu130"),
    (gpus("579.99", A100), "cu126"), (gpus(NEW, V100, A100), "cu126"), (gpus(NEW, RTX_2080, RTX_5090), "cu130"),
])  # fmt: skip
def test_the_build_for_a_machine(machine: list[GPU], build: str) -> None:
    assert choose(machine) == build


@pytest.mark.parametrize(("machine", "said"), [
    (gpus(NEW, V100, RTX_5090), "has kernels for compute capability 12.0, compute capability 7.0"),
    (gpus(NEW, (3, 7)), "no build of torch .* has kernels for compute capability 3.7"),
    (gpus(OLD, A100), "driver 470.256.02 is too old .* needs 525.60.13 or newer"),
    (gpus("570.10", RTX_5090), "driver 570.10 is too old .* needs 580 or newer"),
])  # fmt: skip
def test_a_machine_without_a_build_is_refused(machine: list[GPU], said: str) -> None:
    with pytest.raises(NoBuildError, match=said):
        choose(machine)


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == []
    fake_nvidia_smi(tmp_path, "7.0, 535.104.05", "12.0, 535.104.05")
    assert visible_gpus() == gpus(MIDDLE, V100, RTX_5090)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    fake_nvidia_smi(tmp_path, "No devices were found", code=6)
    assert visible_gpus() == []
    for said, code in (('Field "compute_cap" is not a valid field to query.', 2), ("[N/A], 390.1", 0)):
        fake_nvidia_smi(tmp_path, said, code=code)
        with pytest.raises(NoBuildError, match=r"no compute capability \(.*\): repair or update the driver"):
            visible_gpus()


def test_the_fix_is_pinned_and_of_a_build_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    pip = f"pip install torch=={TORCH}+cu126 --index-url https://download.pytorch.org/whl/cu126"
    assert fix(gpus(MIDDLE, V100)) == f"make install TORCH=cu126, or {pip}"
    assert "update the driver" in fix(gpus(OLD, A100))
    assert f"\ntorch=={TORCH} \\\n" in (ROOT / "requirements.lock").read_text()  # the lock has this torch


def test_a_word_that_is_no_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoBuildError, match="TORCH=cu128 is no build"):
        decide("cu128")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert decide("auto") == ("cpu", "macOS has one build")
    with pytest.raises(NoBuildError, match="has no CUDA"):
        decide("cu126")
