"""The text of `--help`: every group with what each option trades, and every key with its meaning, from conf/.

Hydra's own help lists names only, and takes twice as long.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.config.target import files_of

_HIDDEN = ("_", "as_trained")  # parts of other files; an option of evaluate only, which is its default
_SENTENCE_END = re.compile(r"\.(?=\n|\s+[A-Z]|$)")
_COMMENT = re.compile(r"^ *(\w+):.*?\s# (.*)$", re.MULTILINE)


def usage(cfg: DictConfig, conf: Path, config_name: str) -> str:
    """Help for a command.

    Args:
        cfg: its composed config, Hydra's own part included.
        conf: folder of the config files.
        config_name: the command's own file there.
    """
    choices = {group: str(option) for group, option in cfg.hydra.runtime.choices.items() if "/" not in group}
    lines = [
        cfg.hydra.help.header.strip(),
        "",
        "Every setting is KEY=VALUE or GROUP=OPTION, in any order; a later one overrides an earlier one.",
        "",
        "GROUPS (* is the current choice)",
        *_groups(choices, conf),
        "",
        "KEYS of the chosen options (for another option: --help data=dicom)",
        *_keys(cfg, choices, conf, config_name),
        "",
        "-m KEY=A,B runs every combination · --cfg job prints the config only · --hydra-help lists Hydra's own flags",
    ]
    return "\n".join(lines)


def _groups(choices: dict[str, str], conf: Path) -> Iterator[str]:
    for group, chosen in sorted(choices.items()):
        paths = sorted((conf / group).glob("*.yaml"))
        for path in paths:
            if path.stem.startswith(_HIDDEN) and path.stem != chosen:
                continue
            name = f"  {group}={path.stem}{' *' * (path.stem == chosen)}"
            yield f"{name:<34} {_opening(path)}"


def _opening(path: Path) -> str:
    """The first sentence of a config file. It ends at a full stop before a capital letter, or at the end of a line."""
    comments = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("#"):
            break
        comments.append(line.lstrip("# "))
    return _SENTENCE_END.split("\n".join(comments))[0].replace("\n", " ")


def _keys(cfg: DictConfig, choices: dict[str, str], conf: Path, config_name: str) -> Iterator[str]:
    values = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(values, dict)
    root = _comments([conf / "train.yaml", conf / f"{config_name}.yaml"])
    for key, value in ((str(key), value) for key, value in values.items()):
        if isinstance(value, dict) and key != "hydra":
            comments = _comments(files_of(conf / key / f"{choices.get(key)}.yaml", below=True))
            for name, item in ((str(name), item) for name, item in value.items()):
                if isinstance(item, dict) and key in ("callbacks", "metrics", "logger"):
                    yield f"  {key}.{name}=…"
                    its = comments or _comments([path] if (path := conf / key / f"{name}.yaml").is_file() else [])
                    yield from (_line(f"{key}.{name}.{k}", v, its.get(str(k), "")) for k, v in item.items())
                elif isinstance(item, dict) and name == "sources":
                    for source, its in ((f"{key}.{name}.{one}", its) for one, its in item.items()):
                        yield from (_line(f"{source}.{k}", v, comments.get(str(k), "")) for k, v in its.items())
                elif name != "name" and (name != "_target_" or item == "???"):  # shown with the group
                    yield _line(f"{key}.{name}", item, comments.get(name, ""))
        elif not isinstance(value, dict):
            yield _line(key, value, root.get(key, ""))


def _comments(paths: list[Path]) -> dict[str, str]:
    """The comment of each key; the last file overrides the others."""
    return {key: comment for path in paths for key, comment in _COMMENT.findall(path.read_text(encoding="utf-8"))}


def _line(key: str, value: Any, comment: str) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"  {f'{key}={text}':<44} {comment}".rstrip()
