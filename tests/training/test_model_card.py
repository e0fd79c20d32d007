import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qnmixer.cli import compose
from qnmixer.config import Config, parse
from qnmixer.training import model_card as module
from qnmixer.training.model_card import Exported, model_card

TinyConfig = Callable[..., Config]
RECORD = {
    "status": "done", "overrides": [], "git_commit": "abc123", "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "started": "2026-01-01T10:00:00+0000", "device": "AMD EPYC", "threads": 2, "steps": 10, "seconds": 245.0,
    "best": {"val/psnr": 31.25},
}  # fmt: skip


def card(config: Config, run: Path, checkpoint: str = "best", file: Path = Path("my.safetensors")) -> str:
    return model_card(
        Exported(file=file, size=4100, n_parameters=1234, config=config, run=run, checkpoint=checkpoint, step=8)
    )


def keep(folder: Path, **record: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(record))


def measure(folder: Path, *overrides: str, started: str = "2026-01-02T10:00:00+0000") -> None:
    """What `qnmixer.evaluate` leaves, as far as a card reads it."""
    keep(folder, status="done", overrides=["run=runs/x", *overrides], started=started)
    (folder / "table.md").write_text(f"**table of {folder.name}**\n")


def rows(text: str) -> dict[str, str]:
    lines = [
        line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and line.count("|") == 3
    ]
    return {line[0]: line[1] for line in lines if len(line) == 2}


def test_it_says_what_it_was_trained_on_and_for_how_long(tiny_config: TinyConfig, tmp_path: Path) -> None:
    keep(tmp_path, **RECORD)
    text = card(tiny_config("noise=field", "data.seed=7"), tmp_path)
    found = rows(text)
    assert text.startswith("# QN-Mixer, 16 × 16 pixels, 8 views\n")
    assert "1,234 parameters in float32, 0.00 MB" in text
    assert found["slices"].startswith("phantoms drawn by this program, 16 × 16, new ones every epoch of 8;")
    assert found["optimizer steps"] == "8 of 10: the best of the run by val/psnr, 31.25"
    assert found["slices seen"] == "at most 16, 2 an optimizer step"
    assert found["seeds"] == "42, of slices 7"
    assert found["time"] == "4 min 05 s, the whole run"
    assert found["hardware"] == "AMD EPYC, threads: 2; strategy single, precision 32"
    assert (found["commit"], found["versions"]) == ("abc123", "python 3.11.7, torch 2.13.0")
    assert found["sinograms"].startswith("simulated from the grid of the image; noise field: photons 1e+06")


def test_few_slices_are_told(tiny_config: TinyConfig, tmp_path: Path) -> None:
    few = rows(card(tiny_config("data.train_slices=4"), tmp_path))["slices"]
    assert "the same 4 in every epoch" in few
    files = rows(card(parse(compose("train", ["data=dicom", "data.root=/ct"])), tmp_path))["slices"]
    assert files.startswith("slices from files, data=dicom, 256 × 256, split random; how many: unknown")


def test_what_nobody_wrote_down_is_unknown(tiny_config: TinyConfig, tmp_path: Path) -> None:
    found = rows(card(tiny_config(), tmp_path, "last"))
    assert found["optimizer steps"] == "8 of unknown: the last of the run"
    assert {found[key] for key in ("time", "commit", "versions", "begun at", "ended")} == {"unknown"}
    assert found["hardware"].startswith("unknown;")


def test_weights_of_another_run_are_told_also_after_a_resume(tiny_config: TinyConfig, tmp_path: Path) -> None:
    resumed = [{"step": 4, "at": "2026-01-01T12:00:00+0000"}]
    keep(tmp_path, **RECORD | {"overrides": ["finetune=runs/a"], "resumed": resumed})
    found = rows(card(tiny_config(), tmp_path))
    assert found["begun from"].startswith("the weights of another run")
    assert found["gone on with"] == "after steps 4"


def test_every_table_of_these_weights_is_there_and_no_other(tiny_config: TinyConfig, tmp_path: Path) -> None:
    keep(tmp_path, **RECORD | {"resumed": [{"step": 4, "at": "2026-01-01T12:00:00+0000"}]})
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "table.md").write_text("**table of training**\n")
    measure(tmp_path / "evaluations" / "ct", "data=dicom", "data.root=/home/secret/ct")
    measure(tmp_path / "evaluations" / "earlier", started="2026-01-01T11:00:00+0000")
    measure(tmp_path / "evaluations" / "of_last", "checkpoint=last")
    text = card(tiny_config(), tmp_path)
    assert text.index("**table of training**") < text.index("### evaluations/ct\n\n**table of ct**")
    assert "earlier" not in text
    assert "of_last" not in text
    assert "secret" not in text
    assert "**table of of_last**" in card(tiny_config(), tmp_path, "last")


@pytest.mark.parametrize(
    ("overrides", "known", "unknown"),
    [
        ([], [], ["No table above is of real slices", "no table above has other noise"]),
        (["data=dicom"], ["on real slices is in other above"], ["no table above has other noise"]),
        (["noise=field"], ["What other noise does is in other above"], ["No table above is of real slices"]),
    ],
    ids=str,
)
def test_where_it_fails_follows_from_what_was_trained_and_measured(
    tiny_config: TinyConfig, tmp_path: Path, overrides: list[str], known: list[str], unknown: list[str]
) -> None:
    measure(tmp_path / "other", *overrides)
    text = card(tiny_config(), tmp_path)
    limits = text[text.index("## Where it fails") :]
    assert all(sentence in limits for sentence in [*known, *unknown])
    assert "It has seen no patient" in limits
    assert "16 × 16 pixels of 25 mm" in limits


def test_how_to_use_gives_the_overrides_that_differ_from_the_defaults(tmp_path: Path) -> None:
    overrides = ["model=learn", "model.data_term=fbp", "geometry.n_views=64"]
    text = card(parse(compose("train", overrides)), tmp_path)
    (line,) = [line for line in text.splitlines() if "finetune=my.safetensors" in line]
    given = line.split("finetune=my.safetensors ")[1].removesuffix(" data=dicom data.root=/path/to/dicom").split()
    usual = [word for word in given if word not in overrides]
    assert parse(compose("train", given)).model == parse(compose("train", overrides)).model
    assert parse(compose("train", given)).geometry == parse(compose("train", overrides)).geometry
    assert usual == []


def test_what_is_shipped_goes_by_its_name(
    tiny_config: TinyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHIPPED", tmp_path / "shipped.safetensors")
    assert "run=pretrained input=" in card(tiny_config(), tmp_path, file=tmp_path / "shipped.safetensors")
