"""Flower's ClientApp: hands messages to the worker beside the SuperNode, and its answers back.

Flower starts a process for every message and takes this code from the server. So it does nothing by itself:
data, secrets and momentum are in the worker's process, which it reaches through a socket.
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
      context: its node_config has `worker-socket`.

    Returns:
      What the worker answers. If it cannot be reached, Flower tells the server so.
    """
    (array,) = message.content.array_records["message"].to_numpy_ndarrays()
    answer = sockets.ask(str(context.node_config["worker-socket"]), array.tobytes())
    return Message(RecordDict({"message": ArrayRecord([np.frombuffer(answer, np.uint8)])}), reply_to=message)
