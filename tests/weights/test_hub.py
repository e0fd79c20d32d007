"""Weights on a hub: pushed by the code of `qnmixer.export` and loaded again, with a stand-in for the hub."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

import qnmixer
from qnmixer.engine.checkpoints import digest_of_weights, load_run
from qnmixer.engine.data.phantoms import phantom
from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.export import check, export
from qnmixer.reconstruct import check as check_reconstruct
from qnmixer.reconstruct import reconstruct

from ..hub_server import HubServer
from ..test_export import TINY, refusal, run, save


def test_a_hub_gets_weights_and_card_and_gives_them_back(hub_server: HubServer, tmp_path: Path) -> None:
    folder, output = save(tmp_path / "run", *TINY), tmp_path / "my.safetensors"
    of_weights = {"weights": digest_of_weights(load_run(folder).state_dict())}
    (evaluated := folder / "evaluation_b").mkdir()
    (evaluated / "results.json").write_text(json.dumps({"status": "done", "evaluated": of_weights}))
    (evaluated / "table.md").write_text("**a table**\n")
    code, stdout, stderr = run(export, check, "export", f"run={folder}", f"output={output}", "push=me/a-b.c")
    assert (code, stderr) == (0, "")
    assert "sent to hf://me/a-b.c. A new repository is private" in stdout
    assert hub_server.private == {"me/a-b.c"}
    sent = hub_server.files["me/a-b.c"]
    assert {*sent} == {"model.safetensors", "README.md"}
    assert hub_server.commits == 1  # of two the second could fail
    assert sent["model.safetensors"] == output.read_bytes()
    card = ModelCard(sent["README.md"].decode())
    assert "### evaluation_b\n\n**a table**\n" in card.text
    assert "run=hf://me/a-b.c input=" in card.text
    assert card.data.library_name == "qnmixer"
    assert str(tmp_path) not in sent["README.md"].decode()

    ours, theirs = (qnmixer.load_pretrained(it).state_dict() for it in (output, "hf://me/a-b.c"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    np.save(tmp_path / "slice.npy", phantom(48, seed=0, part="test", index=0))
    words = ["run=hf://me/a-b.c", f"input={tmp_path}/slice.npy", f"output={tmp_path / 'out'}", "formats=[npy]"]
    code, _, stderr = run(reconstruct, check_reconstruct, "reconstruct", *words)
    assert code == 0, stderr


def test_a_push_that_fails_changes_nothing(hub_server: HubServer, tmp_path: Path) -> None:
    folder = save(tmp_path / "run", *TINY)
    given = f"run={folder}", "push=me/mine"
    assert run(export, check, "export", *given)[0] == 0
    before, here = hub_server.files["me/mine"].copy(), {*tmp_path.rglob("*")}
    save(folder, *TINY, seed=1)
    hub_server.refuses = True
    line = refusal(*given)
    assert line.startswith("push=me/mine failed (HfHubHTTPError: ")
    assert "403" in line
    assert "no file was changed there: log in by `hf auth login`" in line
    assert hub_server.files["me/mine"] == before
    assert {*tmp_path.rglob("*")} == here


def test_what_no_hub_has_is_refused(
    hub_server: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub_server.files["me/other"] = {"pytorch_model.bin": b"1"}
    for name in ("me/other", "me/none"):
        with pytest.raises(CheckpointError, match=rf"^hf://{name} cannot be loaded \(\w+Error: .*needs a model.safe"):
            qnmixer.load_pretrained(f"hf://{name}")
    hub_server.files["me/other"]["model.safetensors"] = b"no weights"
    with pytest.raises(CheckpointError, match="is damaged"):
        qnmixer.load_pretrained("hf://me/other")
    with pytest.raises(ConfigError, match="hf://other names no repository of a hub: give OWNER/NAME"):
        qnmixer.load_pretrained("hf://other")
    folder = save(tmp_path / "run", *TINY)
    assert "push=../mine names no repository" in refusal(f"run={folder}", "push=../mine")
    assert "nothing would be written: give output=" in refusal(f"run={folder}")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    line = 'a hub needs huggingface_hub, which is not installed: pip install "qnmixer[hub]"'
    assert refusal(f"run={folder}", "push=me/mine") == line
    with pytest.raises(ConfigError, match="which is not installed"):
        qnmixer.load_pretrained("hf://me/mine")
