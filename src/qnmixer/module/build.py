"""LightningModule and LightningDataModule of a run, from its config."""

from typing import Any

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.data.own_datamodule import OwnDataModule
from qnmixer.errors import ConfigError
from qnmixer.measurement.build import (
    add_training_scans,
    build_geometry,
    build_measurement,
    build_network,
    measure_of,
    require_shapes,
)
from qnmixer.measurement.own_data import build_own_data
from qnmixer.module.base import RunModule
from qnmixer.module.parts import parts_of
from qnmixer.physics import FanBeamProjector
from qnmixer.settings.run import Config
from qnmixer.settings.strategies import strategies_with


def build_module(config: Config, projector: FanBeamProjector | None = None) -> RunModule:
    """Build the LightningModule that `module` names, with network, loss, optimizer, schedule and metrics.

    Raises PluginError for a part that does not fit, such as a loss that fails for two images.
    """
    parts, measurement = parts_of(config), build_measurement(config, projector)
    network = build_network(config, measurement.projector)
    add_training_scans(measurement, config)
    module: RunModule = config.module.build(network=network, **parts)
    if not module.automatic_optimization and not config.strategy.takes_manual_optimization:
        raise ConfigError(
            f"strategy={config.strategy.name} runs the backward pass itself, but {type(module).__name__} optimizes by "
            f"itself (automatic_optimization=False): choose strategy={strategies_with('takes_manual_optimization')}"
        )
    require_shapes(module, config.module.as_typed)
    module.attach(config, config.plain(), measurement)
    return module


def build_data_module(config: Config, **options: Any) -> SliceDataModule | OwnDataModule:
    """Build the LightningDataModule that `datamodule` names. The loaders' workers simulate noisy sinograms.

    A LightningDataModule of another kind is wrapped.

    options: further arguments of `SliceDataModule`.
    """
    if not config.datamodule.is_of_slices:
        return build_own_data(config)
    return config.datamodule.build(config.data, measure=measure_of(config), geometry=build_geometry(config), **options)
