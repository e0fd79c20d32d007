from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from qnmixer.engine.parallel.devices import check_precision, choose_device, resolve_devices
from qnmixer.engine.training.steps import build_trainer
from qnmixer.errors import ConfigError

from ..conftest import TinyConfig
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
def test_a_gpu_that_torch_cannot_use_is_never_silently_left_out(
    accelerator: str, machine: Path, tiny_config: TinyConfig
) -> None:
    fake_nvidia_smi(machine, V100)
    with pytest.raises(
        ConfigError, match=f"^trainer.accelerator={accelerator}, but torch .* TORCH=auto installs .*=cpu$"
    ):
        resolve_devices(tiny_config(f"trainer.accelerator={accelerator}"))
    assert resolve_devices(tiny_config("trainer.accelerator=cpu")).trainer.accelerator == "cpu"


def test_auto_is_the_cpu_where_no_gpu_is_or_all_are_hidden(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("auto").type == "cpu"
    fake_nvidia_smi(machine, V100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto").type == "cpu"


def test_a_driver_that_does_not_answer_is_no_reason_for_the_cpu(machine: Path) -> None:
    fake_nvidia_smi(machine, "NVIDIA-SMI has failed because it couldn't communicate", code=9)
    with pytest.raises(ConfigError, match=r"communicate.*: repair or update the driver, or use accelerator=cpu"):
        choose_device("auto")


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((7, 0), CU130, False),
        ((8, 9), ["sm_86"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_50", "compute_70"], True),
        ((12, 0), ["sm_50", "sm_90"], False),
        ((12, 1), CU130, True),
    ],
)
def test_a_gpu_without_kernels_in_this_torch_is_refused(
    capability: tuple[int, int], built: list[str], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with nullcontext() if runs else pytest.raises(ConfigError, match="no kernels for a GPU of compute capability"):
        assert choose_device("auto").type == "cuda"
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm, whose architectures have other names
    assert choose_device("auto").type == "cuda"


def test_32_is_float32_in_convolutions_too(tiny_config: TinyConfig, tmp_path: Path) -> None:
    """Torch lets cuDNN round to TF32 by default. A run says whether it may; what it leaves is undone."""
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    for overrides, allowed in (((), False), (("trainer.tf32=true",), True), ((), False)):
        build_trainer(tiny_config(*overrides, "trainer.accelerator=cpu"), tmp_path, [], [])
        assert [switch.allow_tf32 for switch in switches] == [allowed, allowed]
    torch.backends.cudnn.allow_tf32 = True
    choose_device("cpu")  # as evaluate and reconstruct do
    assert not torch.backends.cudnn.allow_tf32
