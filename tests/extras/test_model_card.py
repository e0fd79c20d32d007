"""The model card, from run folders as training and evaluation leave them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qnmixer.extras.export.card import model_card
from qnmixer.reconstruction.checkpoints import Checkpoint
from qnmixer.reconstruction.pretrained import digest_of_weights
from qnmixer.reconstruction.reconstructor import Reconstructor

from ..conftest import tiny_module
from ..saved import checkpoint_of

RECORD = {
    "status": "done", "overrides": [], "git_commit": "abc123", "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "started": "2026-01-01T10:00:00+0000", "device": "AMD EPYC", "steps": 10, "seconds": 245.0,
    "best": {"val/psnr": 31.25},
}  # fmt: skip


def network(*overrides: str) -> Reconstructor:
    return Reconstructor(tiny_module(*overrides).config)


def card(its: Reconstructor, run: Path) -> str:
    path = run / "checkpoints" / "best.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint_of(its) | {"global_step": 8}, path)
    return model_card(its, Checkpoint(path), Path("my.safetensors"))


def keep(folder: Path, *, table: bool = True, **record: Any) -> None:
    """What training and `qnmixer.evaluate` leave, as far as a card reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(record))
    if table:
        (folder / "table.md").write_text(f"**table of {folder.name}**\n")


def rows(text: str) -> dict[str, str]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line[1] for line in lines if len(line) == 2}


def test_it_says_what_it_was_trained_on_and_for_how_long(tmp_path: Path) -> None:
    found = rows(card(network(), tmp_path))  # without a record
    assert found["checkpoint"] == "best, after 8 of unknown steps"
    assert {found[key] for key in ("started from", "time", "device", "commit", "versions")} == {"unknown"}
    keep(tmp_path, table=False, **RECORD | {"overrides": ["finetune=runs/a"]})  # also after a resume
    assert rows(card(network(), tmp_path))["started from"] == "the weights of another run (finetune)"
    keep(tmp_path, table=False, **RECORD)
    text = card(network("noise=field", "trainer.tf32=true"), tmp_path)
    found = rows(text)
    assert text.startswith("# QN-Mixer, 16 × 16 pixels, 8 views\n")
    assert found["started from"] == "random weights"
    assert found["checkpoint"] == "best, after 8 of 10 steps"
    assert (found["seed"], found["time"]) == ("42", "4 min 05 s, the whole run")
    assert (found["device"], found["commit"]) == ("AMD EPYC", "abc123")
    assert found["versions"] == "python 3.11.7, torch 2.13.0"
    assert found["model"].startswith("qn_mixer: n_iterations 2, channels 4")
    assert found["noise"] == "field: photons 1e+06, sigma 0.05"
    assert "n_train 8" in found["data"]
    assert "tf32 True" in found["trainer"]


@pytest.mark.parametrize(("hessian", "name", "shown"), [
    ("bfgs", "tau", "0.250; 0.500"), ("momentum", "beta", "0.250; 0.500"),
    ("gradients", "alpha", "0.250; 0.500, 0.500"),
])  # fmt: skip
def test_it_says_how_far_H_is_used(tmp_path: Path, hessian: str, name: str, shown: str) -> None:
    its = network("model.n_iterations=3", f"model.hessian={hessian}")
    with torch.no_grad():
        for t, scalar in enumerate(its.network.scalars()[name]):
            scalar.fill_(0.25 * (t + 1))
    assert rows(card(its, tmp_path))[f"{name}_t, learned"] == shown


def test_every_table_of_these_weights_is_there_and_no_other(tmp_path: Path) -> None:
    its = network()
    ours = {"evaluated": {"weights": digest_of_weights(its.state_dict())}}
    keep(tmp_path, table=False, **RECORD | ours)
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "table.md").write_text("**table of evaluation**\n")
    done = {"status": "done", "overrides": ["data.root=/home/secret/ct"]}
    for name, record in {"ct": done | ours, "failed": ours | {"status": "failed"}, "unrecorded": done,
                         "of_others": done | {"evaluated": {"weights": "others"}}}.items():  # fmt: skip
        keep(tmp_path / "evaluations" / name, **record)
    keep(tmp_path / "child", table=False, **RECORD | ours)
    (tmp_path / "child" / "evaluation").mkdir()
    (tmp_path / "child" / "evaluation" / "table.md").write_text("of another run\n")
    text = card(its, tmp_path)
    assert [line for line in text.splitlines() if line.startswith("###")] == ["### evaluation", "### evaluations/ct"]
    assert text.index("### evaluation\n\n**table of evaluation**") < text.index("### evaluations/ct\n\n**table of ct**")
    assert "secret" not in text
    keep(tmp_path, table=False, **RECORD | {"evaluated": {"weights": "before a resume"}})
    assert "### evaluation\n" not in card(its, tmp_path)
