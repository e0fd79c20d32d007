"""Parts for Lightning: what a project's own LightningModule and its run are made of."""

from qnmixer.engine.batch import Batch
from qnmixer.engine.data.datamodule import SliceDataModule
from qnmixer.engine.run_module import RunModule
from qnmixer.module import ReconstructionModule

__all__ = ["Batch", "ReconstructionModule", "RunModule", "SliceDataModule"]
