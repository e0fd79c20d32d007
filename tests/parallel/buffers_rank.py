"""One rank of `test_buffers`: train a network with buffers by several strategies, and save its buffers."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from torch import Tensor

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.memory.modes import apply_memory_mode
from qnmixer.module.build import build_module
from qnmixer.runs.processes.process import rank
from qnmixer.settings.run import Config, parse
from qnmixer.training.steps import build_trainer

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.buffers import Everything


def buffers_after_training(config: Config, folder: Path) -> dict[str, Tensor]:
    """The buffers of this rank. Rank 0 writes `last.ckpt` into the folder."""
    L.seed_everything(1, verbose=False)
    module = build_module(config)
    module.network = Everything(module.projector, config.model.T)
    apply_memory_mode(module.network, config.memory)
    trainer = build_trainer(config, folder, [], [])
    trainer.fit(module, datamodule=SliceDataModule(config.data), weights_only=True)
    trainer.save_checkpoint(folder / "last.ckpt")
    saved = module.network.state_dict()
    return {name: saved[name].clone() for name, _ in module.network.named_buffers() if name in saved}


def main(job: Path) -> None:
    for name, config in json.loads(job.read_text()).items():
        (folder := job.with_name(name)).mkdir(exist_ok=True)
        torch.save(buffers_after_training(parse(config), folder), folder / f"rank_{rank()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
