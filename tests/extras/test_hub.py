"""Weights on a hub, with a stand-in for the hub."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import qnmixer
from qnmixer.data.phantoms.phantoms import phantom
from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.export import check, export
from qnmixer.reconstruct import check as check_reconstruct
from qnmixer.reconstruct import reconstruct

from ..hub_server import HubServer
from ..saved import TINY, run, save


def test_weights_that_were_exported_are_loaded_from_a_hub(hub_server: HubServer, tmp_path: Path) -> None:
    folder, output = save(tmp_path / "run", *TINY), tmp_path / "my.safetensors"
    assert run(export, check, "export", f"run={folder}", f"output={output}")[0] == 0
    hub_server.files["me/a-b.c"] = {"model.safetensors": output.read_bytes()}
    networks = [qnmixer.load_pretrained(it).state_dict() for it in (folder, output, "hf://me/a-b.c")]
    assert all(torch.equal(networks[0][name], other[name]) for other in networks[1:] for name in networks[0])
    np.save(tmp_path / "slice.npy", phantom(48, seed=0, part="test", index=0))
    for number, weights in enumerate((folder, "hf://me/a-b.c")):
        words = [f"run={weights}", f"input={tmp_path}/slice.npy", f"output={tmp_path}/{number}", "formats=[npy]"]
        code, _, stderr = run(reconstruct, check_reconstruct, "reconstruct", *words)
        assert code == 0, stderr
    assert (tmp_path / "0" / "slice.npy").read_bytes() == (tmp_path / "1" / "slice.npy").read_bytes()


def test_what_no_hub_has_is_refused(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_server.files["me/other"] = {"pytorch_model.bin": b"1"}
    for name in ("me/other", "me/none"):
        with pytest.raises(CheckpointError, match=rf"^hf://{name} cannot be loaded \(\w+Error: .*, with a model.safe"):
            qnmixer.load_pretrained(f"hf://{name}")
    hub_server.files["me/other"]["model.safetensors"] = b"no weights"
    with pytest.raises(CheckpointError, match="is damaged"):
        qnmixer.load_pretrained("hf://me/other")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r'which is not installed: pip install "qnmixer\[hub\]"'):
        qnmixer.load_pretrained("hf://me/mine")


def test_a_name_that_is_none_is_refused_without_a_network() -> None:
    with pytest.raises(CheckpointError, match=r"^hf://\.\./mine cannot be loaded \(HFValidationError: "):
        qnmixer.load_pretrained("hf://../mine")
