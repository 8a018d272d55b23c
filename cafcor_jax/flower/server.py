"""The server of a federation over a network: set-up, rounds, faults, checkpoints.

It relays public keys and sees momenta; it never has a private key, a key of a pair, a gradient or a worker's
data. Whatever it gets may be hostile: a message that is missing, late or not as it should be is a row of NaN
to the rule, which gives it weight 0, and counts against f. With more than f such rows the run stops, and the
checkpoint of the round before stays.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import httpx  # which Flower talks through
import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from cafcor_jax import experiment, privacy, secrets
from cafcor_jax.config import Config
from cafcor_jax.errors import UserError
from cafcor_jax.federation import ServerState, server_init, server_step
from cafcor_jax.flower import identity, messages, settings
from cafcor_jax.workdir import COLUMNS, Workdir, digest

#: What the server keeps of a session, beside what every run's folder has.
FEDERATION = "federation.json"

Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """How long the server waits, in seconds.

    Attributes:
      setup: for workers to be there, and for each of their answers in the set-up.
      round: for the answers to a round.
      poll: from one look for answers to the next.
    """

    setup: float = 120.0
    round: float = 60.0
    poll: float = 0.2

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0 < value < math.inf:
                raise UserError(f"{name}-timeout={value} must be a number of seconds greater than 0.")


# A node that has not answered so many rounds in a row is not waited for until the end of the time.
_SILENT = 2
# It gets as long as the others took, and at least so many looks.
_GRACE = 5


class Fault(Exception):
    """Why a node's answer cannot be used, in a few words."""


class NoAnswer(Fault):
    """Nothing came from the node in its time."""


def ask(
    grid: Grid,
    contents: Mapping[int, tuple[str, bytes]],
    *,
    group: str,
    timeout: float,
    poll: float,
    silent: Collection[int] = (),
) -> dict[int, bytes | Fault]:
    """Asks nodes and waits for their answers.

    Args:
      grid: of Flower.
      contents: by node, the type of Flower's message, and its bytes.
      group: shown in Flower's logs.
      timeout: in seconds, for all of them.
      poll: in seconds.
      silent: nodes that have not answered for some time: once all others have, these get as long again.

    Returns:
      By node, its answer or what was wrong with it.
    """
    nodes = list(contents)
    nothing = NoAnswer(f"no answer within {timeout:g} s")
    answers: dict[int, bytes | Fault] = dict.fromkeys(nodes, nothing)
    outgoing = [
        Message(pack(content), node, kind, ttl=timeout + 60, group_id=group)
        for node, (kind, content) in contents.items()
    ]
    begin = time.monotonic()
    end = begin + timeout
    # Of a message that it does not take Flower gives no id, and of any none if all are too large together.
    pending = {
        message_id: node
        for message_id, node in zip(grid.push_messages(outgoing), nodes, strict=False)
        if message_id
    }
    answers |= dict.fromkeys(set(nodes) - set(pending.values()), Fault("could not be sent"))
    waiting_for_all = True
    while True:
        for message_id, node in list(pending.items()):
            # One by one: an answer that Flower cannot read must not take the others with it.
            try:
                replies = list(grid.pull_messages([message_id]))
            except (OSError, httpx.TransportError) as error:  # It may pass; the answer is kept until then.
                answers[node] = Fault(f"the SuperLink cannot be reached ({type(error).__name__})")
                continue
            except Exception as error:
                answers[node] = Fault(f"not decodable ({type(error).__name__})")
                del pending[message_id]
                continue
            if not replies:
                answers[node] = nothing
                continue
            answers[node] = _unpacked(replies[0])
            del pending[message_id]
        now = time.monotonic()
        if waiting_for_all and set(pending.values()) <= set(silent):
            waiting_for_all, end = False, min(end, now + max(now - begin, _GRACE * poll))
            nothing = NoAnswer("no answer for as long as the others took")
            answers |= dict.fromkeys(pending.values(), nothing)
        if not pending or now > end:
            return answers
        time.sleep(poll)


def pack(content: bytes) -> RecordDict:
    """Bytes as the content of a message of Flower, which sends large arrays in parts."""
    return RecordDict({"message": ArrayRecord([np.frombuffer(content, np.uint8)])})


def _unpacked(reply: Message) -> bytes | Fault:
    if reply.has_error():
        # Of an exception in a ClientApp the last line is enough.
        told = _said((str(reply.error.reason).strip() or "Flower gave no reason").splitlines()[-1])
        exception = re.fullmatch(r"<class '(.*)'>:<'(.*)'>", told)
        return Fault(f"no answer: {f'{exception[2]} ({exception[1]})' if exception else told}"[:200])
    try:
        (array,) = reply.content.array_records["message"].to_numpy_ndarrays()
        return (
            np.ascontiguousarray(array, np.uint8).tobytes() if array.dtype == np.uint8 else Fault("not bytes")
        )
    except Exception as error:
        return Fault(f"not decodable ({type(error).__name__})")


def run(grid: Grid, config: Config, timeouts: Timeouts, *, log: Log = print) -> dict[str, Any]:
    """Runs a federation, or goes on with one, and leaves everything in `config.workdir`.

    Args:
      grid: reaches the workers.
      config: the settings; those of every worker must be the same.
      timeouts: how long to wait.
      log: takes lines for a person.

    Returns:
      What summary.json holds.

    Raises:
      UserError: if settings or workers cannot be used, or more than f workers failed in a round.
    """
    settings.check(config)
    with Workdir(config.workdir, config) as folder:
        finished = folder.summary()
        if finished is not None:
            log(f"The run in {config.workdir} is finished; delete the folder to run it again.")
            return finished
        return _Server(grid, config, timeouts, folder, log).run()


def _said(value: Any) -> str:
    """What a worker or a SuperNode says, as one short line that can be printed: it may be anything."""
    line = " ".join(str(value).split())[:300]
    return "".join(character if character.isprintable() else "?" for character in line)


class _Server:
    def __init__(self, grid: Grid, config: Config, timeouts: Timeouts, folder: Workdir, log: Log):
        self._grid, self._config, self._timeouts = grid, config, timeouts
        self._folder, self._log = folder, log
        built = experiment.build(config)
        folder.start(built.record(), log)
        # Of the data the server keeps the test images; `built`, with the rest, goes when this returns.
        self._plan, self._record = built.plan, built.record()
        self._tests = jnp.asarray(built.dataset.test_images), jnp.asarray(built.dataset.test_labels)
        self._evaluate = jax.jit(built.model.evaluate)
        self._spent = privacy.epsilon_schedule(built.plan)
        aggregator, optimizer = built.aggregator, built.optimizer
        self._step = jax.jit(lambda state, rows: server_step(aggregator, optimizer, state, rows))
        self._state: ServerState = jax.jit(
            lambda params: server_init(aggregator, optimizer, params, config.num_workers)
        )(built.init_params())
        self._nodes: dict[int, int] = {}  # by worker
        self._refused: set[int] = set()  # nodes that could not prove to be a worker
        self._silent: dict[int, int] = {}  # by node, how many rounds in a row it was asked and said nothing
        self._session, self._public_keys, self._signatures = b"", list[bytes](), list[bytes]()
        self._faults: list[dict[str, Any]] = []
        self._absent: set[int] = set()  # workers of whom nothing came in the last round

    def run(self) -> dict[str, Any]:
        done = max(self._folder.rounds(), default=None)
        if done is None:
            self._set_up()
            done = 0
            self._folder.save(0, self._state)
        else:
            self._resume(done)
        weights = [self._folder.resume_metrics(done)]
        while done < self._config.rounds:
            experiment.check_budget(self._plan, self._spent, done + 1)
            begin = time.monotonic()
            row, judged_weights = self._round(done)
            done += 1
            row["seconds"] = time.monotonic() - begin
            self._folder.append_metrics([{name: row.get(name) for name in COLUMNS}])
            weights.append(judged_weights[None])
            self._folder.write_weights(np.concatenate(weights))
            self._write_session()
            # After every round: workers answer no round twice with different parameters.
            self._folder.save(done, self._state)
        return self._finish()

    # Set-up.

    def _set_up(self) -> None:
        n = self._config.num_workers
        self._session = os.urandom(16)
        nodes = self._wait_for_nodes(n)
        self._log(f"set-up: {len(nodes)} SuperNodes are there, session {self._session.hex()}")
        hello = {"kind": "hello", "session": self._session, "settings": settings.decisive_json(self._config)}
        answers = self._ask_all(dict.fromkeys(nodes, messages.encode(hello)), "set-up")
        keys: dict[int, bytes] = {}
        signatures: dict[int, bytes] = {}
        for node, values in answers.items():
            worker = _place(values.get("worker"), n)
            if worker in keys:
                raise UserError(
                    f"Two SuperNodes say that they are worker {worker}: each of num_workers={n} must have "
                    f"a place of its own, from 0 to {n - 1}."
                )
            keys[worker], signatures[worker] = values.get("public_key"), values.get("signature")  # type: ignore[assignment]
            self._nodes[worker] = node
        missing = [str(worker) for worker in range(n) if worker not in keys]
        if missing:
            raise UserError(
                f"The public keys of workers {', '.join(missing)} are missing: num_workers={n} of them are "
                "needed."
            )
        self._public_keys = [keys[worker] for worker in range(n)]
        self._signatures = [
            signature if isinstance(signature := signatures[worker], bytes) else b"" for worker in range(n)
        ]
        secrets.check_public_keys(self._public_keys)
        probe = secrets.generate_private_key()
        for key in self._public_keys:
            secrets.shared_secret(probe, key)  # refuses points of low order
        content = messages.encode(
            {
                "kind": "keys",
                "session": self._session,
                "public_keys": self._public_keys,
                "signatures": self._signatures,
            }
        )
        self._ask_all(dict.fromkeys(self._nodes.values(), content), "set-up")
        self._write_session()
        self._log(f"set-up: {n} workers have agreed on their secrets")

    def _wait_for_nodes(self, wanted: int, *, enough: int | None = None) -> list[int]:
        """All nodes when so many are there; at the end of the set-up's time, `enough` are."""
        least = wanted if enough is None else enough
        end = time.monotonic() + self._timeouts.setup
        while True:
            nodes = sorted(self._grid.get_node_ids())
            late = time.monotonic() > end
            if len(nodes) >= (least if late else wanted):
                return nodes
            if late:
                raise UserError(
                    f"{len(nodes)} SuperNodes are connected after {self._timeouts.setup:g} s; "
                    f"num_workers={self._config.num_workers} needs {least}: start the others, or give "
                    "all the same smaller number."
                )
            time.sleep(self._timeouts.poll)

    def _ask_all(self, contents: Mapping[int, bytes], group: str) -> dict[int, dict[str, Any]]:
        """The answers of all, or a UserError: a set-up must be right in every part."""
        answers = ask(
            self._grid,
            {node: ("query", content) for node, content in contents.items()},
            group=group,
            timeout=self._timeouts.setup,
            poll=self._timeouts.poll,
        )
        values = {}
        for node, answer in answers.items():
            if isinstance(answer, Fault):
                raise UserError(f"The set-up failed at SuperNode {node}: {answer}.")
            values[node], _ = messages.decode(answer)
            if values[node].get("kind") == "refused":
                who, why = _said(values[node].get("worker")), _said(values[node].get("why"))
                raise UserError(f"Worker {who} refuses: {why}")
        return values

    def _resume(self, done: int) -> None:
        """Takes up the session of the checkpoint."""
        path = self._folder.path / FEDERATION
        try:
            stored = json.loads(path.read_text())
            self._session = bytes.fromhex(stored["session"])
            self._public_keys = [bytes.fromhex(key) for key in stored["public_keys"]]
            self._signatures = [bytes.fromhex(signature) for signature in stored["signatures"]]
            of_workers = [fault for fault in stored["faults"] if fault["worker"] is not None]
            last = max([done - 1, *(fault["round"] for fault in of_workers)])  # it may have stopped in it
            self._absent = _absent(of_workers, last)
            self._faults = [fault for fault in stored["faults"] if fault["round"] < done]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} holds no session to go on with ({type(error).__name__}), and there are checkpoints "
                "beside it: give another workdir."
            ) from None
        self._state = self._folder.restore(done, self._state)
        if done == self._config.rounds:
            return  # Killed before the summary: nobody is needed any more.
        needed = self._config.num_honest
        nodes = self._wait_for_nodes(self._config.num_workers, enough=needed)
        private = secrets.generate_private_key()
        answers = ask(
            self._grid,
            {node: ("query", self._challenge(private)) for node in nodes},
            group="resume",
            timeout=self._timeouts.setup,
            poll=self._timeouts.poll,
        )
        for node, answer in answers.items():
            self._welcome(node, answer, private, done)
        if len(self._nodes) < needed:
            raise UserError(
                f"{len(self._nodes)} workers of session {self._session.hex()} are there; at least {needed} "
                f"of num_workers={self._config.num_workers} are needed to go on after round {done}."
            )
        self._log(f"resuming after round {done} with {len(self._nodes)} workers")

    def _challenge(self, private: bytes) -> bytes:
        return messages.encode(
            {"kind": "rejoin", "session": self._session, "challenge": secrets.public_key(private)}
        )

    def _welcome(self, node: int, answer: bytes | Fault, private: bytes, round_index: int) -> None:
        """Takes a node for the worker whose private key it proves to have, and for nobody without."""
        try:
            if isinstance(answer, Fault):
                return  # It is asked again in the next round.
            values, _ = messages.decode(answer)
            worker = _place(values.get("worker"), self._config.num_workers)
            if values.get("kind") == "refused":
                raise UserError(_said(values.get("why")))
            proof = values.get("proof")
            key = self._public_keys[worker]
            if not isinstance(proof, bytes) or not identity.proves(
                proof, private, key, session=self._session, worker=worker
            ):
                raise UserError(f"it says that it is worker {worker} and does not have its key")
        except UserError as error:
            self._refused.add(node)
            self._log(f"SuperNode {node} is not let in: {error}")
            self._note(round_index, None, f"SuperNode {node} is not let in: {error}")
            return
        if worker in self._absent:
            self._log(f"worker {worker} is back")
        self._nodes[worker] = node

    # Rounds.

    def _round(self, round_index: int) -> tuple[dict[str, Any], np.ndarray]:
        """One round: asks all workers, judges what they sent, takes a step."""
        config = self._config
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self._state.params)]
        content = messages.encode({"kind": "train", "session": self._session, "round": round_index}, leaves)
        online = set(self._grid.get_node_ids())
        known = {node: worker for worker, node in self._nodes.items()}
        private = secrets.generate_private_key()
        strangers = online - set(known) - self._refused
        contents = {node: ("train", content) for node in known if node in online}
        contents |= {node: ("query", self._challenge(private)) for node in strangers}
        answers = ask(
            self._grid,
            contents,
            group=str(round_index),
            timeout=self._timeouts.round,
            poll=self._timeouts.poll,
            silent=[node for node, rounds in self._silent.items() if rounds >= _SILENT],
        )
        self._silent = {
            node: self._silent.get(node, 0) + 1
            for node, answer in answers.items()
            if isinstance(answer, NoAnswer)
        }
        rows = [np.full((config.num_workers, *leaf.shape), np.nan, leaf.dtype) for leaf in leaves]
        failed = 0
        for worker in range(config.num_workers):
            answer = answers.get(self._nodes.get(worker, -1), Fault("not connected"))
            try:
                for leaf, sent in zip(rows, self._checked(answer, worker, round_index, leaves), strict=True):
                    leaf[worker] = sent
            except (Fault, UserError) as fault:
                failed += 1
                self._note(round_index, worker, str(fault).rstrip("."))
        self._absent = _absent(self._faults, round_index)
        for node in strangers:
            self._welcome(node, answers[node], private, round_index)
        if failed > config.num_byzantine:
            self._write_session()
            now = [
                fault
                for fault in self._faults
                if fault["round"] == round_index and fault["worker"] is not None
            ]
            listing = "; ".join(f"worker {fault['worker']}: {fault['what']}" for fault in now)
            raise UserError(
                f"Round {round_index + 1} has no usable message of {failed} workers, more than "
                f"num_byzantine={config.num_byzantine} ({listing}): the run stopped, its checkpoint after "
                f"round {round_index} is kept, and the same command goes on from there."
            )
        messages_of_all = jax.tree.unflatten(jax.tree.structure(self._state.params), rows)
        self._state, judged = self._step(self._state, messages_of_all)
        row: dict[str, Any] = {
            "round": round_index + 1,
            "epsilon": float(self._spent[round_index]),
            "not_finite": failed,
            "flagged": int(np.sum(judged.flagged)),
            "law_fits": int(judged.law_fits),
        }
        done = round_index + 1
        if done % config.eval_every == 0 or done == config.rounds:
            loss, accuracy = map(float, self._evaluate(self._state.params, *self._tests))
            row |= {"test_loss": loss, "test_accuracy": accuracy}
            self._log(f"round {done}/{config.rounds}  accuracy {accuracy:.1%}  test loss {loss:.3f}")
        return row, np.asarray(judged.weights, np.float32)

    def _checked(
        self, answer: bytes | Fault, worker: int, round_index: int, like: list[np.ndarray]
    ) -> list[np.ndarray]:
        """A worker's momentum, or the reason why its answer is none."""
        if isinstance(answer, Fault):
            raise answer
        values, arrays = messages.decode(answer)
        if values.get("kind") == "refused":
            raise Fault(f"refuses: {_said(values.get('why'))}")
        if values.get("kind") != "train" or values.get("session") != self._session:
            raise Fault("answers another question or session")
        if values.get("worker") != worker or isinstance(values.get("worker"), bool):
            raise Fault(f"says that it is worker {values.get('worker')!r:.20}")
        if values.get("round") != round_index:
            raise Fault(f"answers round {values.get('round')!r:.20}")
        if [array.shape for array in arrays] != [leaf.shape for leaf in like]:
            raise Fault("has other shapes than the parameters")
        if [array.dtype for array in arrays] != [leaf.dtype for leaf in like]:
            raise Fault("has other types than the parameters")
        if not all(np.isfinite(array).all() for array in arrays):
            raise Fault("is not finite")
        return arrays

    def _note(self, round_index: int, worker: int | None, what: str) -> None:
        self._faults.append({"round": round_index, "worker": worker, "what": what})
        if worker is not None:
            self._log(f"round {round_index + 1}: worker {worker}: {what}")

    def _write_session(self) -> None:
        self._folder.write_json(
            FEDERATION,
            {
                "session": self._session.hex(),
                "public_keys": [key.hex() for key in self._public_keys],
                "signatures": [signature.hex() for signature in self._signatures],
                "faults": self._faults,
            },
        )

    def _finish(self) -> dict[str, Any]:
        from cafcor_jax.workdir import read_metrics

        metrics = read_metrics(self._folder.path / "metrics.csv")
        summary = {
            "rounds": self._config.rounds,
            "final_accuracy": float(metrics["test_accuracy"][-1]),
            "final_loss": float(metrics["test_loss"][-1]),
            "epsilon": privacy.epsilon(self._plan),
            "delta": self._plan.delta,
            "accountant": self._plan.accountant,
            "seconds": float(metrics["seconds"].sum()),
            "faults": self._faults,
            "absences": absences(self._faults),
            "privacy_of_absences": privacy_of_absences(self._plan, self._faults),
            "params_sha256": digest(self._state.params),
            "workdir": self._config.workdir,
        }
        self._folder.write_json("summary.json", summary)
        self._folder.prune(keep=1)
        return summary


def _absent(faults: list[dict[str, Any]], round_index: int) -> set[int]:
    """The workers of whom nothing came in a round, which is not the same as something that was no use."""
    return {
        fault["worker"]
        for fault in faults
        if fault["round"] == round_index and fault["what"].startswith(("no answer", "not connected"))
    }


def absences(faults: list[dict[str, Any]]) -> list[str]:
    """Who failed when, in words: one line for each worker and kind of fault.

    Example:
      >>> absences([{"round": 0, "worker": 3, "what": "late"}, {"round": 1, "worker": 3, "what": "late"}])
      ['worker 3 in rounds 1, 2: late']
    """
    grouped: dict[tuple[Any, str], list[int]] = {}
    for fault in faults:
        grouped.setdefault((fault["worker"], fault["what"]), []).append(fault["round"] + 1)
    return [
        f"{'a SuperNode' if worker is None else f'worker {worker}'} in round{'s'[: len(rounds) > 1]} "
        f"{', '.join(map(str, rounds))}: {what}"
        for (worker, what), rounds in grouped.items()
    ]


def privacy_of_absences(plan: privacy.PrivacyPlan, faults: list[dict[str, Any]]) -> str:
    """What messages that did not come cost, in a sentence."""
    by_round: dict[int, int] = {}
    for fault in faults:
        if fault["worker"] is not None:
            by_round[fault["round"]] = by_round.get(fault["round"], 0) + 1
    most = max(by_round.values(), default=0)
    if not most:
        return "Every worker's message came in every round."
    if plan.threat_model == "none":
        return f"Up to {most} messages of a round did not come; there is no noise to be left over."
    if plan.threat_model == "cdp":
        return (
            f"Up to {most} messages of a round did not come: under cdp each takes a part of the mean's noise "
            "away, so that a round without them spends up to "
            f"{plan.num_workers / (plan.num_workers - most):.2f} times what the plan counts for it."
        )
    honest = plan.num_workers - plan.num_byzantine
    cost = "no honest message is left to count with"
    if most < honest:
        cost = (
            f"at worst, if all of these workers are honest, the noise in the honest mean grew from "
            f"{plan.mean_std_without(0):.3g} to {plan.mean_std_without(most):.3g} per coordinate"
        )
    return (
        f"Up to {most} messages of a round did not come. The others' privacy holds: what they share with the "
        f"absent is left in their messages as noise; {cost}."
    )


def _place(worker: Any, num_workers: int) -> int:
    if type(worker) is not int or not 0 <= worker < num_workers:
        raise UserError(
            f"A SuperNode says that it is worker {worker!r:.20}; with num_workers={num_workers} it must be "
            f"from 0 to {num_workers - 1}."
        )
    return worker
