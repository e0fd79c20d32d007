"""Where a comparison comes from, and where it goes."""

from pathlib import Path

from qnmixer.files import digest, path_of
from qnmixer.reconstruction.weights import find_checkpoint, located
from qnmixer.runs.sweeps import find_sweep
from qnmixer.settings.data import DataConfig
from qnmixer.settings.parts import NoiseConfig
from qnmixer_studies.comparison.compare_config import CompareConfig


def sources_of(config: CompareConfig) -> tuple[list[Path], list[Path]]:
    """The folders of the sweeps, and the folders or files of the runs. Raises UserError for one that is none."""
    names = ["latest"] if config.sweep is None and not config.runs else config.sweep or []
    for run in config.runs:
        find_checkpoint(run, config.checkpoint)
    return [find_sweep(name) for name in names], [located(run).absolute() for run in config.runs]


def output_of(config: CompareConfig, sweeps: list[Path], runs: list[Path]) -> Path:
    """The output folder, by default in that of the first sweep. Its name tells other sources, slices and noise."""
    words = ["comparison", *(sweep.name for sweep in sweeps[1:])]
    if runs:
        words.append(f"{len(runs)}_runs_{digest(sorted(map(str, runs)), 6)}")
    words += [section.name for section in (config.data, config.noise) if isinstance(section, DataConfig | NoiseConfig)]
    folder = sweeps[0] if sweeps else Path("comparisons")
    return folder / "_".join(words) if config.output is None else path_of(config.output)
