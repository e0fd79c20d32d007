"""Compose the config of a command from conf/ and overrides."""

from collections.abc import Iterator

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, ValueType
from omegaconf import DictConfig

from qnmixer.engine.config.overrides import is_override, key_of, values_of, with_length
from qnmixer.engine.config.search_path import CONF
from qnmixer.errors import ConfigError, first_line

OF_A_RUN = ("train", "plan", "doctor")
"""Commands with the full config of a run; the others read it from a run folder."""

_FOR_EVERY_OPTION = {"geometry": ["n_views"], "model": [], "optimizer": []}
"""Keys of an experiment that fit every option of a group, as a bin's width does not fit every scanner. Others: all."""


def compose(config_name: str, overrides: list[str], with_hydra: bool = False) -> DictConfig:
    """The config of a command, without running anything. `with_hydra`: with Hydra's own part."""
    if config_name in OF_A_RUN:
        overrides = fitted(config_name, with_length(overrides))
    return compose_as_given(config_name, overrides, with_hydra)


def fitted(config_name: str, overrides: list[str]) -> list[str]:
    """Add overrides that make an experiment fit the options that the command chooses.

    `experiment=demo model=tv` is TV in the setting of demo. Keys of an experiment are for the options that it chooses
    itself. Another option keeps its own values, and takes only those of `_FOR_EVERY_OPTION` from the experiment. Keys
    that the command names stay. Nothing is added twice.

    Args:
        overrides: of a command line. Other words, such as flags, stay unchanged.
    """
    words, overrides = overrides, [*filter(is_override, overrides)]
    given = values_of(overrides)
    chosen = [it for it in overrides if (CONF / key_of(it)).is_dir() and "/" not in key_of(it) and it[:1] != "~"]
    sections = [key for key in map(key_of, chosen) if key != "experiment"]
    experiment = [it for it in overrides if key_of(it).partition("/")[0] == "experiment"]
    if not sections or not experiment:
        return words
    search = [it for it in overrides if key_of(it) == "hydra.searchpath"]
    its_choices = compose_as_given(config_name, [*search, *experiment], with_hydra=True).hydra.runtime.choices
    together = compose_as_given(config_name, overrides)
    alone = compose_as_given(config_name, [*search, *(it for it in chosen if it not in experiment)])
    more = []
    for section in sections:
        if its_choices[section] == given[section]:
            continue
        own, shared = alone[section], _FOR_EVERY_OPTION.get(section, alone[section])
        for key, value in together[section].items():
            if any(f"{it}.".startswith(f"{section}.{key}.") for it in given):
                continue
            if key not in own:
                more.append(f"~{section}.{key}")
            elif key not in shared and value != own[key]:
                more.append(f"{section}.{key}={'null' if own[key] is None else own[key]}")
    return [*words, *more]


def compose_as_given(config_name: str, overrides: list[str], with_hydra: bool = False) -> DictConfig:
    """Compose as `compose` does, from exactly these overrides and no others."""
    if not CONF.is_dir():
        raise ConfigError(f"no configs at {CONF}: in a clone, `git config core.symlinks true` and check it out again")
    if nameless := next((it for it in overrides if it[:1] in ("+", "~") and not key_of(it).strip("+~")), None):
        raise ConfigError(f"{nameless} has no key: write KEY=VALUE")
    # Hydra refuses a second initialisation in one process, and a program may compose many configs.
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            return hydra.compose(config_name, overrides, return_hydra_config=with_hydra)
        except (ValueError, TypeError, AssertionError) as error:  # of Hydra: data=null, data=3, data=${oc.select:seed}
            groups = " ".join(o for o in overrides if (CONF / o.partition("=")[0]).is_dir())
            if not groups:  # a number of 5,000 digits, or ++hydra.sweeper.params.seed=1 where there are none
                raise ConfigError(f"a value cannot be read ({first_line(error)}): give a simpler one") from error
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
