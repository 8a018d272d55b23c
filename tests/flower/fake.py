"""A federation in one process: Flower's messages without its network, and a model that compiles at once."""

import itertools

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from cafcor_jax.config import Config
from cafcor_jax.flower import messages, server
from cafcor_jax.flower.worker import Worker

QUICK = server.Timeouts(setup=0.2, round=0.05, poll=0.01)


def make(workdir, **changes):
    values = dict(
        dataset="synthetic",
        num_workers=5,
        num_byzantine=1,
        attack="bias_fixed",
        attack_factor=None if "attack" in changes else 100.0,
        epsilon=500.0,
        rounds=4,
        batch_size=8,
        learning_rate=0.5,
        generator="threefry2x32",
        workdir=str(workdir),
    )
    return Config(**(values | changes))


def workers(config, folder, **changes):
    """All workers of a federation, the last f of them malicious."""
    return [
        Worker(
            config,
            i,
            folder / f"worker{i}",
            malicious=i >= config.num_honest,
            log=lambda text: None,
            **changes,
        )
        for i in range(config.num_workers)
    ]


class FakeGrid(Grid):
    """Hands the server's messages to functions, and keeps all that comes back.

    A node is a function from bytes to bytes. It may return None (no answer), or an exception that reading the
    answer then raises.
    """

    def __init__(self, nodes):
        self.nodes = dict(nodes)
        self.received = []
        self.asked = []
        self._replies = {}
        self._ids = itertools.count()
        # Flower sets it in the process of a ServerApp; messages are made with it.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, outgoing):
        ids = []
        for message in outgoing:
            message_id = str(next(self._ids))
            message.metadata.__dict__["_message_id"] = message_id
            ids.append(message_id)
            (array,) = message.content.array_records["message"].to_numpy_ndarrays()
            self.asked.append(array.tobytes())
            answer = self.nodes[message.metadata.dst_node_id](array.tobytes())
            if isinstance(answer, bytes):
                self.received.append(answer)
                answer = server.pack(answer)
            if isinstance(answer, Exception):
                self._replies[message_id] = answer
            elif answer is not None:
                self._replies[message_id] = Message(answer, reply_to=message)
        return ids

    def pull_messages(self, message_ids):
        (message_id,) = message_ids
        reply = self._replies.get(message_id)
        if isinstance(reply, Exception):
            raise reply
        return [] if reply is None else [reply]


def grid_of(members):
    return FakeGrid({100 + worker.index: worker.handle for worker in members})


def only_in(rounds, worker, change):
    """A node that misbehaves in some rounds: `change` gets the question and what the worker would answer."""

    def node(content):
        values, _ = messages.decode(content)
        if values["kind"] != "train" or values["round"] not in rounds:
            return worker.handle(content)
        return change(content, worker)

    return node


def altered(**changes):
    """A change that answers in time, with other values."""

    def change(content, worker):
        values, arrays = messages.decode(worker.handle(content))
        return messages.encode(values | changes, arrays)

    return change


def altered_arrays(function):
    def change(content, worker):
        values, arrays = messages.decode(worker.handle(content))
        return messages.encode(values, [np.asarray(function(array)) for array in arrays])

    return change
