"""One worker of a federation over a network, beside its SuperNode.

It answers at --socket until it is stopped; the SuperNode's --node-config names that socket. Its settings must
be those of the server, from a flagfile of its own. docs/federation.md goes through all of it.

Examples:
  python scripts/worker.py --flagfile=configs/federation.cfg --worker=0 --state_dir=w0 --socket=w0/socket
  python scripts/worker.py --flagfile=FILE --worker=9 --malicious --state_dir=w9 --socket=w9/socket
  python scripts/worker.py --new_identity=identity.key
"""

import signal
import sys
from pathlib import Path

from absl import flags

from cafcor_jax import cli, config, experiment
from cafcor_jax.errors import UserError
from cafcor_jax.flower import identity, sockets
from cafcor_jax.flower.worker import Worker
from cafcor_jax.workdir import writing

_WORKER = flags.DEFINE_integer("worker", 0, "Its place among the workers, from 0.")
_SOCKET = flags.DEFINE_string("socket", "", "Where it answers: a path of at most about 100 characters.")
_STATE_DIR = flags.DEFINE_string("state_dir", "", "Folder for its keys and momentum; it belongs to one run.")
_EXAMPLES = flags.DEFINE_string(
    "examples",
    "",
    "A .npz file with its own images and labels. Empty: its part of --dataset.",
)
_MALICIOUS = flags.DEFINE_boolean("malicious", False, "Play --attack instead of keeping to the protocol.")
_IDENTITY = flags.DEFINE_string("identity", "", "File with its private identity. Empty: it signs nothing.")
_IDENTITIES = flags.DEFINE_string(
    "identities",
    "",
    "File with the public identities of all workers, one a line. Empty: signatures are not checked.",
)
_NEW_IDENTITY = flags.DEFINE_string(
    "new_identity", "", "Make a private identity, write it to this file, print the public one, and end."
)


def main(cfg: config.Config) -> None:
    if _NEW_IDENTITY.value:
        _make_identity(Path(_NEW_IDENTITY.value))
        return
    for flag in (_SOCKET, _STATE_DIR):
        if not flag.value:
            raise UserError(f"--{flag.name} is empty: a worker needs one.")
    experiment.cache_compilations(cfg)
    # Stopped by its operator is not an error.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    worker = Worker(
        cfg,
        _WORKER.value,
        _STATE_DIR.value,
        malicious=_MALICIOUS.value,
        examples=_EXAMPLES.value,
        private_identity=identity.read_private(_IDENTITY.value) if _IDENTITY.value else None,
        identities=identity.read_public(_IDENTITIES.value, cfg.num_workers) if _IDENTITIES.value else None,
        log=lambda text: print(text, flush=True),
    )
    with worker:
        print(f"worker {worker.index} is ready at {_SOCKET.value}", flush=True)
        sockets.serve(worker.handle, _SOCKET.value)


def _make_identity(path: Path) -> None:
    if path.exists():
        raise UserError(f"--new_identity={path} exists: an identity is not written over.")
    private = identity.generate()
    with writing(path):
        path.touch(mode=0o600)
        path.write_text(private.hex() + "\n")
    print(identity.public_identity(private).hex())


if __name__ == "__main__":
    cli.run(main, doc=__doc__)
