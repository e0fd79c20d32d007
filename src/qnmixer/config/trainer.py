"""What `trainer` may say: what goes to Lightning's Trainer."""

from dataclasses import dataclass

from qnmixer.config.option import number, one_of


@dataclass(kw_only=True)
class TrainerConfig:
    """What goes to Lightning's Trainer."""

    accelerator: str = one_of("auto", "cpu", "gpu", "cuda")
    devices: int | None = number(at_least=1)  # of a node; None: all GPUs, or one where the strategy is single
    num_nodes: int = number(at_least=1)
    precision: str = one_of("32", "16-mixed", "bf16-mixed")
    max_steps: int = number(at_least=-1)
    max_epochs: int | None = number(at_least=1)
    accumulate_grad_batches: int = number(at_least=1)
    gradient_clip_val: float | None = number(above=0)
    val_every_n_steps: int | None = number(at_least=1)
    save_every_n_steps: int | None = number(at_least=1)
    limit_val_batches: int | None = number(at_least=1)
    log_every_n_steps: int = number(at_least=1)
    deterministic: bool
