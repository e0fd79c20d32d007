"""Export the weights of a run as one file with its model card."""

from pathlib import Path

from rich.console import Console

from qnmixer.engine.checkpoints.reading import find_checkpoint, load_run
from qnmixer.engine.checkpoints.weights_file import encode
from qnmixer.engine.config.commands import ExportConfig
from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.extras.model_card import model_card
from qnmixer.files import atomic_file, write_text


def export_run(config: ExportConfig) -> None:
    """Run `qnmixer.export`: write weights of a run with a model card.

    These are the best weights, or those of a given checkpoint. Raises CheckpointError for a run without weights,
    ConfigError if the output exists with other content.
    """
    path, output = find_checkpoint(Path(config.run)), Path(config.output).expanduser()
    if path.parent.name != "checkpoints":
        raise CheckpointError(f"{path} lies in no run folder, and the model card needs one: give runs/DIR")
    module = load_run(path, trust=config.trust)  # build the network, as the receiver of the file will
    trained, state = module.config, module.state_dict()
    if not trained.model.has_weights:
        raise CheckpointError(f"{path} is of model={trained.model.name}, which has no weights: give another run")
    content, card = encode(trained, state), output.with_suffix(".md")
    _check_free(output, card, content)
    sources = "" if config.sources is None else Path(config.sources).expanduser().read_text(encoding="utf-8").strip()
    text = model_card(module, path, output, len(content), sources)
    with atomic_file(output) as stream:
        stream.write(content)
    write_text(card, text)
    lines = f"weights: {output}", f"card: {card}", "Both have the run's settings: read the card before you share them."
    Console(markup=False).print(*lines, sep="\n", soft_wrap=True, highlight=False)


def _check_free(output: Path, card: Path, content: bytes) -> None:
    """Raise ConfigError if this would overwrite other weights or texts. A card of the same weights is overwritten."""
    if output.exists():
        if not output.is_file() or output.read_bytes() != content:
            raise ConfigError(f"output={output} exists with other content: remove it, or give another name")
    elif card.exists():
        raise ConfigError(f"{card}, the place of the model card, exists already: remove it, or give another output=")
