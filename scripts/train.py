"""Trains a model over private and partly malicious workers, and writes metrics, curves and checkpoints.

The same command again resumes a run that was stopped, and shows the result of one that is finished.

Examples:
  python scripts/train.py --flagfile=configs/quickstart.cfg
  python scripts/train.py --flagfile=configs/mnist_byzldp.cfg --seed=3
  python scripts/train.py --dataset=synthetic --num_workers=10 --num_byzantine=2 --attack=sign_flip
"""

from cafcor_jax import cli, config, experiment, progress


def main(cfg: config.Config) -> None:
    experiment.cache_compilations(cfg)
    experiment.run(cfg, progress=progress.automatic())


if __name__ == "__main__":
    cli.run(main, doc=__doc__)
