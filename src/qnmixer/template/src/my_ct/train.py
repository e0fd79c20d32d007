"""Train: python -m my_ct.train [KEY=VALUE …]. It finds conf/, and its experiment is mine unless another is given.

python -m my_ct.train trainer.max_steps=2000 optimizer.lr=1e-3
python -m my_ct.train strategy=ddp trainer.devices=2
python -m my_ct.train -m loss=mine,edges          # both, one after the other
python -m my_ct.train resume=latest
"""

from pathlib import Path

from qnmixer.train import main

CONF = Path(__file__).parents[2] / "conf"

if __name__ == "__main__":
    main(CONF, experiment="mine")
