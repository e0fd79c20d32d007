from ..wandb_server import wandb_server

__all__ = ["wandb_server"]
