"""The model card of a weights file: what it is, its training, its measured results, and its limits.

card.md has its words. No figure in it is typed by hand: they come from the checkpoint, results.json and the tables in
the run folder.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qnmixer.reconstruction.checkpoints import Checkpoint, built_from, run_of
from qnmixer.reconstruction.pretrained import digest_of_weights
from qnmixer.reconstruction.reconstructor import Reconstructor, second_order
from qnmixer.reconstruction.weights import CHECKPOINT_KEY
from qnmixer.runs.public_config import without_places
from qnmixer.runs.records import duration, read_results, read_text
from qnmixer.runs.tables import Table
from qnmixer.settings.compose import quoted, values_of
from qnmixer.settings.options import TARGET
from qnmixer.settings.plugins import trust_words

_NO_VALUE = "unknown"
_SECTIONS = ("model", "geometry", "data", "noise", "loss", "optimizer", "schedule", "strategy", "trainer")


def model_card(module: Reconstructor, checkpoint: Checkpoint, file: Path) -> str:
    """The card of a weights file as Markdown, by the network that was exported and its checkpoint in a run folder."""
    config, run = module.config, run_of(checkpoint.path)
    public_config = without_places(config)
    settings = {section: _settings(getattr(public_config, section)) for section in _SECTIONS}
    training = _training(config.seed, config.finetune, checkpoint, read_results(run))
    of_weights = evaluations(run, digest_of_weights(module.state_dict()))
    tables = [f"### {folder.relative_to(run)}\n\n{read_text(folder / 'table.md').strip()}" for folder in of_weights]
    return read_text(Path(__file__).with_suffix(".md")).format(
        method=config.model.title,
        size=config.data.image_size,
        n_views=config.geometry.n_views,
        file=file.name,
        n_parameters=sum(parameter.numel() for parameter in module.network.parameters()),
        run=shlex.join([f"run={quoted(file.name)}", *trust_words(built_from(config).values())]),
        training=Table(("", ""), [*(training | settings | second_order(module.network)).items()]).markdown(),
        key=CHECKPOINT_KEY,
        evaluations="\n\n".join(tables) or "None of these weights was found in the run's folder.",
    )


def _training(seed: int, finetune: str | None, checkpoint: Checkpoint, record: dict[str, Any]) -> dict[str, str]:
    # The config of a resumed run no longer says where its first part began, but its record does.
    base = finetune or values_of(record.get("overrides", [])).get("finetune", "null") != "null"
    return {
        "started from": "the weights of another run (finetune)" if base else "random weights" if record else _NO_VALUE,
        "checkpoint": f"{checkpoint.path.stem}, after {checkpoint.steps} of {record.get('steps', _NO_VALUE)} steps",
        "seed": str(seed),
        "time": f"{duration(record['seconds'])}, the whole run" if "seconds" in record else _NO_VALUE,
        "device": str(record.get("device", _NO_VALUE)),
        "commit": str(record.get("git_commit") or _NO_VALUE),
        "versions": ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items()) or _NO_VALUE,
    }


def _settings(section: Any) -> str:
    """The option of a group, if it has a name, and its keys."""
    keys = {key: value for key, value in section.plain().items() if key not in (TARGET, "name")}
    words = [f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in keys.items()]
    return ": ".join(filter(None, (getattr(section, "name", ""), ", ".join(words))))


def evaluations(run: Path, weights: str) -> Iterator[Path]:
    """The evaluations of training and of `qnmixer.evaluate` below the run folder: folders with a table.

    Only those of the weights with this digest.
    """
    for path in sorted(run.rglob("table.md")):
        by_training = path.parent == run / "evaluation"
        results = read_results(path.parent) or (read_results(run) if by_training else {})
        if results.get("status") == "done" and results.get("evaluated", {}).get("weights") == weights:
            yield path.parent
