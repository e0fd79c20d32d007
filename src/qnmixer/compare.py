"""Compare all methods of a sweep on the same slices.

python -m qnmixer.train -m experiment=demo model=qn_mixer_small,learn,tv   # the sweep; all methods: make compare
python -m qnmixer.compare sweep=latest                                 # its table, picture and page
python -m qnmixer.compare sweep=DIR data=dicom data.root=/path/to/ct   # on other slices, as evaluate takes them
python -m qnmixer.compare sweep=[DIR,LONGER]                           # with methods that trained for more steps
"""

from pathlib import Path

import qnmixer.needs_train  # noqa: F401

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from qnmixer.commands import command
from qnmixer.errors import ConfigError, say, visible
from qnmixer.evaluation.evaluate_config import check_slices
from qnmixer.files import check_no_links, check_unused, path_of
from qnmixer.installed import extras
from qnmixer.runs.sweeps import find_sweep
from qnmixer.settings.data import DataConfig
from qnmixer.settings.parts import NoiseConfig

with extras():
    from qnmixer.extras.comparison.compare_config import CompareConfig


def compare(config: CompareConfig) -> None:
    """Print the tables of a comparison and write its results into a folder."""
    overrides = list(HydraConfig.get().overrides.task)
    sweeps = [find_sweep(sweep) for sweep in config.sweep]
    say(visible(f"comparing the jobs of {', '.join(map(str, sweeps))} (loading PyTorch …)"))
    from qnmixer.extras.comparison.compare import compare
    from qnmixer.extras.comparison.report import write_comparison
    from qnmixer.runs.terminal import Console

    console = Console() if Console().is_terminal else Console(width=120)  # rich would wrap a log at 80 columns
    write_comparison(output_of(config, sweeps), compare(config, sweeps, overrides), console)


def output_of(config: CompareConfig, sweeps: list[Path]) -> Path:
    """The output folder. By default it is in that of the first sweep. Its name tells other sweeps, slices and noise."""
    words = ["comparison", *(sweep.name for sweep in sweeps[1:])]
    words += [section.name for section in (config.data, config.noise) if isinstance(section, DataConfig | NoiseConfig)]
    return sweeps[0] / "_".join(words) if config.output is None else path_of(config.output)


def check(cfg: DictConfig) -> CompareConfig:
    """Parse and check the config. Raises UserError also if the sweep or the slices do not exist."""
    config = CompareConfig.parse(cfg)
    if not config.sweep:
        raise ConfigError("sweep=[] has no sweep: give its folder, sweep=DIR")
    sweeps = [find_sweep(sweep) for sweep in config.sweep]
    output = output_of(config, sweeps)
    check_no_links(sweeps[0] if config.output is None else output)
    if not (output / "comparison.csv").exists():  # else it is an earlier comparison
        check_unused("output", output)
    check_slices(config.data)
    return config


def main() -> None:
    """Run the command. It is also installed as `qnmixer-compare`, so that a shell can complete its keys."""
    command.run(compare, check, CompareConfig)


if __name__ == "__main__":
    main()
