"""Words of a command line that no config can take, each with a line: what is wrong, and a word that then works.

Flags of other programs and words for nothing get theirs before Hydra reads them, others after it.
"""

import difflib
import re
import shlex
from collections.abc import Collection
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from qnmixer.engine.config.checking import NAMED, has_no_value, near_keys, unknown_key, way_of
from qnmixer.engine.config.compose import compose, folders_in, is_override, is_sweep, key_of, values_of
from qnmixer.engine.config.files import CONF, OF_A_RUN, TARGET, flat_keys, option_files, options, owners
from qnmixer.engine.config.sections import PassedOn
from qnmixer.errors import ConfigError

FLAGS = {
    **dict.fromkeys(
        ("--help", "-h", "--version", "--hydra-help", "--multirun", "-m", "--resolve", "-sc", "--run", "-r"), False
    ),
    **dict.fromkeys(("--config-dir", "-cd", "--cfg", "-c", "--info", "-i", "--package", "-p"), True),
    "--shell-completion": False,
}
"""Those of Hydra that a command has, and whether each takes a value."""
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
            raise ConfigError(f"{word} is for evaluate, not for {config_name}: choose {', '.join(names)}")
        if names and plain in NOTHING:
            raise ConfigError(_without(group, word, config_name))
        if re.match(r"\[.*,", value) and group in _groups(config_name) and group not in (*NAMED, "experiment"):
            raise ConfigError(f"{word}: {group} takes one option, as in {group}={names[0]}")


def _check_logger(key: str, chosen: str) -> None:
    """Raise ConfigError for a key of a logger that is not among those chosen, which only conf/local may have."""
    name, loggers = key.split(".")[1], {*re.findall(r"\w+", chosen)}
    # An option of the user's own may include it.
    if loggers and name in options("logger") and name not in loggers and loggers <= {*options("logger"), "custom"}:
        raise ConfigError(f"{key} works with logger={name} only: choose that, or leave {key} out")


def check_mode(words: Collection[str]) -> None:
    """Raise ConfigError for a word that is for sweeps, in one run, or the reverse: Hydra would ignore it."""
    sweeps = is_sweep(words)
    for word in filter(is_override, words):
        if not sweeps and re.match(r"hydra[./](launcher|sweeper|sweep)\b", key_of(word)):
            raise ConfigError(f"{word} is for a sweep: add -m, or leave {word} out")
        if sweeps and key_of(word) == "hydra.run.dir":
            way = _override("hydra.sweep.dir", word.partition("=")[2])
            raise ConfigError(f"{word} is for one run: write {way}")


def _without(group: str, word: str, config_name: str) -> str:
    """The line for a word that chooses nothing of a group."""
    groups, names = _groups(config_name), options(group, config_name)
    if group not in groups:
        return explain_key(group, config_name)
    if groups[group] is None:
        return f"{word} chooses nothing: leave it out, or write ~{group}"
    nothing = [name for name in ("as_trained", "none", "off") if name in names]
    least = _LEAST.get(group) or next(iter(nothing), None)
    way = f"write {group}={least}" if least else f"choose {', '.join(names)}"
    return f"{word} chooses nothing: {way}"


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
            value = value if equal else following if is_value else ""
            raise ConfigError(f"{flag} is not an option: {_way(flag, value, config_name)}")


def _way(flag: str, value: str, config_name: str) -> str:
    """What to write instead of an unknown flag."""
    name, keys = flag.lstrip("-").replace("-", "_"), [*_known_keys(config_name), *_groups(config_name)]
    only = None if config_name in OF_A_RUN else keys
    if way := None if name in keys else way_of(name, only):
        return way
    if meant := [name] if name in keys else near_keys(name, keys, only):
        return f"write {_override(meant[0], value)}"
    near = difflib.get_close_matches(flag, FLAGS, n=1, cutoff=0.75) if len(name) > 1 else []
    return f"write {near[0]}" if near else explain_key(name, config_name) if name else "leave it out"


def _override(key: str, value: str) -> str:
    """An override for a shell."""
    return shlex.quote(f"{key}={value}") if value else f"{key}=…"


def explain_word(word: str, config_name: str, words: Collection[str]) -> str:
    """The line for a word that Hydra's grammar does not take. `words`: of the command line."""
    keys, groups, folders = _known_keys(config_name), _groups(config_name), folders_in(words)
    typed, path = [*map(key_of, words)], Path(word)
    needed = {"sweep", *_missing_keys(config_name)}
    missing = [key for key in keys if key in needed and key not in typed]
    key, colon, value = word.partition(":")
    name, _, listed = word.partition("=")
    is_place = "/" in word or (word and path.exists()) or len(missing) == 1 or (missing and path.suffix)
    is_value = "=" not in word and is_place
    if choosing := [group for group in sorted(groups) if word in option_files(group, config_name, folders)]:
        way = f"write {choosing[0]}={word}"
    elif path.suffix == ".yaml" and path.parent.name in groups:
        way = f"write {path.parent.name}={path.stem}"
    elif word in (*keys, *groups):
        way = f"write {word}=…"
    elif colon and key in keys:
        way = f"write {_override(key, value)}"
    elif name in keys and re.fullmatch(r"\(.*\)", listed):
        way = f"write {_override(name, f'[{listed[1:-1]}]')}"
    elif is_value and missing:
        way = f"write {_override(missing[0], word)}"
    elif is_value and "resume" in keys:
        way = f"write {_override('resume', word)} or {_override('data.root', word)}"
    elif is_value:
        return f"{word} is not KEY=VALUE, and nothing is missing: leave it out"
    else:
        way = (
            "leave out blanks around the =, and put quotes around a value with blanks, brackets, commas or "
            "other letters than a to z: 'key=\"a b\"'"
        )
    return f"{word} is not KEY=VALUE: {way}"


def explain_key(key: str, config_name: str, words: Collection[str] = ()) -> str:
    """The line for a key that the command does not have. `words`: of the command line."""
    keys, groups = _known_keys(config_name), _groups(config_name)
    if config_name not in OF_A_RUN:
        needs_value = key in _missing_keys(config_name)  # ~run: there is none to delete
        line = str(has_no_value(key) if needs_value else unknown_key(key, keys, keys))
        return _of_the_run(key, config_name, words) or _with_plus(key, line, words)
    if key in groups or key == "hydra":  # hydra=odd; defaults of a file that override another group
        return f"{key} cannot be chosen here: name keys, as in {key}.KEY=…, and choose options on the command line"
    if key in (owned := _keys_of_user(words)):
        return f"{key} works with {key.partition('.')[0]}={owned[key]} only: choose that, or leave {key} out"
    return _with_plus(key, str(unknown_key(key, {*groups, *keys, *owned})), words)


def _of_the_run(key: str, config_name: str, words: Collection[str]) -> str | None:
    """The line for a key of training in a command that takes it from the run; None for other keys."""
    (group, _, name), keys = key.partition("."), _known_keys(config_name)
    if not {"run", "sweep"} & {*keys} or way_of(key, keys):
        return None
    has_group, cannot = group in _groups(config_name), f"comes from the run and cannot change in {config_name}"
    as_trained = "as_trained" in options(group, config_name) and group not in map(key_of, words)
    if group in _groups("train") and (as_trained or not has_group):
        if group == "trainer" and name in keys:
            return f"{key} is of training: write {name}=…"
        return f"{key} {cannot}: leave it out{f', or choose another option of {group}' if has_group else ''}"
    if name or near_keys(key, keys, keys):
        return None
    of_training = [option for option in _known_keys("train") if option.endswith(f".{key}")]
    return f"{key}: {of_training[0]} {cannot}: leave it out" if of_training else None


def _with_plus(key: str, line: str, words: Collection[str]) -> str:
    """The line, and that a target or Lightning's Trainer may take more arguments than conf/ has."""
    group, _, name = key.partition(".")
    chosen = values_of(words).get(group)
    is_custom = (chosen and chosen not in options(group)) or any(
        word.startswith(f"{group}.{TARGET}=") for word in words
    )
    is_named = group in NAMED and "." in name and not key.startswith("logger.wandb.")
    takes_more = name and (is_custom or is_named or group in ("optimizer", "trainer"))
    if not line.startswith("unknown key") or not takes_more:
        return line
    if group == "trainer" and name in PassedOn.model_fields:
        line = f"unknown key {key}"  # what it is like would lead astray
    elif line.endswith("?") and not is_custom:
        return line
    return f"{line}{'' if line.endswith('?') else '.'} An argument that is not in conf/ takes a plus: +{key}=…"


def _keys_of_user(words: Collection[str]) -> dict[str, str]:
    """The keys in the user's own files, each with an option that has it."""
    keys: dict[str, str] = {}
    for path in [path for folder in folders_in(words) for path in sorted(folder.glob("*/[!_]*.yaml"))]:
        try:
            values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        except Exception:  # a broken file, which has a line of its own if it is chosen
            continue
        if isinstance(values, dict) and path.parent.name in _groups("train").keys() - {"experiment"}:
            values.pop("defaults", None)
            flat = flat_keys({str(key): value for key, value in values.items()}, f"{path.parent.name}.")
            keys |= dict.fromkeys(flat, path.stem)
    return keys


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
    by_default = flat_keys({str(key): value for key, value in values.items()})
    groups = _groups(config_name)
    return [*by_default, *(key for key in owners() if groups.get(key.partition(".")[0], "") is None)]


@cache
def _missing_keys(config_name: str) -> set[str]:
    """The keys that need a value."""
    return OmegaConf.missing_keys(_composed(config_name))


@cache
def _composed(config_name: str) -> DictConfig:
    """The config of a command without overrides."""
    return compose(config_name, [])
