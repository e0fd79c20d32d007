from pathlib import Path

import pytest
import torch

from qnmixer.errors import ConfigError
from qnmixer.parallel.devices import check_precision, choose_device, gpu_problem, resolve_devices, runs_on
from qnmixer.training.steps import build_trainer

from ..conftest import tiny_config
from ..nvidia import fake_nvidia_smi

CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
V100 = "7.0, 535.104.05"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a stand-in for nvidia-smi, on a machine whose GPUs torch does not see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("key", ["accelerator", "trainer.accelerator"])
def test_a_gpu_that_is_not_there_is_named_by_the_key_that_asks_for_it(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}=gpu, .*: use {key}=cpu$"):
        choose_device("gpu", key)


def test_a_gpu_without_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "V100")
    check_precision(torch.device("cuda"), "16-mixed")
    with pytest.raises(ConfigError, match=r"^trainer\.precision=bf16-mixed, but V100 has no bf16"):
        check_precision(torch.device("cuda"), "bf16-mixed")


@pytest.mark.parametrize("accelerator", ["auto", "gpu"])
@pytest.mark.parametrize(("gpu", "cuda", "words"), [
    (V100, None, ["is built for the CPU and cannot use the GPU here", "make install TORCH=cu126, "]),
    # too old for cu130
    ("8.0, 535.104.05", "13.0", ["cannot use the GPU here", "make install TORCH=cu126, "]),
    ("8.0, 470.256.02", "13.0", ["cannot use the GPU here", "needs 525.60.13 or newer: update the driver"]),
])  # fmt: skip
def test_a_gpu_that_torch_cannot_use_is_never_silently_left_out(
    gpu: str, cuda: str | None, words: list[str], accelerator: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    fake_nvidia_smi(machine, gpu)
    with pytest.raises(ConfigError) as error:
        resolve_devices(tiny_config(f"trainer.accelerator={accelerator}"))
    line = str(error.value)
    assert line.startswith(f"trainer.accelerator={accelerator}, but torch ")
    assert all(word in line for word in words)
    assert line.endswith(", or use trainer.accelerator=cpu")
    assert resolve_devices(tiny_config("trainer.accelerator=cpu")).trainer.accelerator == "cpu"


def test_auto_is_the_cpu_where_no_gpu_is_or_all_are_hidden(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("auto").type == "cpu"
    fake_nvidia_smi(machine, V100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto").type == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # a driver that does not answer is no reason for the CPU
    fake_nvidia_smi(machine, "NVIDIA-SMI has failed because it couldn't communicate", code=9)
    with pytest.raises(ConfigError, match=r"communicate.*: repair or update the driver, or use accelerator=cpu"):
        choose_device("auto")


@pytest.mark.parametrize(("capability", "built", "runs"), [
    ((7, 0), CU130, False), ((8, 9), ["sm_86"], True), ((8, 0), ["sm_86"], False),
    ((9, 0), ["sm_50", "compute_70"], True), ((7, 0), ["compute_75"], False), ((12, 1), CU130, True),
])  # fmt: skip
def test_which_builds_run_on_which_gpus(capability: tuple[int, int], built: list[str], runs: bool) -> None:
    assert runs_on(capability, built) == runs


def test_a_gpu_without_kernels_in_this_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = [(8, 0), (7, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capabilities[number])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "compute_120"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert choose_device("auto").type == "cuda"
    assert gpu_problem() is None  # the second GPU is not used
    problem = gpu_problem([1])
    assert problem is not None
    assert "has no kernels for a GPU of compute capability 7.0 (sm_75, sm_80, compute_120): make install " in problem
    capabilities.reverse()
    with pytest.raises(ConfigError, match="no kernels"):
        choose_device("auto")
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm, whose architectures have other names
    assert choose_device("auto").type == "cuda"


def test_32_is_float32_in_convolutions_too(tmp_path: Path) -> None:
    """Torch lets cuDNN round to TF32 by default. A run says whether it may; what it leaves is undone."""
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    for overrides, allowed in (((), False), (("trainer.tf32=true",), True), ((), False)):
        build_trainer(tiny_config(*overrides, "trainer.accelerator=cpu"), tmp_path, [], [])
        assert [switch.allow_tf32 for switch in switches] == [allowed, allowed]
    torch.backends.cudnn.allow_tf32 = True
    choose_device("cpu")  # as evaluate and reconstruct do
    assert not torch.backends.cudnn.allow_tf32
