"""A federation over a network, on Flower: workers and server are processes of their own.

`server.py` is the server's side and `worker.py` a worker's; both call the functions of `federation.py`.
`server_app.py` and `client_app.py` hang them on Flower's messages. `docs/federation.md` has the protocol.

Flower comes with the extra `cafcor_jax[flower]`; only the modules that need it import it.
"""
