"""Words of a command line that no config can take, each with a line: what is wrong, and a word that then works.

Flags of other programs and words for nothing get theirs before Hydra reads them, others after it.
"""

import difflib
import os
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.config.checking import has_no_value, near_keys, unknown_key, way_of
from qnmixer.engine.config.compose import compose, is_override, key_of, quoted, values_of
from qnmixer.engine.config.files import CONF, OF_A_RUN, TARGET, flat_keys, options, owners
from qnmixer.engine.config.sections import PassedOn
from qnmixer.errors import ConfigError, suggest
from qnmixer.weights import PRETRAINED

FLAGS = {
    **dict.fromkeys(
        ("--help", "-h", "--version", "--hydra-help", "--multirun", "-m", "--resolve", "-sc", "--run", "-r"), False
    ),
    **dict.fromkeys(("--config-dir", "-cd", "--cfg", "-c", "--info", "-i", "--package", "-p"), True),
    "--shell-completion": False,
}
"""Those of Hydra that a command has, and whether each takes a value."""
_PLACES = {"run": PRETRAINED, "sweep": "latest"}
"""Words that stand for a folder, by key."""
NOTHING = ("", "null", "none", "false", "off", "no", "~")
"""What people give a group to have none of it."""
_LEAST = {"logger": "csv", "memory": "keep", "schedule": "constant", "strategy": "single"}
"""The option that does nothing more, of groups without one that is called none or off."""


def check_groups(overrides: list[str], config_name: str) -> None:
    """Raise ConfigError for a group that is chosen by a word for nothing, or by an option of another command."""
    for word in overrides:
        group, _, value = word.lstrip("+").partition("=")
        names, plain = options(group, config_name), value.strip("'\"").lower()
        if plain in names:
            continue
        if group.startswith("logger."):
            _check_logger(group, values_of(overrides).get("logger", ""))
        if plain in options(group, "evaluate"):
            raise ConfigError(f"{word} is for evaluate, not for {config_name}: {suggest('', names, limit=99)}")
        if names and plain in NOTHING:
            raise ConfigError(_without(group, word, config_name))


def _check_logger(key: str, chosen: str) -> None:
    """Raise ConfigError for a key of a logger that is not among those chosen, which only conf/local may have."""
    name, loggers = key.split(".")[1], {*re.findall(r"\w+", chosen)}
    # An option of the user's own may include it.
    if loggers and name in options("logger") and name not in loggers and loggers <= {*options("logger"), "custom"}:
        raise ConfigError(f"{key} works with logger={name} only: choose that, or leave {key} out")


def _without(group: str, word: str, config_name: str) -> str:
    """The line for a word that chooses nothing of a group."""
    groups, names = _groups(config_name), options(group, config_name)
    if group not in groups:
        return explain_key(group, config_name)
    if groups[group] is None:
        return f"{word} chooses nothing: leave it out, or write ~{group}"
    nothing = [name for name in ("as_trained", "none", "off") if name in names]
    least = _LEAST.get(group) or next(iter(nothing), None)
    return f"{word} chooses nothing: {f'write {group}={least}' if least else suggest('', names, limit=99)}"


def check_flags(arguments: list[str], config_name: str) -> None:
    """Raise ConfigError for a flag that is not one of Hydra, such as --max-epochs 3: its line says which key it is."""
    words = iter(zip(arguments, [*arguments[1:], ""], strict=False))
    for word, following in words:
        flag, equal, value = word.partition("=")
        if flag in FLAGS:
            if FLAGS[flag] and not equal:
                next(words, None)
        elif word.startswith("-"):
            is_value = re.match(r"-\d|[^-]", following) and not is_override(following)
            value = value if equal else quoted(following) if is_value else "…"
            raise ConfigError(f"{flag} is not an option: {_way(flag, value, config_name)}")


def _way(flag: str, value: str, config_name: str) -> str:
    """What to write instead of an unknown flag."""
    name, keys = flag.lstrip("-").replace("-", "_"), _known_keys(config_name)
    if name in keys or name in _groups(config_name):
        return f"write {name}={value}"
    only = None if config_name in OF_A_RUN else keys
    if way := way_of(name, only):
        return way.replace("=…", f"={value}", 1)
    if meant := near_keys(name, [*keys, *_groups(config_name)], only):
        return f"write {meant[0]}={value}"
    near = difflib.get_close_matches(flag, FLAGS, n=1, cutoff=0.75)
    return f"write {near[0]}" if near else explain_key(name, config_name)


def explain_word(word: str, config_name: str, words: Collection[str]) -> str:
    """The line for a word that Hydra's grammar does not take. `words`: of the command line."""
    if groups := [group for group in sorted(_groups(config_name)) if word in options(group, config_name)]:
        return f"{word} is not KEY=VALUE: write {groups[0]}={word}"
    keys, typed = _known_keys(config_name), [*map(key_of, words)]
    if word in keys:
        return f"{word} is not KEY=VALUE: write {word}=…"
    needed = {"run", "sweep", *OmegaConf.missing_keys(_composed(config_name))}
    missing = [key for key in keys if key in needed and key not in typed]
    is_place = (
        "/" in word or os.path.exists(word) or (missing and (Path(word).suffix or word == _PLACES.get(missing[0])))
    )
    if "=" not in word and is_place:
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
    keys, groups = _known_keys(config_name), _groups(config_name)
    if config_name not in OF_A_RUN:
        line = str(has_no_value(key) if key in keys else unknown_key(key, keys, keys))  # ~run has none to delete
        return _of_the_run(key, config_name, words) or _with_plus(key, line, words)
    if key in groups or key == "hydra":  # hydra=odd; defaults of a file that override another group
        return f"{key} cannot be chosen here: name keys, as in {key}.KEY=…, and choose options on the command line"
    return _with_plus(key, str(unknown_key(key, {*groups, *keys})), words)


def _of_the_run(key: str, config_name: str, words: Collection[str]) -> str | None:
    """The line for a key of training in a command that takes it from the run; None for other keys."""
    (group, _, name), keys = key.partition("."), _known_keys(config_name)
    has_group, is_chosen = group in _groups(config_name), group in map(key_of, words)
    of_training = {option.rpartition(".")[2] for option in _known_keys("train")}
    as_trained = not is_chosen and "as_trained" in options(group, config_name)
    is_taken = group in _groups("train") and (as_trained or not has_group)
    is_unlike = not (way_of(key, keys) or key in owners("evaluate") or near_keys(key, keys, keys))
    if not is_taken and not (is_unlike and key.rpartition(".")[2] in of_training and not (name and is_chosen)):
        return None
    if not has_group and name in keys:  # trainer.accelerator
        return f"{key} is of training: write {name}=…"
    way = f", or choose another option of {group}" if is_taken and has_group else ""
    return f"{key} comes from the run and cannot change in {config_name}: leave it out{way}"


def _with_plus(key: str, line: str, words: Collection[str]) -> str:
    """The line, and that a target or Lightning's Trainer may take more arguments than conf/ has."""
    group, _, name = key.partition(".")
    has_target = any(owned.startswith(f"{group}.") and owned.endswith(f".{TARGET}") for owned in owners())
    if not line.startswith("unknown key") or not name or not (has_target or group == "trainer"):
        return line
    if group == "trainer" and name in PassedOn.model_fields:
        line = f"unknown key {key}"  # what it is like would lead astray
    elif line.endswith("?") and not any(word.startswith((f"{group}=custom", f"{group}.{TARGET}=")) for word in words):
        return line
    return f"{line}{'' if line.endswith('?') else '.'} An argument that is not in conf/ takes a plus: +{key}=…"


@cache
def _groups(config_name: str) -> dict[str, str | None]:
    """The groups of a command, each with its default."""
    file = OmegaConf.load(CONF / f"{'train' if config_name in OF_A_RUN else config_name}.yaml")
    chosen = [default for default in file.defaults if isinstance(default, DictConfig)]
    return {str(group): option for default in chosen for group, option in default.items() if " " not in str(group)}


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
