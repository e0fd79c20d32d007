"""Train: python -m my_ct.train [KEY=VALUE …]. It trains the experiment that pyproject.toml names.

python -m my_ct.train trainer.max_steps=2000 optimizer.lr=1e-3
python -m my_ct.train strategy=ddp trainer.devices=2
python -m my_ct.train -m loss=mine,edges          # both, one after the other
python -m my_ct.train resume=latest
"""

from pathlib import Path

from qnmixer.train import main

if __name__ == "__main__":
    main(Path(__file__).parent / "conf")
