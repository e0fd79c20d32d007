"""Export the weights of a run as one file with its model card."""

from pathlib import Path

from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.extras.export.card import model_card
from qnmixer.extras.export.export_config import ExportConfig
from qnmixer.files import atomic_file, path_of, write_text
from qnmixer.reconstruction.checkpoints import Checkpoint, encode, network_of
from qnmixer.reconstruction.weights import find_checkpoint
from qnmixer.runs.terminal import Console


def export_run(config: ExportConfig) -> None:
    """Run `qnmixer.export`: write the best weights of a run, or those of a given checkpoint, with a model card.

    Raises CheckpointError for a run without weights, ConfigError if the output or its card exists.
    """
    path = find_checkpoint(Path(config.run))
    if path.parent.name != "checkpoints":
        raise CheckpointError(f"{path} lies in no run folder, and the model card needs one: give runs/DIR")
    module = network_of(checkpoint := Checkpoint(path), config.trust)  # build it, as the receiver of the file will
    if not module.config.model.has_weights:
        raise CheckpointError(f"{path} is of model={module.config.model.name}, which has no weights: give another run")
    output = path_of(config.output)
    card = output.with_suffix(".md")
    if existing_file := next((file for file in (output, card) if file.exists()), None):
        raise ConfigError(f"{existing_file} exists already and is not overwritten: give another output=")
    content = encode(module.config, module.state_dict())
    text = model_card(module, checkpoint, output)
    with atomic_file(output) as stream:
        stream.write(content)
    write_text(card, text)
    advice = "Both have the run's settings: read the card before you share them."
    Console().lines(f"weights: {output}", f"card: {card}", advice)
