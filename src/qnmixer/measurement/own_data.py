"""Build a LightningDataModule of the user's for a run. Training needs no DICOM, and so imports none here."""

from qnmixer.data.own_datamodule import OwnDataModule
from qnmixer.errors import ConfigError
from qnmixer.measurement.build import build_geometry
from qnmixer.settings.run import Config
from qnmixer.settings.strategies import strategies_with


def build_own_data(config: Config, part: str = "test") -> OwnDataModule:
    """Build the LightningDataModule that `datamodule` names, if it is no SliceDataModule. `part`: to be evaluated.

    Raises ConfigError for a pipeline, whose devices need batches of one size, and for noise of measured sinograms.
    """
    datamodule = config.datamodule
    if config.noise.load().for_measured:
        raise ConfigError(f"noise={config.noise.name} does not reach batches of {datamodule.as_typed}: add it there")
    if not (strategy := config.strategy).takes_own_data:
        others = strategies_with("takes_own_data")
        raise ConfigError(f"strategy={strategy.name} does not take {datamodule.as_typed}: choose strategy={others}")
    data_module = datamodule.build(supplied={key: getattr(config.data, key) for key in datamodule.supplied})
    return OwnDataModule(data_module, datamodule.target, config.data, build_geometry(config), part)
