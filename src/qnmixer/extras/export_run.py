"""Export the weights of a run as one file with its model card."""

from pathlib import Path

from qnmixer.engine.checkpoints import encode, find_checkpoint, load_run
from qnmixer.engine.config.commands import ExportConfig
from qnmixer.engine.reports.terminal import Console
from qnmixer.errors import CheckpointError, ConfigError
from qnmixer.extras.model_card import hub_card, model_card
from qnmixer.files import atomic_file, path_of, write_text
from qnmixer.weights import HUB, HUB_FILE, push


def export_run(config: ExportConfig) -> None:
    """Run `qnmixer.export`: write weights of a run with a model card, into files, to a hub, or both.

    These are the best weights, or those of a given checkpoint. Raises CheckpointError for a run without weights,
    ConfigError if the output or its card exists, or if the hub does not take them.
    """
    path = find_checkpoint(Path(config.run))
    if path.parent.name != "checkpoints":
        raise CheckpointError(f"{path} lies in no run folder, and the model card needs one: give runs/DIR")
    module = load_run(path, trust=config.trust)  # build the network, as the receiver of the file will
    trained, state = module.config, module.state_dict()
    if not trained.model.has_weights:
        raise CheckpointError(f"{path} is of model={trained.model.name}, which has no weights: give another run")
    content, lines = encode(trained, state), []
    sources = "" if config.sources is None else path_of(config.sources).read_text(encoding="utf-8").strip()
    if config.output is not None:
        output = path_of(config.output)
        card = output.with_suffix(".md")
        if taken := next((it for it in (output, card) if it.exists()), None):
            raise ConfigError(f"{taken} exists already and is not overwritten: remove it, or give another output=")
        text = model_card(module, path, output, len(content), sources)
        with atomic_file(output) as stream:
            stream.write(content)
        write_text(card, text)
        lines += [f"weights: {output}", f"card: {card}"]
    if config.push is not None:
        text = model_card(module, path, Path(HUB_FILE), len(content), sources, HUB + config.push)
        push(config.push, content, hub_card(text))
        lines += [f"sent to {HUB}{config.push}. A new repository is private: its settings make it public."]
    lines += ["Weights and card have the run's settings: read the card before you share them."]
    Console().print(*lines, sep="\n", soft_wrap=True, highlight=False)
