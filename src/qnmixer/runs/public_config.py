"""What a config shares with others: in weights files, in model cards, and in Weights & Biases. No torch import."""

from collections.abc import Mapping
from typing import Any

from qnmixer.settings.data import DataConfig
from qnmixer.settings.options import TARGET, option_of
from qnmixer.settings.plugins import is_trusted
from qnmixer.settings.run import FIT, Config

_PRIVATE: dict[str, Any] = {
    "root": None, "include": "*", "cache_dir": None,
    "train_patients": [], "val_patients": [], "test_patients": [],
}  # fmt: skip
"""Keys that name folders or patients, and what is shared instead."""


def without_places(config: Config) -> Config:
    """The config for sharing: the same network, scan and training, without private values.

    Folders, names of patients, earlier runs and the logger's account are left out. Arguments of the user's own classes
    stay, because a network may need them. Arguments of the user's own slices, and the user's own metrics, are left out.
    """
    metrics = {name: metric for name, metric in config.metrics.items() if is_trusted(metric.target, ())}
    groups: dict[str, Any] = {"metrics": metrics, "logger": {}, "callbacks": {}, "tags": []}
    data = config.data.with_each_source(_data_without_places)
    return config.changed(**groups, data=data, finetune=None, resume=None, fit=FIT)


def _data_without_places(source: DataConfig) -> DataConfig:
    values = {key: _PRIVATE.get(key, value) for key, value in source.plain().items()}
    if not is_trusted(source.target, ()):
        values = {key: value for key, value in values.items() if key not in source.arguments}
    return type(source).model_validate(values).at(source.section)


def with_names(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The result of `plain` for readers: each section with a target also has the name of its option."""
    return {
        key: {"name": option_of(key, value[TARGET]), **value} if isinstance(value, dict) and TARGET in value else value
        for key, value in plain.items()
    }
