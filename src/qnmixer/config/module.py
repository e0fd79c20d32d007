"""Schemas of `module` and `datamodule`: the LightningModule and the LightningDataModule of a run."""

from dataclasses import dataclass
from typing import ClassVar

from qnmixer.config.target import Target, schema


@schema()
@dataclass(kw_only=True)
class ModuleConfig(Target):
    """A `qnmixer.run_module.RunModule`, built with `(network, loss, optimizer, schedule, metrics, **arguments)`."""

    group: ClassVar[str] = "module"


@schema()
@dataclass(kw_only=True)
class DataModuleConfig(Target):
    """A `qnmixer.data.datamodule.SliceDataModule`, built with the section `data` and `(**arguments)`."""

    group: ClassVar[str] = "datamodule"


OURS = {
    "module": {"_target_": "qnmixer.module.ReconstructionModule"},
    "datamodule": {"_target_": "qnmixer.data.datamodule.SliceDataModule"},
}
"""Those of a file without these sections, such as a weights file."""
