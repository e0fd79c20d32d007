import pytest
import torch

from qnmixer.errors import ConfigError
from qnmixer.parallel.devices import check_precision, choose_device


def test_every_precision_runs_on_a_cpu() -> None:
    device = choose_device("cpu")
    assert device.type == "cpu"
    check_precision(device, "bf16-mixed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("key", ["accelerator", "trainer.accelerator"])
def test_a_gpu_that_is_not_there_is_named_by_the_key_that_asks_for_it(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}=gpu, .*: use {key}=cpu$"):
        choose_device("gpu", key)


def test_a_gpu_without_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "V100")
    check_precision(torch.device("cuda"), "16-mixed")
    with pytest.raises(ConfigError, match=r"^trainer\.precision=bf16-mixed, but V100 has no bf16"):
        check_precision(torch.device("cuda"), "bf16-mixed", "trainer.precision")
