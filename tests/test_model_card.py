"""The model card, from run folders as training and evaluation leave them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qnmixer.engine.checkpoints import digest_of_weights
from qnmixer.engine.reconstructor import Reconstructor
from qnmixer.extras.model_card import model_card

RECORD = {
    "status": "done", "overrides": [], "git_commit": "abc123", "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "started": "2026-01-01T10:00:00+0000", "device": "AMD EPYC", "steps": 10, "seconds": 245.0,
    "best": {"val/psnr": 31.25},
}  # fmt: skip
Build = Callable[..., Reconstructor]


@pytest.fixture
def network(tiny_module: Callable[..., Any]) -> Build:
    return lambda *overrides: Reconstructor(tiny_module(*overrides).config)


def card(its: Reconstructor, run: Path, checkpoint: str = "best", file: Path = Path("my.safetensors")) -> str:
    path = run / "checkpoints" / f"{checkpoint}.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"global_step": 8}, path)
    return model_card(its, path, file, 4100)


def keep(folder: Path, *, table: bool = True, **record: Any) -> None:
    """What training and `qnmixer.evaluate` leave, as far as a card reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(record))
    if table:
        (folder / "table.md").write_text(f"**table of {folder.name}**\n")


def rows(text: str) -> dict[str, str]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line[1] for line in lines if len(line) == 2}


def test_it_says_what_it_was_trained_on_and_for_how_long(network: Build, tmp_path: Path) -> None:
    keep(tmp_path, table=False, **RECORD | {"resumed": [{"step": 4}]})
    text = card(network("noise=field", "trainer.tf32=true"), tmp_path)
    found = rows(text)
    assert text.startswith("# QN-Mixer, 16 × 16 pixels, 8 views\n")
    assert " parameters in float32, 0.00 MB" in text
    assert found["started from"] == "random weights"
    assert found["optimizer steps"] == "8 of 10: the best of the run by val/psnr, 31.25"
    assert found["slices seen"] == "at most 16, 2 an optimizer step"
    assert (found["seed"], found["time"]) == ("42", "4 min 05 s, the whole run")
    assert (found["device"], found["resumed"]) == ("AMD EPYC", "after steps 4")
    assert (found["commit"], found["versions"]) == ("abc123", "python 3.11.7, torch 2.13.0")
    assert found["model"].startswith("qn_mixer: n_iterations 2, channels 4")
    assert found["noise"] == "field: photons 1e+06, sigma 0.05"
    assert "n_train 8" in found["data"]
    assert "tf32 True" in found["trainer"]
    assert "simulated with noise field: photons 1e+06" in text
    assert "trained on slices of phantoms" in text
    assert "16 × 16 pixels of 25 mm" in text


def test_what_nobody_wrote_down_is_unknown_and_other_weights_are_named(network: Build, tmp_path: Path) -> None:
    found = rows(card(network(), tmp_path, "step_8"))
    assert found["optimizer steps"] == "8 of unknown: step_8.ckpt"
    unknown = ("started from", "time", "device", "commit", "versions", "started at", "ended")
    assert {found[key] for key in unknown} == {"unknown"}
    keep(tmp_path, **RECORD | {"overrides": ["finetune=runs/a"], "sinograms": "measured"})
    text = card(network(), tmp_path)
    assert rows(text)["started from"].startswith("the weights of another run")
    assert "on the sinograms of one set (data=phantoms)" in text


def test_every_table_of_these_weights_is_there_and_no_other(network: Build, tmp_path: Path) -> None:
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
