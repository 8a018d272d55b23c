"""One of the processes of a run that `test_sharding.py` starts: a small model on a mesh of all their devices.

Arguments: process id, processes, port of the coordinator, devices of each, workdir.
"""

import sys

from cafcor_jax import experiment, hosts
from cafcor_jax.config import Config
from cafcor_jax.progress import Silent
from tests import tiny


def main(process_id, num_processes, port, devices, workdir):
    if num_processes > 1:
        hosts.join(f"localhost:{port}", num_processes, process_id)
    experiment.models.cnn = tiny.model
    experiment.data.load = lambda *args, **kwargs: tiny.DATASET
    config = Config(
        dataset="synthetic",
        num_workers=6,
        num_byzantine=1,
        epsilon=500.0,
        rounds=3,
        batch_size=8,
        learning_rate=0.5,
        checkpoint_every=2,
        aggregator="multi_krum",
        workdir=workdir,
        mesh_workers=num_processes,
        mesh_parameters=devices,
    )
    print(experiment.run(config, progress=Silent()).final_loss)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), sys.argv[5])
