"""Write the weights of a run into one small file to hand on, and a model card beside it.

python -m qnmixer.export run=runs/DIR output=my.safetensors              # and my.md
python -m qnmixer.evaluate run=runs/DIR data=dicom data.root=/path/to/ct hydra.run.dir=runs/DIR/evaluation_ct

Every table of these weights in the run's folder comes onto their card, under its folder's name below it
(evaluation_ct), which whoever gets the card can read.
"""

from pathlib import Path

from omegaconf import DictConfig

from qnmixer import cli
from qnmixer.config.commands import ExportConfig, parse_export
from qnmixer.errors import ConfigError
from qnmixer.files import check_there
from qnmixer.weights import PRETRAINED, SUFFIX


def export(cfg: DictConfig) -> None:
    """Write weights and card."""
    from qnmixer.checkpoints.export import export_run

    export_run(parse_export(cfg))


def check(cfg: DictConfig) -> ExportConfig:
    """The parsed config; raises UserError also for a run that is not there, or has been exported."""
    config = parse_export(cfg)
    if config.run == PRETRAINED or Path(config.run).suffix == SUFFIX:
        raise ConfigError(f"run={config.run} holds weights alone already: give the run folder that they come from")
    check_there("run", config.run, "a run folder of qnmixer.train, or a checkpoint")
    return config


def main() -> None:
    """The command, also as `qnmixer-export`, whose keys a shell can complete."""
    cli.run(export, check, "export")


if __name__ == "__main__":
    main()
