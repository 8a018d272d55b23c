"""What server and workers of a federation over a network agree on, and what they refuse."""

from __future__ import annotations

import json
from typing import Any

from absl import flags

from cafcor_jax import attacks, cli
from cafcor_jax import config as config_lib
from cafcor_jax.config import Config
from cafcor_jax.errors import UserError


def check(config: Config) -> None:
    """Raises a UserError for settings that only a simulation can have."""
    if config.num_workers < 2:
        raise UserError(
            f"num_workers={config.num_workers} is too few for a federation over a network: it takes at "
            "least 2 that share a secret."
        )
    if config.noise_mode == "projected":
        raise UserError(
            "noise_mode='projected' is for simulation, no worker could draw its own noise: use 'pairwise'."
        )
    colluding = config.num_byzantine if config.num_colluding is None else config.num_colluding
    if config.threat_model == "secldp" or (
        config.threat_model == "byzldp" and colluding < config.num_byzantine
    ):
        raise UserError(
            f"threat_model={config.threat_model!r} with num_colluding={config.num_colluding} counts on noise "
            "that malicious workers leave uncancelled, and over a network all workers may keep to the "
            "protocol: use threat_model='byzldp' with all malicious workers colluding, or 'ldp'."
        )
    if config.mesh_workers * config.mesh_parameters > 1 or config.tensorboard == "on":
        raise UserError(
            f"mesh_workers={config.mesh_workers}, mesh_parameters={config.mesh_parameters} and "
            f"tensorboard={config.tensorboard!r} are for simulations: over a network they must be 1, 1 and "
            "'off'."
        )
    if config.attack not in (*attacks.ALONE, "none"):
        raise UserError(
            f"attack={config.attack!r} looks at what honest workers send, and over a network only the server "
            f"sees it: choose one of none, {', '.join(attacks.ALONE)}."
        )
    if config.attack in attacks.SEARCHED and config.attack_factor is None:
        raise UserError(
            f"attack={config.attack!r} has no attack_factor, and over a network a malicious worker cannot "
            "search it against the server's rule: give a number, for example attack_factor=100."
        )


def decisive_json(config: Config) -> str:
    """The settings that decide the results, for a message."""
    return json.dumps(config_lib.decisive(config), sort_keys=True)


def check_same(own: Config, text: Any) -> None:
    """Raises a UserError if the other side, whose `decisive_json` is given, has other settings."""
    try:
        theirs = json.loads(text)
        if not isinstance(theirs, dict):
            raise ValueError
    except (ValueError, TypeError):
        raise UserError("The server's settings cannot be read: they must be a JSON object.") from None
    ours = json.loads(decisive_json(own))
    listing = [
        f"{name} ({theirs.get(name)!r} there, {ours.get(name)!r} here)"
        for name in sorted({*ours, *theirs})
        if theirs.get(name) != ours.get(name)
    ]
    if listing:
        raise UserError(
            f"The server has other settings than this worker: {', '.join(listing)}; they must be the same."
        )


def read(flagfile: str) -> Config:
    """The settings in a flagfile.

    Raises:
      UserError: if it cannot be read or a setting is wrong.
    """
    values = flags.FlagValues()
    config_lib.define_flags(values)
    return cli.parse_flags(["", f"--flagfile={flagfile}"], values)


def as_flagfile(config: Config) -> str:
    """All settings as the text of a flagfile that `read` reads."""
    return "".join(f"--{name}={value}\n" for name, value in config.to_dict().items())
