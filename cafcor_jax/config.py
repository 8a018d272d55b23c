"""An experiment's settings: one frozen dataclass, and absl flags made from it.

Every field of :class:`Config` carries its help, its choices and its own check; :meth:`Config.validate` adds
the checks that need several fields. Whoever makes a ``Config``, from flags, from JSON or in a notebook, gets
a valid one or a :class:`~cafcor_jax.errors.UserError` with one sentence.

This is the only module of the package, with ``cli``, that knows absl.

Example:
    >>> from cafcor_jax import config
    >>> cfg = config.Config(num_workers=20, num_byzantine=3, attack="sign_flip")
    >>> cfg.num_honest
    17
"""

import dataclasses
import difflib
import inspect
import math
import numbers
import os
import re
import typing
from collections.abc import Callable, Collection
from typing import Any

from absl import flags

from cafcor_jax import aggregators, attacks, data, noise, privacy
from cafcor_jax.errors import UserError

SCHEDULES = ("constant", "cosine", "linear")

# Threat models whose privacy rests on the correlated noise of the workers.
CORRELATED = ("secldp", "byzldp")

# A field's own check: what is allowed, in words that follow "must be", and the test itself.
_Check = tuple[str, Callable[[Any], bool]]

_PROBABILITY = ("between 0 and 1, both excluded", lambda value: 0 < value < 1)
_POSITIVE: _Check = ("greater than 0", lambda value: value > 0)
_NOT_NEGATIVE: _Check = ("0 or greater", lambda value: value >= 0)
_AT_LEAST_ONE: _Check = ("at least 1", lambda value: value >= 1)


def _field(
    default: Any,
    help: str,
    *,
    group: str,
    choices: Collection[str] | None = None,
    check: _Check | None = None,
    unset: str | None = None,
    result: bool = True,
) -> Any:
    """Declares one setting.

    Args:
      default: its default value.
      help: one or two sentences for ``--help``.
      group: the heading of ``--help`` it stands under.
      choices: the allowed names, from the table that defines them.
      check: what is allowed otherwise.
      unset: for a setting that may be None, the words for what None does.
      result: whether it decides the results. If not, it only says where and how to run, and a resumed run
        may differ in it.

    Returns:
      A dataclass field.
    """
    metadata = {
        "help": help,
        "group": group,
        "choices": tuple(choices) if choices is not None else None,
        "check": check,
        "unset": unset,
        "result": result,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one experiment; the defaults are the paper's Figure 1 on MNIST, ByzLDP, f = 10.

    The fields are described by ``python scripts/train.py --help``, from the text below.
    """

    dataset: str = _field(
        "mnist",
        "What to train on; 'synthetic' needs no download.",
        group="Data",
        choices=data.NAMES,
    )
    partition: str = _field(
        "homogeneous",
        "How the training data is spread over the honest workers: 'dirichlet' draws each class's shares "
        "with --alpha, 'extreme' sorts by label.",
        group="Data",
        choices=data.PARTITIONS,
    )
    alpha: float = _field(
        1.0,
        "Concentration of the dirichlet partition: the smaller, the more the workers differ. Other "
        "partitions do not use it.",
        group="Data",
        check=_POSITIVE,
    )
    data_dir: str = _field(
        "",
        "Folder for prepared datasets. Empty: $CAFCOR_JAX_DATA, else ~/.cache/cafcor_jax.",
        group="Data",
        result=False,
    )
    idx_dir: str = _field(
        "",
        "Folder of IDX files (train-images-idx3-ubyte and so on) to read the dataset from. Empty: not used.",
        group="Data",
        result=False,
    )

    num_workers: int = _field(
        100,
        "All workers, n, the malicious ones included.",
        group="Workers and attack",
        check=_AT_LEAST_ONE,
    )
    num_byzantine: int = _field(
        10,
        "Malicious workers, f; fewer than half of all.",
        group="Workers and attack",
        check=_NOT_NEGATIVE,
    )
    attack: str = _field(
        "alie",
        "What the malicious workers do.",
        group="Workers and attack",
        choices=attacks.BY_NAME,
    )
    attack_factor: float | None = _field(
        None,
        "Strength of the attack, for those that have one (alie: standard deviations from the mean; foe: "
        "times the mean; gaussian: standard deviation; bias and its kin: length, searched in every round "
        "unless given).",
        group="Workers and attack",
        unset="the attack's own",
    )
    aggregator: str = _field(
        "caf",
        "How the server combines the workers' updates.",
        group="Workers and attack",
        choices=(*aggregators.BY_NAME, *aggregators.OVER_ROUNDS),
    )
    false_alarm: float = _field(
        1e-3,
        "For caf_noise_aware and caf_history: the chance that honest workers break the law of their noise in "
        "a round.",
        group="Workers and attack",
        check=_PROBABILITY,
    )
    pre_aggregator: str = _field(
        "none",
        "What the server does to the updates before it combines them.",
        group="Workers and attack",
        choices=("none", *aggregators.mixing.BY_NAME),
    )

    threat_model: str = _field(
        "byzldp",
        "Whom the workers' privacy is protected from: 'none' nobody (no noise), 'cdp' outsiders (trusted "
        "server), 'secldp' the server, 'byzldp' the server and the malicious workers, 'ldp' everyone else.",
        group="Privacy",
        choices=privacy.THREAT_MODELS,
    )
    privacy_level: str = _field(
        "user",
        "What one unit of privacy is: all data of one worker, or one example.",
        group="Privacy",
        choices=privacy.LEVELS,
    )
    epsilon: float = _field(
        26.4,
        "Privacy budget of the whole run, with --delta. Not used by threat model 'none'.",
        group="Privacy",
    )
    noise_multiplier: float | None = _field(
        None,
        "Noise instead of a budget, under 'ldp' and 'cdp': this many times C (at the example level "
        "C / batch_size) in one worker's message, or under 'cdp' in the sum of all. Epsilon is then counted, "
        "and --epsilon not used.",
        group="Privacy",
        check=_POSITIVE,
        unset="by the budget",
    )
    delta: float = _field(
        1e-4,
        "The delta of the privacy budget.",
        group="Privacy",
        check=_PROBABILITY,
    )
    accountant: str = _field(
        "rdp",
        "How the budget is counted: 'exact' is the tightest, 'rdp' what the paper's budgets were made with, "
        "'paper' its closed form.",
        group="Privacy",
        choices=privacy.ACCOUNTANTS,
    )
    clip_norm: float = _field(
        2.25,
        "Clipping threshold C of the gradients. 0 switches clipping off, with threat model 'none' only.",
        group="Privacy",
        check=_NOT_NEGATIVE,
    )
    sampling: str = _field(
        "without_replacement",
        "How batches are drawn: 'without_replacement' as in the paper, or 'poisson', where each example is "
        "drawn by itself and --batch_size is the mean; with privacy level 'example' only.",
        group="Privacy",
        choices=privacy.SAMPLINGS[1:],
    )
    noise_split: str = _field(
        "equal",
        "How ByzLDP splits its noise: 'equal' is the paper's sigma_ind = sigma_cor, 'mean_noise' leaves the "
        "least in the honest mean, 'robust' also counts what attackers can hide in a message's noise.",
        group="Privacy",
        choices=privacy.SPLITS,
    )
    secret_graph: str = _field(
        "complete",
        "Which workers share a secret: complete, ring, regular:DEGREE (at random), or a .npy, .csv or .txt "
        "file with an adjacency matrix. Fewer secrets are faster, and colluders cut workers off more easily.",
        group="Privacy",
    )
    noise_mode: str = _field(
        "pairwise",
        "How correlated noise is drawn: 'pairwise' from one secret per pair of workers, as real workers do; "
        "'projected' with the same law, much faster, for simulation; 'independent' draws none.",
        group="Privacy",
        choices=noise.MODES,
    )
    precision: str = _field(
        "float32",
        "'grid' rounds gradient and noise to whole multiples of one step, so that the low-order bits of a "
        "message tell nothing and the noise of pairs cancels bitwise; at the user level, not with 'exact'.",
        group="Privacy",
        choices=("float32", "grid"),
    )
    grid_bits: int | None = _field(
        None,
        "The step of the grid is 2^-bits; with --precision=grid only.",
        group="Privacy",
        check=("from -60 to 60", lambda value: -60 <= value <= 60),
        unset="as fine as is cheap",
    )
    generator: str = _field(
        "threefry2x32",
        "Behind all keys: JAX's default with keys of 64 bits, or 'chacha20' with keys of 256 bits, slower.",
        group="Privacy",
        choices=("threefry2x32", "chacha20"),
    )
    num_colluding: int | None = _field(
        None,
        "Malicious workers that tell the server their secrets, q; under 'byzldp' only. With fewer than all "
        "the promise holds only while the others send nothing that follows from their secrets.",
        group="Privacy",
        check=_NOT_NEGATIVE,
        unset="by the threat model",
    )

    rounds: int = _field(30, "Training rounds, T.", group="Training", check=_AT_LEAST_ONE)
    batch_size: int = _field(50, "Examples per worker and round.", group="Training", check=_AT_LEAST_ONE)
    learning_rate: float = _field(0.075, "Learning rate of the server.", group="Training", check=_POSITIVE)
    learning_rate_schedule: str = _field(
        "constant",
        "The learning rate over the rounds; 'cosine' and 'linear' go down to 0.",
        group="Training",
        choices=SCHEDULES,
    )
    momentum: float = _field(
        0.85,
        "Momentum of the workers, beta.",
        group="Training",
        check=("at least 0 and less than 1", lambda value: 0 <= value < 1),
    )
    weight_decay: float = _field(1e-4, "l2 regularisation.", group="Training", check=_NOT_NEGATIVE)
    seed: int = _field(
        1,
        "Decides everything random: the same seed gives the same run.",
        group="Training",
        check=("from 0 to 4294967295", lambda value: 0 <= value < 2**32),
    )

    workdir: str = _field(
        "runs/{dataset}_{threat_model}_{aggregator}_{attack}_seed{seed}",
        "Folder for the results and checkpoints; the same command again resumes from it. A setting's name "
        "in braces stands for its value.",
        group="Running",
        result=False,
    )
    eval_every: int = _field(
        1, "Rounds from one evaluation on the test data to the next.", group="Running", check=_AT_LEAST_ONE
    )
    checkpoint_every: int = _field(
        5, "Rounds from one checkpoint to the next.", group="Running", check=_AT_LEAST_ONE, result=False
    )
    mesh_workers: int = _field(
        1,
        "Devices along the mesh's axis of workers: workers and their messages are spread over all devices of "
        "the mesh, and there are so many copies of the model.",
        group="Running",
        check=_AT_LEAST_ONE,
        result=False,
    )
    mesh_parameters: int = _field(
        1,
        "Devices along the mesh's axis of parameters: each copy of the model is cut into so many parts.",
        group="Running",
        check=_AT_LEAST_ONE,
        result=False,
    )
    tensorboard: str = _field(
        "off",
        "'on' also writes the metrics as TensorBoard event files, to the folder tensorboard in --workdir.",
        group="Running",
        choices=("off", "on"),
        result=False,
    )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field, getattr(self, field.name)))
        object.__setattr__(self, "workdir", self._expand(self.workdir))
        for name in ("workdir", "data_dir", "idx_dir"):
            object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))
        self.validate()

    @property
    def num_honest(self) -> int:
        """The workers that are not malicious, n - f."""
        return self.num_workers - self.num_byzantine

    @property
    def private(self) -> bool:
        """Whether the run has a privacy budget at all."""
        return self.threat_model != "none"

    def validate(self) -> None:
        """Checks what needs more than one field.

        Raises:
          UserError: if the fields do not go together; the sentence names them and says what is allowed.
        """
        n, f = self.num_workers, self.num_byzantine
        if 2 * f >= n:
            raise UserError(
                f"num_byzantine={f} is too many for num_workers={n}: the malicious workers must be fewer "
                f"than half, so at most {(n - 1) // 2}."
            )
        if self.attack != "none" and f == 0:
            raise UserError(
                f"attack={self.attack!r} has nobody to carry it out with num_byzantine=0: use attack='none', "
                "or at least one malicious worker."
            )
        strong = [
            name for name, make in attacks.BY_NAME.items() if "factor" in inspect.signature(make).parameters
        ]
        if self.attack_factor is not None and self.attack not in strong:
            raise UserError(
                f"attack_factor={self.attack_factor:g} has no meaning for attack={self.attack!r}: it "
                f"belongs to {', '.join(strong)}."
            )
        if self.num_colluding is not None and self.num_colluding > f:
            raise UserError(
                f"num_colluding={self.num_colluding} is too many for num_byzantine={f}: only malicious "
                f"workers collude, so at most {f}."
            )
        if self.num_colluding and self.threat_model != "byzldp":
            raise UserError(
                f"num_colluding={self.num_colluding} contradicts threat_model={self.threat_model!r}: "
                "colluding workers are the threat model 'byzldp', so 0 or unset."
            )
        if self.noise_multiplier is not None and self.threat_model not in ("ldp", "cdp"):
            raise UserError(
                f"noise_multiplier={self.noise_multiplier:g} has no meaning for "
                f"threat_model={self.threat_model!r}: it belongs to ldp and cdp."
            )
        if self.grid_bits is not None and self.precision != "grid":
            raise UserError(
                f"grid_bits={self.grid_bits} has no meaning for precision={self.precision!r}: it belongs to "
                "'grid'."
            )
        if self.precision == "grid":
            self._validate_grid()
        if self.sampling == "poisson" and self.privacy_level != "example":
            raise UserError(
                "sampling='poisson' belongs to privacy_level='example': at the user level sampling hides "
                "nothing."
            )
        if self.threat_model not in CORRELATED and self.secret_graph != "complete":
            raise UserError(
                f"secret_graph={self.secret_graph!r} has no meaning for threat_model={self.threat_model!r}, "
                f"which uses no secrets: it belongs to {' and '.join(CORRELATED)}."
            )
        if self.secret_graph != "complete":
            privacy.graphs.parse(self.secret_graph, n, self.seed)  # says what is wrong with it
        if self.noise_split != "equal" and self.threat_model != "byzldp":
            raise UserError(
                f"noise_split={self.noise_split!r} has no meaning for threat_model={self.threat_model!r}: "
                "only 'byzldp' has two kinds of noise to split."
            )
        if not self.workdir:
            raise UserError("workdir='' names no folder: give one for the results and checkpoints.")
        if not self.private:
            return

        if self.epsilon <= 0 and self.noise_multiplier is None:
            raise UserError(
                f"epsilon={self.epsilon:g} is no privacy budget: it must be greater than 0 "
                "(threat_model='none' trains without privacy)."
            )
        if self.clip_norm == 0:
            raise UserError(
                f"clip_norm=0 switches clipping off, and threat_model={self.threat_model!r} needs it: it "
                "must be greater than 0 (threat_model='none' trains without privacy)."
            )
        if self.threat_model == "secldp" and f == 0:
            raise UserError(
                "num_byzantine=0 is too few for threat_model='secldp': among honest workers alone the "
                "correlated noise cancels and leaves their sum bare, so at least 1."
            )
        if self.threat_model in CORRELATED and self.noise_mode == "independent":
            others = " or ".join(repr(mode) for mode in noise.MODES if mode != "independent")
            raise UserError(
                f"noise_mode='independent' draws no correlated noise, and threat_model={self.threat_model!r} "
                f"needs it: use {others}."
            )
        if self.privacy_level == "example" and self.accountant != "rdp":
            raise UserError(
                f"accountant={self.accountant!r} does not cover privacy_level='example': use 'rdp'."
            )

    def _validate_grid(self) -> None:
        wrong = {
            "threat_model": (self.threat_model, self.threat_model == "none", "one with noise"),
            "privacy_level": (self.privacy_level, self.privacy_level != "user", "'user'"),
            "accountant": (self.accountant, self.accountant == "exact", "'rdp' or 'paper'"),
            "noise_mode": (self.noise_mode, self.noise_mode == "projected", "'pairwise'"),
        }
        for name, (value, is_wrong, allowed) in wrong.items():
            if is_wrong:
                raise UserError(f"{name}={value!r} does not go with precision='grid': it must be {allowed}.")

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values that JSON holds exactly."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Config":
        """Makes a ``Config`` of what :meth:`to_dict` gave; a missing setting takes its default.

        Args:
          values: by field name, for example read from JSON.

        Returns:
          The validated settings.

        Raises:
          UserError: if a name or a value is not allowed.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise UserError(_unknown(str(name)))
        return cls(**values)

    def _expand(self, template: str) -> str:
        """Puts the values of the settings named in braces into a folder's name."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "workdir"]

        def value(match: re.Match[str]) -> str:
            if match[1] not in names:
                raise UserError(
                    f"workdir={template!r} names {match[0]}, which is not a setting: in braces stand "
                    "names of settings, such as {seed}."
                )
            return str(getattr(self, match[1])).replace("/", "_")

        return re.sub(r"\{(\w*)\}", value, template)


def differences(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that decide results and are not the same in both.

    Args:
      a: one experiment's settings.
      b: another's.

    Returns:
      ``{name: (value in a, value in b)}``. Settings that only say where and how to run (``workdir``,
      ``data_dir``, ``idx_dir``, ``checkpoint_every``, ``mesh_workers``, ``mesh_parameters``,
      ``tensorboard``) are left out: a resumed run may change them.
    """
    others = decisive(b)
    return {name: (value, others[name]) for name, value in decisive(a).items() if value != others[name]}


def decisive(settings: Config) -> dict[str, Any]:
    """The settings that decide the results, by name."""
    names = [field.name for field in dataclasses.fields(Config) if field.metadata["result"]]
    return {name: getattr(settings, name) for name in names}


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines one flag for each field of :class:`Config`, with the same name and default.

    Args:
      flag_values: where; the global flags of the program unless told.
    """
    for field in dataclasses.fields(Config):
        flags.DEFINE(
            _Parser(field),
            field.name,
            field.default,
            describe(field),
            flag_values=flag_values,
            serializer=flags.ArgumentSerializer(),
        )


def from_flags(flag_values: flags.FlagValues = flags.FLAGS) -> Config:
    """Makes a ``Config`` of parsed flags.

    Args:
      flag_values: flags that :func:`define_flags` defined and absl has parsed.

    Returns:
      The validated settings.

    Raises:
      UserError: if a value is not allowed.
    """
    return Config.from_dict(
        {field.name: flag_values[field.name].value for field in dataclasses.fields(Config)}
    )


def parse(name: str, text: str) -> Any:
    """Reads one setting's value from text, as its flag does.

    Args:
      name: of a field of :class:`Config`.
      text: its value.

    Returns:
      The value; whether it is allowed beside the others, ``Config`` decides.

    Raises:
      UserError: if there is no such setting, or the text is no value of its kind.

    Example:
        >>> parse("num_byzantine", "5")
        5
    """
    field = field_of(name)
    try:
        return _checked(field, _Parser(field).parse(text.strip()))
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"{name}={text!r} {error}.") from None


def field_of(name: str) -> dataclasses.Field:
    """The field of :class:`Config` with a name, or a UserError that proposes one."""
    for field in dataclasses.fields(Config):
        if field.name == name:
            return field
    raise UserError(_unknown(name))


def _unknown(name: str) -> str:
    names = [field.name for field in dataclasses.fields(Config)]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(names)}."
    return f"{name!r} is not a setting: {hint}"


def describe(field: dataclasses.Field) -> str:
    """A field's help together with what it allows, as ``--help`` shows it.

    Args:
      field: one of ``dataclasses.fields(Config)``.

    Returns:
      One paragraph.
    """
    parts = [field.metadata["help"]]
    if field.metadata["choices"]:
        parts.append(f"One of: {', '.join(field.metadata['choices'])}.")
    elif field.metadata["check"]:
        parts.append(f"Must be {field.metadata['check'][0]}.")
    return " ".join(parts)


_KINDS = {int: "a whole number", float: "a number", str: "text"}


def _kind(field: dataclasses.Field) -> type:
    """The type of a field's value, None aside."""
    hint = typing.get_type_hints(Config)[field.name]
    return next(kind for kind in (typing.get_args(hint) or (hint,)) if kind is not type(None))


def _checked(field: dataclasses.Field, value: Any) -> Any:
    """Returns a value as its field's own type, or raises a UserError that says what is allowed."""
    name, kind, metadata = field.name, _kind(field), field.metadata
    if value is None and metadata["unset"]:
        return None
    # A bool is an int to Python, and never what is meant here. NumPy's numbers are as good as Python's.
    accepted = {int: numbers.Integral, float: numbers.Real, str: str}[kind]
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise UserError(f"{name}={value!r} must be {_KINDS[kind]}.")
    value = kind(value)
    if kind is float and not math.isfinite(value):
        raise UserError(f"{name}={value} must be a finite number.")
    if metadata["choices"] and value not in metadata["choices"]:
        raise UserError(f"{name}={value!r} is not known: choose one of {', '.join(metadata['choices'])}.")
    if metadata["check"] and not metadata["check"][1](value):
        raise UserError(f"{name}={value} must be {metadata['check'][0]}.")
    return value


class _Parser(flags.ArgumentParser):
    """Reads a flag's text; whether the value is allowed, Config decides."""

    def __init__(self, field: dataclasses.Field):
        super().__init__()
        self._kind = _kind(field)
        self._unset = field.metadata["unset"]

    def parse(self, argument: Any) -> Any:
        if not isinstance(argument, str):
            return argument
        if self._unset and argument.strip().lower() == "none":
            return None
        try:
            return self._kind(argument)
        except ValueError:
            raise ValueError(f"must be {_KINDS[self._kind]}") from None

    def flag_type(self) -> str:
        return self._kind.__name__
