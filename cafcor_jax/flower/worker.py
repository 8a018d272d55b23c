"""One worker of a federation over a network: its data, its secrets, its momentum, and what it answers.

It runs in a process of its own beside its SuperNode and is asked through a socket in the file system, so that
code that a server ships to the SuperNode never is where data and secrets are. What it has answered is on disk
before it is sent: killed and started again it goes on with the same keys and the same momentum.

It trusts the server with nothing but the parameters. It has settings, noise and budget of its own and refuses
what would cost it privacy:

* a round twice, with other parameters: the difference of the two answers would have no noise;
* a round before the last one it answered, or beyond those that its privacy plan pays for;
* another session after it has sent something, for its budget pays for one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from cafcor_jax import attacks, experiment, secrets
from cafcor_jax.config import Config
from cafcor_jax.errors import InUseError, UserError
from cafcor_jax.experiment import Experiment
from cafcor_jax.federation import Data, WorkerKeys, attack_alone, one_worker
from cafcor_jax.flower import identity, messages, settings
from cafcor_jax.types import Array, PyTree
from cafcor_jax.workdir import write_whole

try:
    import fcntl
except ImportError:  # Not on Windows; then nothing keeps two processes out of one folder.
    fcntl = None  # type: ignore[assignment]

_STATE = "state"
# Before the first round.
_NO_ROUND = -1


@dataclasses.dataclass
class Memory:
    """What a worker must not lose, and nobody else may have.

    Attributes:
      settings: `decisive_json` of those it takes part with.
      session: of the run it takes part in.
      private: its X25519 key of that session.
      seed: 32 bytes, behind its own noise and its batches.
      public_keys: of all workers, once the server has sent them.
      round: the last one it answered; -1 before the first.
      request: SHA-256 of the parameters of that round.
      momentum: after that round, its leaves in order.
    """

    settings: str
    session: bytes
    private: bytes
    seed: bytes
    public_keys: list[bytes]
    round: int
    request: bytes
    momentum: list[np.ndarray]

    def encode(self) -> bytes:
        """The bytes of its file."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return messages.encode(values, values.pop("momentum"))

    @classmethod
    def decode(cls, content: bytes) -> Memory:
        """Reads what `encode` wrote."""
        values, arrays = messages.decode(content)
        return cls(**values, momentum=arrays)

    def keys(self, worker: int, impl: Any) -> WorkerKeys:
        """The worker's row of keys: its own ones from the seed, those of its pairs by agreement."""

        def own(purpose: bytes) -> Array:
            length = jax.random.key_dtype(impl).itemsize
            drawn = secrets.hkdf_sha256(self.seed, salt=self.session, info=purpose, length=length)
            return jax.random.wrap_key_data(
                jnp.asarray(np.frombuffer(drawn, "<u4").astype(np.uint32)), impl=impl
            )

        pairs = secrets.derive_row(self.private, self.public_keys, worker, session=self.session, impl=impl)
        return WorkerKeys(own(b"cafcor_jax batches 1"), own(b"cafcor_jax own noise 1"), pairs)


def read_memory(folder: str | os.PathLike[str]) -> Memory:
    """What the worker of a folder remembers.

    Raises:
      UserError: if there is nothing, or it is damaged.
    """
    path = Path(folder) / _STATE
    try:
        return Memory.decode(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: no worker has taken part in a run from there.") from None
    except (UserError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error}): the worker cannot go on with its run; give another state_dir."
        ) from None


def simulation_keys(memories: Sequence[Memory], num_honest: int, generator: str) -> WorkerKeys:
    """All workers' keys, for a simulation of the very run they took part in."""
    rows = [memory.keys(i, experiment.GENERATORS[generator]) for i, memory in enumerate(memories)]
    batches, own, pairs = (jnp.stack(column) for column in zip(*rows, strict=True))
    return WorkerKeys(batches[:num_honest], own, pairs)


class Worker:
    """Answers the server's messages.

    Args:
      config: the worker's own settings.
      index: its place, from 0 to n - 1.
      folder: for its memory; made if it is missing, readable by its owner only.
      malicious: plays `config.attack` instead of keeping to the protocol.
      examples: a .npz file with its own data, `images` (uint8 [m, 28, 28, 1]) and `labels` (whole numbers
        [m]), instead of its part of `config.dataset`.
      private_identity: signs its keys.
      identities: of all workers; with them, keys that are not signed are refused.
      log: is told what happens.

    Raises:
      UserError: if settings, data or folder cannot be used.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        folder: str | os.PathLike[str],
        *,
        malicious: bool = False,
        examples: str = "",
        private_identity: bytes | None = None,
        identities: Sequence[bytes] | None = None,
        log: Callable[[str], object] = print,
    ):
        settings.check(config)
        if not 0 <= index < config.num_workers:
            raise UserError(
                f"worker={index} is no place among num_workers={config.num_workers}: it must be from 0 to "
                f"{config.num_workers - 1}."
            )
        self.config, self.index = config, index
        self._identity, self._identities, self._log = private_identity, identities, log
        self._folder = Path(folder)
        self.open()
        try:
            built = experiment.build(config)
            self._rounds = built.plan.rounds
            self._params = jax.eval_shape(built.model.init, built.key)
            self._own = self._data(built, malicious, examples)
            self._program = _compiled(built, malicious, self._own)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self) -> None:
        """Takes the folder for this process, and remembers what is in it; it is done once at the beginning.

        Raises:
          UserError: if another process has the folder, or it cannot be used.
        """
        self._lock = self._lock_folder()
        try:
            self.memory = read_memory(self._folder) if (self._folder / _STATE).exists() else None
            if self.memory is not None and self.memory.settings != settings.decisive_json(self.config):
                raise UserError(
                    f"state_dir {self._folder} is that of a run with other settings: give those, or another "
                    "state_dir."
                )
        except BaseException:
            self.close()
            raise
        self._keys: WorkerKeys | None = None

    def close(self) -> None:
        """Lets other processes use the folder, until `open` is called again."""
        self._lock.close()

    def handle(self, content: bytes) -> bytes:
        """Answers one message; what cannot be answered is refused with a sentence."""
        try:
            values, arrays = messages.decode(content)
            answers: dict[str, Callable[..., bytes]] = {
                "hello": self._hello,
                "keys": self._take_keys,
                "train": self._train,
                "rejoin": self._rejoin,
            }
            kind = str(values.get("kind"))
            if kind not in answers:
                raise UserError(f"kind={kind!r} is no message: it must be one of {', '.join(answers)}.")
            return answers[kind](values, arrays)
        except UserError as error:
            self._log(f"refused: {error}")
            return messages.encode({"kind": "refused", "worker": self.index, "why": str(error)})
        except Exception as error:  # A message that nobody thought of must not end the worker.
            traceback.print_exc()
            why = f"Worker {self.index} could not answer ({type(error).__name__}); its log has the trace."
            return messages.encode({"kind": "refused", "worker": self.index, "why": why})

    # The four messages.

    def _hello(self, values: dict[str, Any], _: list[np.ndarray]) -> bytes:
        """Makes the key pair of a session."""
        session = values.get("session")
        if not isinstance(session, bytes) or not 16 <= len(session) <= 64:
            raise UserError(f"session={session!r} names no session: it must be 16 to 64 bytes.")
        settings.check_same(self.config, values.get("settings"))
        memory = self.memory
        if memory is not None and memory.session != session and memory.round != _NO_ROUND:
            raise UserError(
                f"Worker {self.index} has sent messages in session {memory.session.hex()}, and its budget "
                f"pays for one session, not for {session.hex()} too: resume that one, or start with another "
                "state_dir to spend its budget anew."
            )
        if memory is None or memory.session != session:
            zeros = [np.zeros(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(self._params)]
            memory = Memory(
                settings.decisive_json(self.config),
                session,
                secrets.generate_private_key(),
                os.urandom(32),
                [],
                _NO_ROUND,
                b"",
                zeros,
            )
            self._store(memory)
        public = secrets.public_key(memory.private)
        signature = b""
        if self._identity is not None:
            n = self.config.num_workers
            signature = identity.sign(
                self._identity, session=session, worker=self.index, num_workers=n, public_key=public
            )
        return self._reply("hello", public_key=public, signature=signature)

    def _take_keys(self, values: dict[str, Any], _: list[np.ndarray]) -> bytes:
        """Takes the public keys of all, and derives the keys of its pairs."""
        memory, n = self._of_session(values), self.config.num_workers
        public_keys = _list_of_bytes("public_keys", values)
        signatures = _list_of_bytes("signatures", values)
        if len(public_keys) != n:
            raise UserError(f"There are {len(public_keys)} public keys; num_workers={n} of them are needed.")
        if memory.round != _NO_ROUND and public_keys != memory.public_keys:
            raise UserError("The public keys are not those of the rounds before; they must stay the same.")
        if self._identities is not None:
            identity.check_signatures(self._identities, signatures, public_keys, session=memory.session)
        taken = dataclasses.replace(memory, public_keys=list(public_keys))
        self._keys = taken.keys(self.index, experiment.GENERATORS[self.config.generator])
        self._store(taken)
        digest = hashlib.sha256(b"".join(public_keys)).hexdigest()
        self._log(f"worker {self.index} takes part in session {memory.session.hex()}, key list {digest}")
        return self._reply("keys", digest=digest)

    def _train(self, values: dict[str, Any], arrays: list[np.ndarray]) -> bytes:
        """Answers a round with its momentum."""
        memory, round_index = self._of_session(values), values.get("round")
        if not memory.public_keys:
            raise UserError("There are no public keys yet: a round comes after them.")
        if type(round_index) is not int or not 0 <= round_index < self._rounds:
            raise UserError(
                f"round={round_index!r} is not paid for: the privacy plan of worker {self.index} pays for "
                f"rounds 0 to {self._rounds - 1}."
            )
        expected = jax.tree.leaves(self._params)
        if [(a.shape, a.dtype) for a in arrays] != [(leaf.shape, leaf.dtype) for leaf in expected]:
            raise UserError("The parameters do not have the shapes and types of the model.")
        request = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()
        if round_index < memory.round or (round_index == memory.round and request != memory.request):
            raise UserError(
                f"round={round_index} was asked for after round {memory.round} was answered: answers to one "
                "round with different parameters would have the same noise, so there is none."
            )
        structure = jax.tree.structure(self._params)
        if self._keys is None:
            self._keys = memory.keys(self.index, experiment.GENERATORS[self.config.generator])
        if round_index > memory.round:
            sent = self._program(
                jnp.int32(self.index),
                self._keys,
                jnp.int32(round_index),
                jax.tree.unflatten(structure, memory.momentum),
                jax.tree.unflatten(structure, arrays),
                self._own,
            )
            after = [np.asarray(leaf) for leaf in jax.tree.leaves(sent)]
            memory = dataclasses.replace(memory, round=round_index, request=request, momentum=after)
            self._store(memory)
        return self._reply("train", memory.momentum, session=memory.session, round=round_index)

    def _rejoin(self, values: dict[str, Any], _: list[np.ndarray]) -> bytes:
        """Proves that it is who it was in this session."""
        memory, challenge = self._of_session(values), values.get("challenge")
        if not isinstance(challenge, bytes):
            raise UserError("The challenge to rejoin must be a public key.")
        return self._reply(
            "rejoin",
            proof=identity.prove(memory.private, challenge, session=memory.session, worker=self.index),
        )

    # What they share.

    def _reply(self, kind: str, arrays: Sequence[np.ndarray] = (), **values: Any) -> bytes:
        return messages.encode({"kind": kind, "worker": self.index, **values}, arrays)

    def _of_session(self, values: dict[str, Any]) -> Memory:
        session = values.get("session")
        if self.memory is None or session != self.memory.session:
            named = session.hex() if isinstance(session, bytes) else repr(session)
            raise UserError(f"Worker {self.index} does not take part in session {named}.")
        return self.memory

    def _store(self, memory: Memory) -> None:
        # What is sent must not be forgotten, or the same noise could go out with other parameters.
        write_whole(self._folder / _STATE, memory.encode(), durable=True)
        self.memory = memory

    def _lock_folder(self) -> IO[str]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(0o700)  # It holds private keys.
            lock = open(self._folder / ".lock", "a")
        except OSError as error:
            raise UserError(f"state_dir {self._folder} cannot be used: {error.strerror}.") from None
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                raise InUseError(
                    f"state_dir {self._folder} is in use by another worker: every worker needs its own."
                ) from None
        return lock

    def _data(self, built: Experiment, malicious: bool, examples: str) -> Data | None:
        config = self.config
        if malicious:
            if config.attack == "none" or self.index < config.num_honest:
                raise UserError(
                    f"Worker {self.index} cannot be malicious with attack={config.attack!r} and "
                    f"num_byzantine={config.num_byzantine}: the last {config.num_byzantine} workers can, "
                    f"with one of {', '.join(attacks.ALONE)}."
                )
            return None
        if examples:
            return _read_examples(examples, config.batch_size, built)
        if self.index >= config.num_honest:
            raise UserError(
                f"Worker {self.index} has no part of the data, which is spread over the first "
                f"{config.num_honest} workers: give its own with --examples, or --malicious."
            )
        return jax.tree.map(lambda leaf: leaf[self.index], built.data)


def _compiled(built: Experiment, malicious: bool, own: Data | None) -> Callable[..., PyTree]:
    """(place, keys, round, momentum, params, own data) -> what a worker sends, compiled."""
    config, plan, attack = built.config, built.plan, built.attack
    assert not isinstance(attack, attacks.adaptive.AgainstRound)  # settings.check has seen to it

    # The place is an argument: workers on one machine then find each other's compiled code in the cache.
    def program(
        place: Array,
        keys: WorkerKeys,
        round_index: Array,
        momentum: PyTree,
        params: PyTree,
        data: Data | None,
    ) -> PyTree:
        worker = one_worker(
            place,
            loss_fn=built.model.loss,
            plan=plan,
            momentum=config.momentum,
            batch_size=config.batch_size,
            examples=built.model.examples,
            grid_bits=experiment.grid_bits(config, plan),
            augment=built.augment,
        )
        if malicious:
            gradient = attack_alone(attack, built.key, round_index, params, place, plan)
            if not isinstance(attack, attacks.ProtocolAttack):
                return gradient
        else:
            assert data is not None
            gradient = worker.gradient(keys, round_index, params, data).gradient
        return worker.momentum(keys, round_index, momentum, gradient)

    params = jax.eval_shape(built.model.init, built.key)
    some = jax.random.key(0, impl=experiment.GENERATORS[config.generator])
    shapes = WorkerKeys(some, some, jax.random.split(some, config.num_workers))
    return jax.jit(program).lower(jnp.int32(0), shapes, jnp.int32(0), params, params, own).compile()


def _read_examples(path: str, batch_size: int, built: Experiment) -> Data:
    shape = built.dataset.train_images.shape[1:]
    counted = built.plan.samples_per_worker if built.plan.level == "example" else None
    least = max(batch_size, counted or 0)
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (KeyError, ValueError, EOFError):
        raise UserError(f"{path} holds no examples: it must be a .npz file with images and labels.") from None
    if images.dtype != np.uint8 or images.shape[1:] != shape or labels.shape != images.shape[:1]:
        raise UserError(
            f"{path} has images {images.dtype} {list(images.shape)} and labels {list(labels.shape)}; they "
            f"must be uint8 [m, {', '.join(map(str, shape))}] and [m]."
        )
    if (
        not np.issubdtype(labels.dtype, np.integer)
        or not ((labels >= 0) & (labels < built.dataset.num_classes)).all()
    ):
        raise UserError(
            f"{path} has labels that are not whole numbers from 0 to {built.dataset.num_classes - 1}."
        )
    if len(labels) < least:
        raise UserError(f"{path} has {len(labels)} examples; with batch_size={batch_size} it takes {least}.")
    return Data(jnp.asarray(images), jnp.asarray(labels, jnp.int32), jnp.int32(len(labels)))


def _list_of_bytes(name: str, values: dict[str, Any]) -> list[bytes]:
    given = values.get(name)
    if not isinstance(given, list) or not all(isinstance(item, bytes) for item in given):
        raise UserError(f"{name} must be a list of bytes, one entry for each worker.")
    return given
