import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qnmixer.engine.config import Config, parse
from qnmixer.engine.config.compose import compose
from qnmixer.engine.config.run import parse_file
from qnmixer.engine.config.target import keys_of
from qnmixer.extras import model_card as module
from qnmixer.extras.model_card import Exported, model_card

TinyConfig = Callable[..., Config]
RECORD = {
    "status": "done", "overrides": [], "git_commit": "abc123", "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "started": "2026-01-01T10:00:00+0000", "device": "AMD EPYC", "threads": 2, "steps": 10, "seconds": 245.0,
    "best": {"val/psnr": 31.25},
}  # fmt: skip


def card(config: Config, run: Path, checkpoint: str = "best", file: Path = Path("my.safetensors")) -> str:
    which: dict[str, Any] = {"run": run, "checkpoint": checkpoint, "weights": "ours", "step": 8}
    return model_card(Exported(file=file, size=4100, n_parameters=1234, config=config, **which))


def keep(folder: Path, **record: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(record))


def evaluated(config: Config, weights: str = "ours", data: str = "phantoms") -> dict[str, Any]:
    return {"evaluated": {"weights": weights, "data": data, "noise": keys_of(config.noise)}}


def table(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(f"**table of {folder.name}**\n")


def measure(folder: Path, of: dict[str, Any], status: str = "done") -> None:
    """What `qnmixer.evaluate` leaves, as far as a card reads it."""
    keep(folder, status=status, overrides=["data.root=/home/secret/ct"], **of)
    table(folder)


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


def test_it_says_that_products_were_rounded(tiny_config: TinyConfig, tmp_path: Path) -> None:
    keep(tmp_path, **RECORD)
    hardware = rows(card(tiny_config("trainer.tf32=true"), tmp_path))["hardware"]
    assert hardware.endswith("precision 32 with products in TF32")


def test_few_slices_are_named(tiny_config: TinyConfig, tmp_path: Path) -> None:
    few = rows(card(tiny_config("data.train_slices=4"), tmp_path))["slices"]
    assert "the same 4 in every epoch" in few
    more_than_there_are = rows(card(tiny_config("data.train_slices=5000"), tmp_path))["slices"]
    assert "the same 8 in every epoch" in more_than_there_are
    dicom = ["data=dicom", "data.root=/ct"]
    files = rows(card(parse(compose("train", dicom)), tmp_path))["slices"]
    assert files.startswith("slices from files, data=dicom, 256 × 256, split random; number of slices: unknown")
    files = rows(card(parse(compose("train", [*dicom, "data.train_slices=7"])), tmp_path))["slices"]
    assert files.endswith("; number of slices: at most 7")


def test_what_nobody_wrote_down_is_unknown(tiny_config: TinyConfig, tmp_path: Path) -> None:
    found = rows(card(tiny_config(), tmp_path, "last"))
    assert found["optimizer steps"] == "8 of unknown: the last of the run"
    assert {found[key] for key in ("time", "commit", "versions", "started at", "ended")} == {"unknown"}
    assert found["hardware"].startswith("unknown;")


def test_a_checkpoint_that_is_neither_is_called_by_its_name(tiny_config: TinyConfig, tmp_path: Path) -> None:
    assert rows(card(tiny_config(), tmp_path, "step_8"))["optimizer steps"] == "8 of unknown: step_8.ckpt"


def test_weights_of_another_run_are_named_also_after_a_resume(tiny_config: TinyConfig, tmp_path: Path) -> None:
    resumed = [{"step": 4, "at": "2026-01-01T12:00:00+0000"}]
    keep(tmp_path, **RECORD | {"overrides": ["finetune=runs/a"], "resumed": resumed})
    found = rows(card(tiny_config(), tmp_path))
    assert found["started from"].startswith("the weights of another run")
    assert found["resumed"] == "after steps 4"


def test_a_run_from_the_checkpoint_of_another_one_has_its_steps_and_not_its_time(
    tiny_config: TinyConfig, tmp_path: Path
) -> None:
    keep(tmp_path, **RECORD | {"overrides": ["resume=runs/a/checkpoints/best.ckpt"]})
    expected = "a checkpoint of another run (resume), whose steps are in this table, but not its time"
    assert rows(card(tiny_config(), tmp_path))["started from"] == expected


def test_every_table_of_these_weights_is_there_and_no_other(tiny_config: TinyConfig, tmp_path: Path) -> None:
    ours = evaluated(tiny_config())
    keep(tmp_path, **RECORD | ours)
    table(tmp_path / "evaluation")
    measure(tmp_path / "evaluations" / "ct", ours)
    measure(tmp_path / "evaluations" / "failed", ours, status="failed")
    measure(tmp_path / "evaluations" / "of_others", evaluated(tiny_config(), "others"))
    measure(tmp_path / "evaluations" / "unrecorded", {})
    keep(tmp_path / "child", **RECORD | ours)
    table(tmp_path / "child" / "evaluation")
    text = card(tiny_config(), tmp_path)
    assert [line for line in text.splitlines() if line.startswith("###")] == ["### evaluation", "### evaluations/ct"]
    assert text.index("### evaluation\n\n**table of evaluation**") < text.index("### evaluations/ct\n\n**table of ct**")
    assert "secret" not in text


@pytest.mark.parametrize("record", [{"status": "failed"}, {"evaluated": {"weights": "before a resume"}}], ids=str)
def test_what_training_ends_with_may_be_of_other_weights(
    tiny_config: TinyConfig, tmp_path: Path, record: dict[str, Any]
) -> None:
    keep(tmp_path, **RECORD | evaluated(tiny_config()) | record)
    table(tmp_path / "evaluation")
    assert "None of these weights was found in the run's folder." in card(tiny_config(), tmp_path)


@pytest.mark.parametrize(
    ("data", "noise", "known", "unknown"),
    [
        ("phantoms", [], [], ["No table above is of real slices", "no table above has other noise"]),
        ("dicom", [], ["on real slices are in other above"], ["no table above has other noise"]),
        ("phantoms", ["noise.photons=1e4"], ["with other noise are in other above"], ["No table above is of real"]),
    ],
    ids=str,
)
def test_where_it_fails_follows_from_what_was_trained_and_measured(
    tiny_config: TinyConfig, tmp_path: Path, data: str, noise: list[str], known: list[str], unknown: list[str]
) -> None:
    measure(tmp_path / "other", evaluated(tiny_config("noise=field", *noise), data=data))
    text = card(tiny_config("noise=field"), tmp_path)
    limits = text[text.index("## Where it fails") :]
    assert all(sentence in limits for sentence in [*known, *unknown])
    assert "It has seen no patient" in limits
    assert "16 × 16 pixels of 25 mm" in limits


def test_measured_sinograms_are_not_called_simulated(tmp_path: Path) -> None:
    keep(tmp_path / "mine", **RECORD, sinograms="measured")
    of_mine = ["data=custom", "data._target_=my.Pairs"]
    for name, run, words in (
        ("lodopab", tmp_path, ["experiment=lodopab", "data.root=/x"]), ("my.Pairs", tmp_path / "mine", of_mine),
    ):  # fmt: skip
        text = card(parse_file(compose("train", words)), run)
        assert rows(text)["sinograms"] == f"those of data={name}, to which no noise was added"
        assert "simulated" not in text[text.index("## Where it fails") :]
        assert "trained with noise" not in text


def finetuning(text: str) -> list[str]:
    """The overrides of the training command, as a shell splits them, without the weights and the slices."""
    (line,) = [line for line in text.splitlines() if "finetune=my.safetensors" in line]
    return shlex.split(line)[4:-2]


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=learn", "model.data_term=fbp", "geometry.n_views=64"],
        ["noise=field", "noise.photons=10000.0", "geometry.first_angle=0.0"],
        ["model=learn", "noise=none"],
    ],
    ids=str,
)
def test_how_to_use_gives_the_overrides_that_differ_from_the_defaults(tmp_path: Path, overrides: list[str]) -> None:
    config = parse(compose("train", overrides))
    given = finetuning(card(config, tmp_path))
    again = parse(compose("train", given))
    assert (again.model, again.geometry, again.noise) == (config.model, config.geometry, config.noise)
    assert {*given} <= {*overrides}


def test_arguments_of_ones_own_network_are_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "network_of_mine.py").write_text("from qnmixer.models import LEARN as Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    choice = ["model=custom", "model._target_=network_of_mine.Mine"]
    text = card(parse(compose("train", [*choice, "+model.data_term=fbp"])), tmp_path)
    assert finetuning(text) == choice
    assert "+GROUP.KEY=VALUE" in text
    assert "left out. Arguments of the user's own classes are not left out" in text
    assert "user's own" not in card(parse(compose("train", choice)), tmp_path)


def test_shipped_weights_are_called_by_their_name(
    tiny_config: TinyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHIPPED", tmp_path / "shipped.safetensors")
    assert "run=pretrained input=" in card(tiny_config(), tmp_path, file=tmp_path / "shipped.safetensors")


def test_its_commands_can_be_read_for_any_name(tiny_config: TinyConfig, tmp_path: Path) -> None:
    text = card(tiny_config(), tmp_path, file=tmp_path / "it's jürgen.safetensors")
    (line,) = [line for line in text.splitlines() if "qnmixer.evaluate run=" in line or "evaluate 'run=" in line]
    given = next(word for word in shlex.split(line) if word.startswith("run="))
    assert compose("evaluate", [given]).run == "it's jürgen.safetensors"
