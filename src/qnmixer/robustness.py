"""Measure how far a trained network can be trusted: other doses and noise, another scan, a scan that is a little off.

python -m qnmixer.robustness run=pretrained data=phantoms                  # on drawn slices
python -m qnmixer.robustness run=runs/DIR data=dicom data.root=/path/to/ct # on slices it never saw
"""

from functools import partial

import qnmixer.needs_train  # noqa: F401

from omegaconf import DictConfig

from qnmixer.commands import command
from qnmixer.errors import say, visible
from qnmixer.evaluation.evaluate_config import check_slices
from qnmixer.installed import extras
from qnmixer.reconstruction.weights import check_weights
from qnmixer.runs.run import into_new_folder, new_folder

with extras():
    from qnmixer_studies.robustness.robustness_config import RobustnessConfig


def robustness(config: RobustnessConfig) -> None:
    """Print one table over all conditions, and write table and plot into a folder."""
    say(visible(f"measuring {config.run} under other conditions (loading PyTorch …)"))
    from qnmixer_studies.robustness.table import measure_robustness

    with new_folder() as (folder, overrides):
        measure_robustness(config, folder, overrides)


def check(cfg: DictConfig) -> RobustnessConfig:
    """Parse and check the config. Raises UserError also if the run or the slices do not exist."""
    config = RobustnessConfig.parse(cfg)
    check_weights("run", config.run)
    check_slices(config.data)
    return config


def main() -> None:
    """Run the command. It is also installed as `qnmixer-robustness`, so that a shell can complete its keys."""
    command.run(robustness, check, RobustnessConfig, complete=partial(into_new_folder, "robustness"))


if __name__ == "__main__":
    main()
