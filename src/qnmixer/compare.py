"""Compare all methods of a sweep, or any runs, on the same slices.

python -m qnmixer.train -m experiment=demo model=qn_mixer_small,learn,tv   # the sweep; all methods: make compare
python -m qnmixer.compare sweep=latest                                 # its table, picture and page
python -m qnmixer.compare sweep=DIR data=dicom data.root=/path/to/ct   # on other slices, as evaluate takes them
python -m qnmixer.compare sweep=[DIR,LONGER]                           # with methods that trained for more steps
python -m qnmixer.compare runs=[runs/A,runs/B,pretrained]              # any runs, also beside those of a sweep
"""

import qnmixer.needs_train  # noqa: F401

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from qnmixer.commands import command
from qnmixer.errors import ConfigError, say, visible
from qnmixer.evaluation.evaluate_config import check_slices
from qnmixer.files import check_no_links, check_unused
from qnmixer.installed import extras

with extras():
    from qnmixer_studies.comparison.compare_config import CompareConfig
    from qnmixer_studies.comparison.places import output_of, sources_of


def compare(config: CompareConfig) -> None:
    """Print the tables of a comparison and write its results into a folder."""
    overrides = list(HydraConfig.get().overrides.task)
    sweeps, runs = sources_of(config)
    sources = [*(f"the jobs of {sweep}" for sweep in sweeps), *map(str, runs)]
    say(visible(f"comparing {', '.join(sources)} (loading PyTorch …)"))
    from qnmixer.runs.terminal import Console
    from qnmixer_studies.comparison.compare import compare
    from qnmixer_studies.comparison.report import write_comparison

    console = Console() if Console().is_terminal else Console(width=120)  # rich would wrap a log at 80 columns
    comparison = compare(config, sweeps, overrides, runs)
    write_comparison(output_of(config, sweeps, runs), comparison, console)


def check(cfg: DictConfig) -> CompareConfig:
    """Parse and check the config. Raises UserError also if a sweep, a run or the slices do not exist."""
    config = CompareConfig.parse(cfg)
    sweeps, runs = sources_of(config)
    if not sweeps and not runs:
        raise ConfigError("there is nothing to compare: give the folder of a sweep, sweep=DIR, or runs=[RUN,RUN]")
    output = output_of(config, sweeps, runs)
    check_no_links(sweeps[0] if sweeps and config.output is None else output)
    if not (output / "comparison.csv").exists():  # else it is an earlier comparison
        check_unused("output", output)
    check_slices(config.data)
    return config


def main() -> None:
    """Run the command. It is also installed as `qnmixer-compare`, so that a shell can complete its keys."""
    command.run(compare, check, CompareConfig)


if __name__ == "__main__":
    main()
