"""From a config to a trained network: the LightningModule, losses, metrics, evaluation."""
