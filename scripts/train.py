"""Trains a model over private and partly malicious workers, and writes metrics, curves and checkpoints.

The same command again resumes a run that was stopped, and shows the result of one that is finished.

On many devices, --mesh_workers and --mesh_parameters say how many; on many hosts the same command is started
once for every process, with --coordinator, --num_processes and its own --process_id.

Examples:
  python scripts/train.py --flagfile=configs/quickstart.cfg
  python scripts/train.py --flagfile=configs/mnist_byzldp.cfg --seed=3
  python scripts/train.py --dataset=synthetic --num_workers=10 --num_byzantine=2 --attack=sign_flip
"""

from absl import flags

from cafcor_jax import cli, config, experiment, hosts, progress
from cafcor_jax.errors import UserError

COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "host:port at which process 0 of several listens. Empty: one process."
)
NUM_PROCESSES = flags.DEFINE_integer("num_processes", 1, "Processes that compute the run together.")
PROCESS_ID = flags.DEFINE_integer("process_id", 0, "Which of them this one is, from 0; process 0 writes.")


def main(cfg: config.Config) -> None:
    if COORDINATOR.value:
        hosts.join(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value)
    elif NUM_PROCESSES.value != 1 or PROCESS_ID.value != 0:
        raise UserError(
            f"num_processes={NUM_PROCESSES.value} and process_id={PROCESS_ID.value} have no meaning without "
            "coordinator: give it as host:port, or leave them out."
        )
    experiment.cache_compilations(cfg)
    experiment.run(cfg, progress=progress.automatic() if hosts.leads() else progress.Silent())


if __name__ == "__main__":
    cli.run(main, doc=__doc__)
