"""The text of `--help`: every group with what each option trades, and every key with its meaning, from conf/.

Hydra's own help lists names only, and takes twice as long.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.config.compose import CONF
from qnmixer.engine.config.options import files_of

_HIDDEN = ("_", "as_trained")  # parts of other files; an option of evaluate only, which is its default
_SENTENCE_END = re.compile(r"\.(?:\s+[A-Z]|$)")
_COMMENT = re.compile(r"^ *(\w+):.*?\s# (.*)$", re.MULTILINE)


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
        *_groups(choices),
        "",
        "KEYS of the chosen options (for another option: --help data=dicom)",
        *_keys({str(key): it for key, it in values.items() if key != "hydra"}, comments, choices),
        "",
        "-m KEY=A,B runs every combination · --cfg job prints the config only · --hydra-help lists Hydra's own flags",
    ]
    return "\n".join(lines)


def _groups(choices: dict[str, str]) -> Iterator[str]:
    """A line for each option, with the first sentence of its file."""
    for group, chosen in sorted(choices.items()):
        for path in sorted((CONF / group).glob("*.yaml")):
            if not path.stem.startswith(_HIDDEN) or path.stem == chosen:
                first = next(line for line in path.read_text(encoding="utf-8").splitlines() if "@package" not in line)
                name = f"  {group}={path.stem}{' *' * (path.stem == chosen)}"
                yield f"{name:<34} {_SENTENCE_END.split(first.lstrip('# '))[0]}"


def _keys(values: dict[str, Any], comments: dict[str, str], choices: dict[str, str], at: str = "") -> Iterator[str]:
    """A line for each key. What is chosen is shown with the group."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            names = [choices[key], *value] if key in choices else []  # a logger's keys are in the file of its name
            files = [file for name in names for file in files_of(CONF / key / f"{name}.yaml", below=True)]
            yield from _keys(value, _comments(files) if files else comments, {}, f"{at}{key}.")
        elif key not in ("name", "_target_") or value == "???":
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            yield f"  {f'{at}{key}={text}':<44} {comments.get(key, '')}".rstrip()


def _comments(paths: list[Path]) -> dict[str, str]:
    """The comment of each key; the last file overrides the others."""
    return {key: comment for path in paths for key, comment in _COMMENT.findall(path.read_text(encoding="utf-8"))}
