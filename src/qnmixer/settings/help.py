"""`--help` from conf/: every group with what each option trades, and every key with its comment, or with what the
docstring of the target says of this argument. Hydra's own help lists names only, and takes twice as long. For train
`--help` has what most runs need, and `--help=all` the rest.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qnmixer.settings.compose import folders_of
from qnmixer.settings.options import CONF, TARGET, files_of, option_files
from qnmixer.settings.plugins import documented
from qnmixer.settings.validation import as_typed

_SENTENCE_END = re.compile(r"\.(?:\s+[A-Z]|$)")
_COMMENTED = re.compile(r"^ *(\w+):.*?\s# (.*)$", re.MULTILINE)
_OF_MOST_RUNS = (
    "experiment", "data", "model", "noise", "strategy", "geometry.n_views", "data.batch_size", "optimizer.lr",
    "trainer.max_steps", "resume",
)  # fmt: skip
"""The groups and keys that `--help` of train has."""


def usage(cfg: DictConfig, config_name: str, *, every_key: bool) -> str:
    """Help for a command from its composed config, Hydra's own part included. Without `every_key` that of train has
    only the keys of most runs."""
    chosen = cfg.hydra.runtime.choices.items()
    choices = {group: "null" if option is None else str(option) for group, option in chosen if "/" not in group}
    values = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(values, dict)
    comments = _comments([CONF / "train.yaml", CONF / f"{config_name}.yaml"])
    keys = [*_key_lines({str(key): value for key, value in values.items() if key != "hydra"}, comments, choices)]
    folders = folders_of(cfg.hydra.searchpath)
    if every_key or config_name != "train":
        options_and_keys = [
            "GROUPS (* is the current choice)",
            *_group_lines(choices, config_name, folders),
            "",
            "KEYS of the chosen options (for another option: --help=all data=dicom)",
            *keys,
        ]
    else:
        options_and_keys = [
            "WHAT MOST RUNS SET, as it is now",
            *_lines_of_most_runs(choices, config_name, folders, keys),
            "",
            f"Other groups: {', '.join(sorted({*choices} - {*_OF_MOST_RUNS, 'local'}))}",
            "--help=all says what each option trades, and lists every key",
        ]
    lines = [
        cfg.hydra.help.header.strip(),
        "",
        "Every setting is KEY=VALUE or GROUP=OPTION, in any order; a later one overrides an earlier one.",
        "",
        *options_and_keys,
        "",
        "-m KEY=A,B runs every combination · --cfg job prints the config only · --hydra-help lists Hydra's own flags",
    ]
    return "\n".join(lines)


def _lines_of_most_runs(
    choices: dict[str, str], config_name: str, folders: list[Path], keys: list[str]
) -> Iterator[str]:
    """A line for each of `_OF_MOST_RUNS`: a group with its other options, a key as in `keys`."""
    for name in _OF_MOST_RUNS:
        if name in choices:
            others = {*option_files(name, config_name, folders)} - {choices[name]}
            yield f"  {f'{name}={choices[name]}':<44} or {', '.join(sorted(others))}"
        yield from (line for line in keys if line.startswith(f"  {name}="))


def _group_lines(choices: dict[str, str], config_name: str, folders: list[Path]) -> Iterator[str]:
    """A line for each option, with the first sentence of its file. `folders`: of the user's own options."""
    for group, chosen in sorted(choices.items()):
        for option, path in sorted(option_files(group, config_name, folders).items()):
            comments = re.findall(r"^# (?!@package)(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            name = f"  {group}={option}{' *' * (option == chosen)}"
            yield f"{name:<34} {_SENTENCE_END.split([*comments, ''][0])[0]}".rstrip()


def _key_lines(
    values: dict[str, Any], comments: dict[str, str], choices: dict[str, str], at: str = ""
) -> Iterator[str]:
    """A line for each key. What is chosen is shown with the group."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            names = [choices[key], *value] if key in choices else []  # a logger's keys are in the file of its name
            files = [file for name in names for file, _ in files_of(key, name)]
            meanings = {name: _SENTENCE_END.split(text)[0] for name, text in documented(str(value.get(TARGET))).items()}
            known = meanings | (_comments(files) if files else comments)
            yield from _key_lines(value, known, {}, f"{at}{key}.")
        elif key not in ("name", TARGET) or value == "???":
            yield f"  {f'{at}{key}={as_typed(value)}':<44} {comments.get(key, '')}".rstrip()


def _comments(paths: list[Path]) -> dict[str, str]:
    """The comment of each key; the last file overrides the others."""
    return {key: comment for path in paths for key, comment in _COMMENTED.findall(path.read_text(encoding="utf-8"))}
