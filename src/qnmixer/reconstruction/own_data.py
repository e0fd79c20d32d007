"""The slices of a LightningDataModule of the user's, to reconstruct."""

from collections.abc import Iterator
from pathlib import Path

from qnmixer.data.batch import Batch
from qnmixer.errors import ConfigError
from qnmixer.measurement.own_data import build_own_data
from qnmixer.reconstruction.checkpoints import run_of
from qnmixer.reconstruction.reconstruct_config import ReconstructConfig
from qnmixer.reconstruction.reconstructor import Reconstructor
from qnmixer.reconstruction.scan import Scan
from qnmixer.reconstruction.weights import find_checkpoint
from qnmixer.runs.records import own_modules
from qnmixer.settings.plugins import check_trusted


def scans_of_own(module: Reconstructor, config: ReconstructConfig) -> tuple[Iterator[Scan], int | None]:
    """The slices of the predict_dataloader of a run's own LightningDataModule, and their number, if it is known.

    Each has its sinogram, or one that is simulated with the views and the noise of the training.

    Raises:
        PluginError: the class is in no module that the command line trusts.
        ConfigError: the run was trained with a SliceDataModule.
        DataError: it has no predict_dataloader, or gives batches of another form.
    """
    datamodule, run = module.config.datamodule, run_of(find_checkpoint(config.run, config.checkpoint))
    check_trusted(config.run, datamodule.targets(), [*config.trust, *own_modules(run)])
    if datamodule.is_of_slices:
        raise ConfigError(f"input={config.input}: {config.run} has no LightningDataModule of its own, give a path")
    data = build_own_data(module.config, "predict")

    def scans() -> Iterator[Scan]:
        for host_batch in data.loader("predict"):
            transferred = data.transfer_batch_to_device(host_batch, module.device, 0)
            batch: Batch = data.on_after_batch_transfer(transferred, 0)
            for k, y in enumerate(module.measure(batch, "test").split(1)):
                name = Path(batch["name"][k])
                inside = Path(*(part for part in name.parts if part not in (name.anchor, "..")))
                yield Scan(
                    name=inside.as_posix(), sinogram=y, measured="sinogram" in batch,
                    offset=float(batch["hu_offset"][k]), scale=float(batch["hu_scale"][k]),
                )  # fmt: skip

    return scans(), data.count("predict")
