"""Federated learning that is private and Byzantine-robust at once, without trusting the server."""

__version__ = "0.1.0"
