"""Write the weights of a run into one small file for other people, with a model card beside it.

python -m qnmixer.export run=runs/DIR output=my.safetensors              # and my.md
python -m qnmixer.evaluate run=runs/DIR data=dicom data.root=/path/to/ct hydra.run.dir=runs/DIR/evaluation_ct

The card shows every evaluation table of these weights that lies in the run folder. The heading of a table is the name
of its folder (here evaluation_ct). Everyone who gets the card can read that name.
"""

from pathlib import Path

import qnmixer.needs_train  # noqa: F401

from omegaconf import DictConfig

from qnmixer.commands import command
from qnmixer.errors import ConfigError
from qnmixer.files import check_there
from qnmixer.installed import extras
from qnmixer.reconstruction.weights import PRETRAINED, SUFFIX

with extras():
    from qnmixer.extras.export.export_config import ExportConfig


def export(config: ExportConfig) -> None:
    """Write the weights and the card."""
    from qnmixer.extras.export.export import export_run

    export_run(config)


def check(cfg: DictConfig) -> ExportConfig:
    """Parse and check the config. Raises UserError also if the run does not exist or is an exported file."""
    config = ExportConfig.parse(cfg)
    if config.run == PRETRAINED or Path(config.run).suffix == SUFFIX:
        raise ConfigError(f"run={config.run} is a weights file already: give the run folder that it was exported from")
    check_there("run", config.run, "a run folder of qnmixer.train, or a checkpoint")
    return config


def main() -> None:
    """Run the command. It is also installed as `qnmixer-export`, so that a shell can complete its keys."""
    command.run(export, check, ExportConfig)


if __name__ == "__main__":
    main()
