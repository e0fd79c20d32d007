"""The LightningModule and the LightningDataModule of a run, from its config."""

from functools import partial
from typing import Any

from qnmixer.engine.config import Config, to_plain
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.optimization.losses import build_loss
from qnmixer.engine.optimization.metrics import build_metrics
from qnmixer.engine.optimization.optimizers import build_optimizer
from qnmixer.engine.optimization.schedules import learning_rate_factor
from qnmixer.engine.reconstructor import Measurement, build_geometry, build_network, sample_measurement
from qnmixer.engine.run_module import RunModule
from qnmixer.physics import FanBeamProjector


def build_module(config: Config, projector: FanBeamProjector | None = None) -> RunModule:
    """Build the LightningModule that `module` names, with network, loss, optimizer, schedule and metrics.

    Raises PluginError for a part that does not fit.
    """
    measurement = Measurement(config, projector)
    module: RunModule = config.module.build(
        network=build_network(config, measurement.projector),
        loss=build_loss(config.loss),
        optimizer=partial(build_optimizer, config.optimizer),
        schedule=partial(learning_rate_factor, config.schedule),
        metrics=build_metrics(config.metrics, config.data.own_range),
    )
    module.attach(config, to_plain(config), measurement)
    return module


def build_data_module(config: Config, **options: Any) -> SliceDataModule:
    """Build the LightningDataModule that `datamodule` names. The loaders' workers simulate noisy sinograms.

    options: further arguments of `SliceDataModule`.
    """
    measure, geometry = sample_measurement(config), build_geometry(config)
    data: SliceDataModule = config.datamodule.build(config.data, measure=measure, geometry=geometry, **options)
    return data
