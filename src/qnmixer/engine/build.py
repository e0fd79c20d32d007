"""LightningModule and LightningDataModule of a run, from its config."""

from typing import Any

from qnmixer.engine.config.run import Config
from qnmixer.engine.config.sections import PipelineConfig
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.data.own import OwnDataModule
from qnmixer.engine.parts import parts_of
from qnmixer.engine.reconstructor import (
    build_geometry,
    build_measurement,
    build_network,
    require_shapes,
    sample_measurement,
)
from qnmixer.engine.run_module import RunModule
from qnmixer.errors import ConfigError
from qnmixer.physics import FanBeamProjector


def build_module(config: Config, projector: FanBeamProjector | None = None) -> RunModule:
    """Build the LightningModule that `module` names, with network, loss, optimizer, schedule and metrics.

    Raises PluginError for a part that does not fit, such as a loss that fails for two images.
    """
    parts, measurement = parts_of(config), build_measurement(config, projector)
    network = build_network(config, measurement.projector)
    module: RunModule = config.module.build(network=network, **parts)
    if not module.automatic_optimization and isinstance(config.strategy, PipelineConfig):
        raise ConfigError(
            f"strategy=pipeline passes one loss back through its stages, but {type(module).__name__} optimizes by "
            "itself (automatic_optimization=False): choose strategy=single, ddp or fsdp"
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
    measure, geometry = sample_measurement(config), build_geometry(config)
    data: SliceDataModule = config.datamodule.build(config.data, measure=measure, geometry=geometry, **options)
    return data


def build_own_data(config: Config, part: str = "test") -> OwnDataModule:
    """Build the LightningDataModule that `datamodule` names, if it is no SliceDataModule. `part`: to be evaluated.

    Raises ConfigError for a pipeline, whose devices need batches of one size, and for noise of measured sinograms.
    """
    datamodule = config.datamodule
    if config.noise.load().for_measured:
        raise ConfigError(f"noise={config.noise.name} does not reach batches of {datamodule.as_typed}: add it there")
    if isinstance(config.strategy, PipelineConfig):
        raise ConfigError(f"strategy=pipeline does not take {datamodule.as_typed}: choose strategy=single, ddp or fsdp")
    data_module = datamodule.build(supplied={key: getattr(config.data, key) for key in datamodule.supplied})
    return OwnDataModule(data_module, datamodule.target, config.data, build_geometry(config), part)
