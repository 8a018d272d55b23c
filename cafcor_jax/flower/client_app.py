"""Flower's ClientApp: hands messages to the worker beside the SuperNode, and its answers back.

Flower starts a process for every message and takes this code from the server. So it does nothing by itself:
data, secrets and momentum are in the worker's process, which it reaches through a socket. In Flower's own
simulation there is no such process, and the worker is in this one (`virtual.py`).
"""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from cafcor_jax.flower import sockets

app = ClientApp()


@app.train()
@app.query()
def forward(message: Message, context: Context) -> Message:
    """Asks the worker whose socket the node's configuration names.

    Args:
      message: from the server.
      context: its node_config has `worker-socket`; in Flower's simulation `partition-id`.

    Returns:
      What the worker answers. If it cannot be reached, Flower tells the server so.
    """
    (array,) = message.content.array_records["message"].to_numpy_ndarrays()
    answer = _ask(context, array.tobytes())
    return Message(RecordDict({"message": ArrayRecord([np.frombuffer(answer, np.uint8)])}), reply_to=message)


def _ask(context: Context, content: bytes) -> bytes:
    node = context.node_config
    if "worker-socket" in node:
        try:
            return sockets.ask(str(node["worker-socket"]), content)
        except OSError as error:
            raise ConnectionError(f"its worker does not answer: {error.strerror or error}") from None
    # Only now: JAX takes seconds to import, and beside a worker's process there is one of these per message.
    from cafcor_jax.flower import virtual

    if not virtual.is_virtual(node):
        raise ValueError("the SuperNode's --node-config names no worker-socket")
    return virtual.answer(str(context.run_config["flagfile"]), int(node["partition-id"]), content)
