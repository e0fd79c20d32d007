"""Compose the config of a command from conf/ and overrides."""

import copy
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, ValueType
from omegaconf import DictConfig, OmegaConf, open_dict

from qnmixer.config.overrides import is_override, key_of, values_of, with_length
from qnmixer.config.run import Config, checked, fill_roots, parse_file
from qnmixer.config.search_path import CONF
from qnmixer.errors import ConfigError
from qnmixer.plugins import is_trusted

OF_A_RUN = ("train", "plan", "doctor")
"""Commands with the full config of a run; the others read it from a run folder."""

_OF_ONE_OPTION = {"geometry": ["n_views"], "optimizer": []}
"""Groups whose values belong to one option, as a bin's width to a scanner; the keys whose values fit every option."""


def compose(config_name: str, overrides: list[str], with_hydra: bool = False) -> DictConfig:
    """The config of a command, without running anything. `with_hydra`: with Hydra's own part."""
    if config_name in OF_A_RUN:
        overrides = fitted(config_name, with_length(overrides))
    return compose_as_given(config_name, overrides, with_hydra)


def fitted(config_name: str, overrides: list[str]) -> list[str]:
    """Add overrides that make an experiment fit the options that the command chooses.

    `experiment=demo model=tv` is TV in the setting of demo. A key that the experiment sets and the chosen option lacks
    is deleted (`~GROUP.KEY`). If a model lacks one, it takes all sizes from its own config: T of TV means something
    else than T of QN-Mixer. A scanner or optimizer that is not the experiment's keeps its own values, except the number
    of views. An option also takes its own value of a key if the experiment's value breaks a rule, such as 32 channels
    in RegFormer. Keys that the command names stay. Nothing is added twice.

    Args:
        overrides: of a command line. Other words, such as flags, stay unchanged.
    """
    words, overrides = overrides, [*filter(is_override, overrides)]
    given = values_of(overrides)
    chosen = [it for it in overrides if (CONF / key_of(it)).is_dir() and "/" not in key_of(it) and it[:1] != "~"]
    sections = [key for key in map(key_of, chosen) if key != "experiment"]
    if not sections or not any(key.partition("/")[0] == "experiment" for key in given):
        return words
    search = [it for it in overrides if key_of(it) == "hydra.searchpath"]
    experiment = [it for it in chosen if key_of(it) == "experiment"]
    with_experiment = compose_as_given(config_name, overrides)
    alone = compose_as_given(config_name, [*search, *(it for it in chosen if it not in experiment)])
    more: list[str] = []
    kept: list[tuple[str, str, Any]] = []
    for section in sections:
        found, own = with_experiment[section], alone[section]
        free = [key for key in found if not any(f"{it}.".startswith(f"{section}.{key}.") for it in given)]
        surplus = [key for key in free if key not in own]
        differing = [key for key in free if key in own and found[key] != own[key]]
        with open_dict(with_experiment):
            for key in surplus:
                del found[key]
        more += [f"~{section}.{key}" for key in surplus]
        restored: list[str] = []
        if section == "model" and surplus:
            restored = differing
        elif section in _OF_ONE_OPTION and given[section] != _choice(config_name, [*search, *experiment], section):
            restored = [key for key in differing if key not in _OF_ONE_OPTION[section]]
        found.update({key: own[key] for key in restored})
        more += [_override(section, key, own[key]) for key in restored]
        kept += [(section, key, own[key]) for key in differing if key not in restored]
    return [*words, *more, *_own_instead(with_experiment, kept)]


def _choice(config_name: str, overrides: list[str], group: str) -> str:
    """The option of a group that these overrides choose, or that is the default."""
    config = compose_as_given(config_name, overrides, with_hydra=True)
    return str(config.hydra.runtime.choices[group])


def _own_instead(config: DictConfig, kept: list[tuple[str, str, Any]]) -> list[str]:
    """The override that restores an option's own value of a single key, if the experiment's value breaks a rule.

    Args:
        config: composed, without keys that chosen options lack.
        kept: section, key and own value of each key that the experiment changes.
    """
    if not kept or _is_valid(config):
        return []
    for section, key, own in kept:
        changed = copy.deepcopy(config)
        changed[section][key] = own
        if _is_valid(changed):
            return [_override(section, key, own)]
    return []


def _override(section: str, key: str, value: Any) -> str:
    return f"{section}.{key}={'null' if value is None else value}"


def _is_valid(config: DictConfig) -> bool:
    """Whether the sections of a training run break no rule. The overrides may be another's: only our code is asked."""
    sections = OmegaConf.masked_copy(config, [field.name for field in fields(Config)])
    fill_roots(sections)
    try:
        run = parse_file(sections)
        if all(is_trusted(target, ()) for target in (run.model.targets() | run.noise.targets()).values()):
            checked(run, "model", "noise")
    except ConfigError:
        return False
    return True


def compose_as_given(config_name: str, overrides: list[str], with_hydra: bool = False) -> DictConfig:
    """Compose as `compose` does, from exactly these overrides and no others."""
    if not CONF.is_dir():
        raise ConfigError(f"no configs at {CONF}: in a clone, `git config core.symlinks true` and check it out again")
    # Hydra refuses a second initialisation in one process, and a program may compose many configs.
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            return hydra.compose(config_name, overrides, return_hydra_config=with_hydra)
        except (ValueError, TypeError) as error:  # Hydra raises these for data=null, trainer=3 or model=[1]
            groups = " ".join(o for o in overrides if (CONF / o.partition("=")[0]).is_dir())
            raise ConfigError(f"{groups}: give a group the name of one of its options, as in data=dicom") from error


def compose_sweep(config_name: str, overrides: list[str]) -> DictConfig:
    """The config of a sweep's first job, with Hydra's own part.

    Every value is tried with the first values of all other keys. So a misspelt value fails before the first job.
    """
    parsed = OverridesParser.create().parse_overrides(overrides)
    # A glob only finds names that exist.
    values = [list(_values(override)) for override in parsed if override.value_type != ValueType.GLOB_CHOICE_SWEEP]
    first = [its[0] for its in values]
    for i, its in enumerate(values):
        for value in its[1:]:
            compose(config_name, [*first[:i], value, *first[i + 1 :]])
    return compose(config_name, first, with_hydra=True)


def _values(override: Override) -> Iterator[str]:
    """One override for each value that a sweep gives a key. An interval gives its start."""
    if override.is_discrete_sweep():
        yield from (f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator())
    elif isinstance(interval := override.value(), IntervalSweep):
        yield f"{override.get_key_element()}={interval.start}"
    else:
        yield override.input_line or ""
