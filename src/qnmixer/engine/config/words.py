"""Words of a command line that no config can take, each with a line: what is wrong, and a word that then works.

Flags of other programs and words that contradict each other get theirs before Hydra reads them, others after it.
"""

import os
from collections.abc import Collection
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.config.checking import unknown_key
from qnmixer.engine.config.compose import NO_EXPERIMENT, OF_A_RUN, compose, is_override, key_of, quoted
from qnmixer.engine.config.files import CONF, TARGET, flat_keys, owners
from qnmixer.engine.config.sections import PassedOn
from qnmixer.errors import ConfigError, suggest

NOTHING = ("", "null", "none", "false", "off", "no", "~")
"""What people give a group to have none of it."""
_LEAST = {"logger": "csv", "memory": "keep", "schedule": "constant", "strategy": "single"}
"""The option that does nothing more, of groups without one that is called none or off."""


def check_groups(overrides: list[str]) -> None:
    """Raise ConfigError for a group that is chosen and deleted, or chosen by a word for nothing."""
    chosen = {key_of(word): word for word in overrides if not word.startswith("~") and key_of(word) in _groups()}
    for word in overrides:
        group, _, value = word.lstrip("+").partition("=")
        if word.startswith("~") and key_of(word) in chosen:
            raise ConfigError(f"{chosen[key_of(word)]} and {word} contradict each other: leave out {word}")
        names = sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml") if path.stem != "as_trained")
        plain = value.strip("'\"").lower()
        is_nothing = plain in NOTHING and plain not in names and word != NO_EXPERIMENT
        if word.startswith("~") or group not in _groups() or not is_nothing:
            continue
        if group == "experiment":
            raise ConfigError(f"{word} chooses nothing: leave it out")
        least = _LEAST.get(group) or next((name for name in ("none", "off") if name in names), None)
        way = f"write {group}={least}" if least else suggest("", names, limit=99)
        raise ConfigError(f"{word} chooses nothing: {way}")


def check_flags(arguments: list[str], flags: dict[str, bool], config_name: str) -> None:
    """Raise ConfigError for a flag that is not one of Hydra, such as --max-epochs 3: its line says which key it is.

    Args:
        arguments: of a command line.
        flags: those of Hydra, and whether each takes a value.
        config_name: of the command.
    """
    words = iter(enumerate(arguments))
    for i, word in words:
        flag, equal, value = word.partition("=")
        following = "" if i + 1 == len(arguments) else arguments[i + 1]
        has_value = bool(following) and not following.startswith("-") and not is_override(following)
        if not word.startswith("-"):
            continue
        name = flag.lstrip("-").replace("-", "_")
        if len(flag) > 2 and all(f"-{letter}" in flags for letter in flag[1:]):  # -mm, which argparse takes for -m -m
            raise ConfigError("flags of one letter stand apart: write -m for a sweep")
        if not flag.startswith("--") and flags.get(flag[:2]):  # its value is attached: -cjob
            continue
        if flag in flags and not (has_value and not flags[flag] and _is_key(name, config_name)):  # `--run runs/x`
            if flags[flag] and not equal:
                next(words, None)
            continue
        longer = [option for option in flags if option.startswith(flag) and len(flag) > 3]  # argparse takes these too
        if longer and not (has_value and _is_key(name, config_name)):
            raise ConfigError(f"{flag} is not an option: write {' or '.join(longer)}")
        value = value if equal else quoted(following) if has_value else "…"
        raise ConfigError(f"{flag} is not an option: {_way(name, value, config_name)}")


def _is_key(name: str, config_name: str) -> bool:
    """Whether a command has a key of that name, or a training run such a group."""
    return name in _known_keys(config_name) or (config_name in OF_A_RUN and name in _groups())


def _way(name: str, value: str, config_name: str) -> str:
    """What to write instead of a flag of that name."""
    if _is_key(name, config_name):
        return f"write {name}={value}"
    line = explain_key(name, config_name)
    if " is not known here: " in line:
        return line.partition(" is not known here: ")[2].replace("=…", f"={value}", 1)
    _, meant, key = line.partition("did you mean ")
    return f"write {key.partition(' or ')[0].rstrip('?')}={value}" if meant else line


def explain_word(word: str, config_name: str, words: Collection[str]) -> str:
    """The line for a word that Hydra's grammar does not take. `words`: of the command line."""
    if groups := sorted(path.parent.name for path in CONF.glob("*/*.yaml") if path.stem == word):
        return f"{word} is not KEY=VALUE: write {groups[0]}={word}"
    keys, typed = _known_keys(config_name), [*map(key_of, words)]
    if word in keys:
        return f"{word} is not KEY=VALUE: write {word}=…"
    needed = {"run", "sweep", *OmegaConf.missing_keys(_composed(config_name))}
    missing = [key for key in keys if key in needed and key not in typed]
    if "=" not in word and ("/" in word or os.path.exists(word) or (missing and Path(word).suffix)):
        if missing:
            return f"{word} is not KEY=VALUE: write {missing[0]}={quoted(word)}"
        if "resume" not in keys:
            return f"{word} is not KEY=VALUE, and nothing is missing: leave it out"
        return f"{word} is not KEY=VALUE: write resume={quoted(word)} or data.root={quoted(word)}"
    return (
        f"{word} is not KEY=VALUE: leave out blanks around the =, and put quotes around a value with blanks, brackets, "
        "commas or other letters than a to z: 'key=\"a b\"'"
    )


def explain_key(key: str, config_name: str, words: Collection[str] = ()) -> str:
    """The line for a key that the command does not have. `words`: of the command line."""
    group, _, name = key.partition(".")
    keys, is_chosen = _known_keys(config_name), group in map(key_of, words)
    if config_name in OF_A_RUN:
        if key == "hydra" or key in _groups():  # hydra=odd; defaults of a file that override another group
            return f"{key} cannot be chosen here: name keys, as in {key}.KEY=…, and choose options on the command line"
        line = str(unknown_key(key, {*_groups(), *keys}))
    else:
        as_trained = (CONF / group / "as_trained.yaml").is_file() and not is_chosen
        if group in _groups() and (group not in keys or as_trained):
            way = f", or choose another option of {group}" if group in keys else ""
            return f"{key} comes from the run and cannot change in {config_name}: leave it out{way}"
        line = str(unknown_key(key, keys, keys))
        trained = {option.rpartition(".")[2] for option in (*owners(), *_known_keys("train"))} | {"lr"}
        is_unlike = line.startswith("unknown key") and "did you mean" not in line
        if is_unlike and key.rpartition(".")[2] in trained and not (name and is_chosen):
            return f"{key} comes from the run and cannot change in {config_name}: leave it out"
    targets = (target for target in owners() if target.endswith(f".{TARGET}"))
    takes_more = group == "trainer" or (group in {target.partition(".")[0] for target in targets} and bool(name))
    if not line.startswith("unknown key") or not takes_more:
        return line
    if group == "trainer" and name in PassedOn.model_fields:
        line = f"unknown key {key}"  # what it is like would lead astray
    elif line.endswith("?") and not any(word.startswith((f"{group}=custom", f"{group}.{TARGET}=")) for word in words):
        return line
    return f"{line}{'' if line.endswith('?') else '.'} An argument that is not in conf/ takes a plus: +{key}=…"


@cache
def _groups() -> frozenset[str]:
    return frozenset(path.name for path in CONF.iterdir() if path.is_dir())


@cache
def _known_keys(config_name: str) -> list[str]:
    """Dotted names of all keys of a command. Those of a run are in files of conf/, which a wrong key reads anyway."""
    if config_name in OF_A_RUN:
        files = [OmegaConf.load(CONF / f"{name}.yaml") for name in {"train", config_name}]
        return [str(key) for file in files for key in file if key not in ("defaults", "hydra")] + [*owners()]
    values = OmegaConf.to_container(_composed(config_name), resolve=False)
    assert isinstance(values, dict)
    return list(flat_keys({str(key): value for key, value in values.items()}))


@cache
def _composed(config_name: str) -> DictConfig:
    """The config of a command without overrides."""
    return compose(config_name, [])
