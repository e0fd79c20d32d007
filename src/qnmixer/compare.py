"""Compare all methods of a sweep on the same slices.

python -m qnmixer.train -m experiment=compare_small                      # the sweep
python -m qnmixer.compare sweep=latest                                   # its table, picture and page
python -m qnmixer.compare sweep=DIR tests=[as_trained,real] root=/path/to/ct
python -m qnmixer.compare sweep=[DIR,LONGER]                             # with methods that trained for more steps
"""

from pathlib import Path

from omegaconf import DictConfig

from qnmixer.engine import cli
from qnmixer.engine.config.commands import CompareConfig, parse_compare
from qnmixer.engine.sweeps import find_sweep
from qnmixer.errors import ConfigError
from qnmixer.files import check_no_links, check_no_nifti, check_there, check_unused, path_of


def compare(cfg: DictConfig) -> None:
    """Print the tables of a comparison and write its results into a folder."""
    config = parse_compare(cfg)
    sweeps = [find_sweep(sweep) for sweep in config.sweep]
    print(f"comparing the jobs of {', '.join(map(str, sweeps))} (loading PyTorch …)", flush=True)
    from qnmixer.engine.reports.terminal import Console
    from qnmixer.extras.comparison.compare import compare
    from qnmixer.extras.comparison.report import write_comparison

    console = Console()
    if not console.is_terminal:  # rich would wrap a log at 80 columns
        console = Console(width=120)
    output = usual_output(sweeps) if config.output is None else path_of(config.output)
    write_comparison(output, compare(config, sweeps, console), config, console)


def usual_output(sweeps: list[Path]) -> Path:
    """The default output folder. Several sweeps have one of their own, beside the comparison of the first sweep."""
    return sweeps[0] / "_".join(["comparison", *(sweep.name for sweep in sweeps[1:])])


def check(cfg: DictConfig) -> CompareConfig:
    """Parse and check the config. Raises UserError also if the sweep or the slices do not exist."""
    config = parse_compare(cfg)
    if not config.sweep:
        raise ConfigError("sweep=[] has no sweep: give its folder, sweep=DIR")
    sweeps = [find_sweep(sweep) for sweep in config.sweep]
    if config.output is None:
        check_no_links(sweeps[0])
    else:
        output = path_of(config.output)
        check_no_links(output)
        if not (output / "comparison.csv").exists():  # else it is an earlier comparison
            check_unused("output", output)
    if config.root is not None:
        check_there("root", config.root, "the folder with the slices")
        check_no_nifti("root", config.root)
    return config


def main() -> None:
    """Run the command. It is also installed as `qnmixer-compare`, so that a shell can complete its keys."""
    cli.run(compare, check, "compare")


if __name__ == "__main__":
    main()
