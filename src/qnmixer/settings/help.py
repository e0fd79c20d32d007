"""`--help` from conf/: every group with what each option trades, and every key with its comment, or with what the
docstring of the target says of this argument. Hydra's own help lists names only, and takes twice as long.
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


def usage(cfg: DictConfig, config_name: str) -> str:
    """Help for a command from its composed config, Hydra's own part included."""
    choices = {group: str(option) for group, option in cfg.hydra.runtime.choices.items() if "/" not in group}
    values = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(values, dict)
    comments = _comments([CONF / "train.yaml", CONF / f"{config_name}.yaml"])
    lines = [
        cfg.hydra.help.header.strip(),
        "",
        "Every setting is KEY=VALUE or GROUP=OPTION, in any order; a later one overrides an earlier one.",
        "",
        "GROUPS (* is the current choice)",
        *_group_lines(choices, config_name, folders_of(cfg.hydra.searchpath)),
        "",
        "KEYS of the chosen options (for another option: --help data=dicom)",
        *_key_lines({str(key): value for key, value in values.items() if key != "hydra"}, comments, choices),
        "",
        "-m KEY=A,B runs every combination · --cfg job prints the config only · --hydra-help lists Hydra's own flags",
    ]
    return "\n".join(lines)


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
