"""The LightningModule and the LightningDataModule of a run, from its config."""

from functools import partial
from typing import Any

from qnmixer.config import Config, to_plain
from qnmixer.data.datamodule import SliceDataModule
from qnmixer.optimization.losses import build_loss
from qnmixer.optimization.metrics import build_metrics
from qnmixer.optimization.optimizers import build_optimizer
from qnmixer.optimization.schedules import learning_rate_factor
from qnmixer.physics import FanBeamProjector
from qnmixer.reconstructor import Measurement, build_geometry, build_network, sample_measurement
from qnmixer.run_module import RunModule


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
