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
from qnmixer.module import AllIterates, Passes, ReconstructionModule
from qnmixer.module.base import RunModule
from qnmixer.module.parts import parts_of
from qnmixer.parallel.torch_private import no_dispatch
from qnmixer.physics import FanBeamProjector
from qnmixer.settings.logged_names import RESIDUAL
from qnmixer.settings.run import Config
from qnmixer.settings.strategies import strategies_with

_STEPS_WITH_TRUTH = [kind.training_step for kind in (ReconstructionModule, AllIterates, Passes)]


def build_module(config: Config, projector: FanBeamProjector | None = None) -> RunModule:
    """Build the LightningModule that `module` names, with network, loss, optimizer, schedule and metrics.

    Raises PluginError for a part that does not fit, such as a loss that fails for two images.
    """
    parts, measurement = parts_of(config), build_measurement(config, projector)
    network = build_network(config, measurement.projector)
    add_training_scans(measurement, config)
    module: RunModule = config.module.build(network=network, **parts)
    require_shapes(module, config.module.as_typed)
    check_module(module, config)
    if config.monitor == f"val/{RESIDUAL}":
        with no_dispatch():  # as for the parts of `Split`; here, so that the plan counts its matrices
            measurement.half_scan()
    module.attach(config, config.plain(), measurement)
    return module


def check_module(module: RunModule, config: Config) -> None:
    """Raise ConfigError for a strategy, scans or slices with which a module cannot be trained."""
    strategy, data, name = config.strategy, config.data, type(module).__name__
    if not module.automatic_optimization and not strategy.takes_manual_optimization:
        raise ConfigError(
            f"strategy={strategy.name} runs the backward pass itself, but {name} optimizes by itself "
            f"(automatic_optimization=False): choose strategy={strategies_with('takes_manual_optimization')}"
        )
    if not module.takes_stages and not strategy.takes_all_modules:
        raise ConfigError(
            f"strategy={strategy.name} has the iterations on several devices, but {name} needs more of the network "
            f"than x_T from y: choose strategy={strategies_with('takes_all_modules')}"
        )
    if data.n_scans and not module.takes_scans:
        raise ConfigError(f"data.views, data.arcs: {name} trains with the views of one scan: leave them out")
    if not config.datamodule.is_of_slices or data.has_truth:
        return
    require_residual(config)
    if type(module).training_step in _STEPS_WITH_TRUTH:
        raise needs_truth(config)


def require_residual(config: Config) -> None:
    """Raise ConfigError for data without truth, if a metric that needs one chooses the best checkpoint."""
    if config.monitor != f"val/{RESIDUAL}" and config.trainer.validates:
        raise ConfigError(
            f"{config.source_as_typed} has no truth, which monitor={config.monitor} needs: give monitor=val/{RESIDUAL}"
            ", and a module that trains without truth, as module=split"
        )


def needs_truth(config: Config) -> ConfigError:
    """The error of a module that looks for the truth, where there is none."""
    return ConfigError(
        f"module={config.module.name} needs the truth, which {config.source_as_typed} does not have: choose one that "
        "trains without truth, as module=split"
    )


def build_data_module(config: Config, **options: Any) -> SliceDataModule | OwnDataModule:
    """Build the LightningDataModule that `datamodule` names. The loaders' workers simulate noisy sinograms.

    A LightningDataModule of another kind is wrapped.

    options: further arguments of `SliceDataModule`.
    """
    if not config.datamodule.is_of_slices:
        return build_own_data(config)
    return config.datamodule.build(config.data, measure=measure_of(config), geometry=build_geometry(config), **options)
