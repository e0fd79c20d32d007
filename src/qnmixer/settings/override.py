"""Overrides in a program: a config that is there already, with other values of some keys and groups."""

from collections.abc import Sequence

from omegaconf import OmegaConf

from qnmixer.settings.compose import key_of, with_one_limit
from qnmixer.settings.options import is_group
from qnmixer.settings.run import READ_AT_ONCE, Config, check_targets, checked, parse_file, values_of_choice
from qnmixer.settings.validation import plain_values


def override(config: Config, overrides: str | Sequence[str]) -> Config:
    """The config with overrides as on a command line: keys, and groups ("memory=recompute") with their options.

    A text is split at its blanks; give a list if a value has some. A group that is chosen has the values of its option
    only: those that an experiment gave to it are gone. Raises ConfigError.
    """
    words = with_one_limit(overrides.split() if isinstance(overrides, str) else [*overrides])
    if config.data.seed == config.seed:  # as conf/data has it
        words = [word.replace("seed=", "data.seed=", 1) for word in words if key_of(word) == "seed"] + words
    values, groups = OmegaConf.create(config.plain()), [*filter(is_group, map(key_of, words))]
    for word in sorted(words, key=lambda word: key_of(word) not in groups):
        key, _, value = word.partition("=")
        if key in groups:
            values[key] = values_of_choice(key, value)
        else:
            values.merge_with_dotlist([word])
    for group in groups:
        values[group] = plain_values(values[group])
    plain = OmegaConf.to_container(values)  # text with ${…} stays text
    assert isinstance(plain, dict)
    config = parse_file({str(key): value for key, value in plain.items()})
    check_targets(config)
    # Not the loss of a checkpoint, say, whose code nobody has trusted.
    touched = {"model", "noise", *(key_of(word).partition(".")[0] for word in words)}
    return checked(config, *touched.intersection(READ_AT_ONCE))
