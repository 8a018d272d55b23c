"""The one object that the noise and the accountant share."""

import dataclasses
import math
from typing import Any

from cafcor_jax.errors import UserError
from cafcor_jax.privacy import graphs, mechanism

THREAT_MODELS = ("none", "ldp", "cdp", "secldp", "byzldp")
ACCOUNTANTS = ("exact", "rdp", "paper")
LEVELS = ("user", "example")
SAMPLINGS = ("none", "without_replacement", "poisson")

# Poisson batches have a largest size, which is exceeded with this part of delta in a whole run at most. The
# accountant counts with the rest of delta.
TRUNCATED = 1e-6

_WORDS = {
    "none": "no privacy",
    "ldp": "LDP (the server and every other worker may conspire)",
    "cdp": "CDP (the server is trusted; the workers together add the noise it would)",
    "secldp": "SecLDP (curious server, no worker reveals its secrets)",
    "byzldp": "ByzLDP (curious server, to which Byzantine workers reveal their secrets)",
}

#: In words, how the epsilon of a plan on a secret graph was found.
HOW = {
    "exact": "exact for the worst colluders",
    "enumerated": "exact for the worst colluders (all sets were looked at)",
    "bound": "an upper bound",
}


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises `UserError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise UserError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


def check_accountant(accountant: str, level: str) -> None:
    """Raises `UserError` unless `accountant` exists at this privacy level."""
    check_choice("accountant", accountant, ACCOUNTANTS)
    if level == "example" and accountant != "rdp":
        raise UserError(
            f"accountant must be 'rdp' at the example level, got {accountant!r}: with sampled batches a "
            "round is a mixture of Gaussians, and 'exact' and 'paper' are formulas for one Gaussian."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Who may see what, for how many rounds, and the noise that protects against it.

    A plan checks itself: one whose epsilon would be infinite cannot be built (except under "none").

    Attributes:
      threat_model: One of `THREAT_MODELS`.
      level: What neighbouring data sets differ in: all data of one worker ("user") or one example of one
        worker ("example"). It decides what is clipped at `clip_norm`: the batch's mean gradient, or each
        example's gradient.
      num_workers: n.
      num_byzantine: f, with 2f < n.
      num_colluding: q <= f, the workers that reveal their secrets; 0 except under "byzldp".
      rounds: T.
      clip_norm: C.
      delta: Of (epsilon, delta)-DP.
      sigma_ind: Standard deviation of the independent noise in each worker's message.
      sigma_cor: Standard deviation of the noise shared by each pair of workers.
      accountant: One of `ACCOUNTANTS`, the one that epsilon was calibrated with.
      epsilon: The budget; infinite if none was set.
      batch_size: b, needed at the example level.
      samples_per_worker: m, needed at the example level (of the smallest worker, if they differ).
      sampling: How batches are drawn, as far as the accountant profits from it. "none" at the user level;
        "without_replacement" (neighbours replace an example) or "poisson" (they add or remove one, and b is
        the expected size) at the example level.
      graph: Who shares a secret with whom; None for everyone with everyone.

    Example:
      >>> plan = PrivacyPlan(threat_model="ldp", num_workers=10, num_byzantine=2, rounds=5, clip_norm=1.0,
      ...                    delta=1e-5, sigma_ind=4.0, sigma_cor=0.0)
      >>> plan.sensitivity, plan.step_divergence
      (2.0, 0.125)
      >>> PrivacyPlan.from_dict(plan.to_dict()) == plan
      True
    """

    threat_model: str
    level: str = "user"
    num_workers: int
    num_byzantine: int
    num_colluding: int = 0
    rounds: int
    clip_norm: float
    delta: float
    sigma_ind: float
    sigma_cor: float
    accountant: str = "rdp"
    epsilon: float = math.inf
    batch_size: int | None = None
    samples_per_worker: int | None = None
    sampling: str = "none"
    graph: graphs.SecretGraph | None = None

    def __post_init__(self) -> None:
        check_choice("threat_model", self.threat_model, THREAT_MODELS)
        check_choice("level", self.level, LEVELS)
        check_choice("sampling", self.sampling, SAMPLINGS)
        check_accountant(self.accountant, self.level)
        mechanism.check_workers(self.num_workers, self.num_byzantine, self.num_colluding)
        mechanism.check_int("rounds", self.rounds, 1)
        if not self.epsilon > 0:  # also catches nan
            raise UserError(
                f"epsilon must be positive, got {self.epsilon!r}: only infinite noise gives epsilon 0."
            )
        if not 0 < self.delta < 1:
            raise UserError(
                f"delta must be strictly between 0 and 1, got {self.delta!r}: Gaussian noise has no "
                "finite epsilon at delta = 0, and delta = 1 promises nothing."
            )
        if not self.clip_norm > 0 or (math.isinf(self.clip_norm) and self.threat_model != "none"):
            raise UserError(
                f"clip_norm must be finite and positive, got {self.clip_norm!r}: without clipping one "
                "worker can move a message without bound and epsilon is infinite."
            )
        self._check_sampling()
        self._check_threat_model()

    def _check_sampling(self) -> None:
        for name, size in (("batch_size", self.batch_size), ("samples_per_worker", self.samples_per_worker)):
            if size is not None:
                mechanism.check_int(name, size, 1)
            elif self.level == "example":
                raise UserError(f"{name} must be given at the example level: the sensitivity needs it.")
        if self.batch_size and self.samples_per_worker and self.batch_size > self.samples_per_worker:
            raise UserError(
                f"batch_size must be at most samples_per_worker={self.samples_per_worker}, got "
                f"{self.batch_size}: no batch is larger than the worker's data."
            )
        # At the user level all examples of a worker may change at once, so sampling them hides nothing.
        allowed = SAMPLINGS[1:] if self.level == "example" else SAMPLINGS[:1]
        if self.sampling not in allowed:
            raise UserError(
                f"sampling must be {' or '.join(map(repr, allowed))} at the {self.level} level, got "
                f"{self.sampling!r}."
            )

    def _check_threat_model(self) -> None:
        if self.threat_model == "none":
            if self.sigma_ind != 0 or self.sigma_cor != 0 or not math.isinf(self.epsilon):
                raise UserError(
                    "threat_model 'none' has sigma_ind = sigma_cor = 0 and an infinite epsilon, got "
                    f"sigma_ind={self.sigma_ind}, sigma_cor={self.sigma_cor}, epsilon={self.epsilon}."
                )
            return
        if self.num_colluding and self.threat_model != "byzldp":
            raise UserError(
                f"num_colluding must be 0 under {self.threat_model!r}, got {self.num_colluding}: "
                "colluding Byzantine workers are the threat model 'byzldp'."
            )
        if self.threat_model in ("ldp", "cdp"):
            if self.sigma_cor != 0:
                raise UserError(
                    f"sigma_cor must be 0 under {self.threat_model!r}, got {self.sigma_cor}: no secrets."
                )
            if not (math.isfinite(self.sigma_ind) and self.sigma_ind > 0):
                raise UserError(
                    f"sigma_ind must be finite and positive under {self.threat_model!r}, got "
                    f"{self.sigma_ind!r}: without noise epsilon is infinite."
                )
            return
        if self.threat_model == "secldp" and self.num_byzantine == 0:
            raise UserError(
                "num_byzantine must be at least 1 under 'secldp', got 0: without a worker outside the honest "
                "set all correlated noise cancels in the sum of the messages, and epsilon is infinite. Use "
                "'byzldp' or 'ldp'."
            )
        mechanism.check_noise(self.sigma_ind, self.sigma_cor, self.num_byzantine, self.num_colluding)
        if self.graph is not None:
            if self.graph.num_workers != self.num_workers:
                raise UserError(
                    f"graph must be over num_workers={self.num_workers} workers, got one over "
                    f"{self.graph.num_workers}."
                )
            if math.isinf(self.worst_case.step_divergence):
                raise UserError(
                    f"sigma_ind is 0, and on this {self.graph.describe()} num_colluding={self.num_colluding} "
                    "colluders may cut honest workers off from the others and from the silent Byzantine ones "
                    "(or it cannot be excluded): their noise then cancels in their sum, and epsilon is "
                    "infinite. Use sigma_ind > 0, more secrets a worker, or fewer colluders."
                )

    @property
    def sensitivity(self) -> float:
        """How far one neighbouring change moves a worker's clipped gradient.

        2C at the user level. At the example level 2C/b where an example is replaced, C/b where it is added or
        removed (Poisson sampling).
        """
        if self.level == "user":
            return 2 * self.clip_norm
        return (1 if self.sampling == "poisson" else 2) * self.clip_norm / (self.batch_size or 1)

    @property
    def largest_batch(self) -> int | None:
        """The most examples a batch can have: b, or with Poisson sampling what is exceeded next to never.

        A worker with m examples draws Binomial(m, b/m) of them. Above its mean, that has a lighter tail than
        Poisson(b), whatever m is (Anderson and Samuels 1967), so one bound serves workers of all sizes. One
        more place is for the example in which neighbours differ: with room for the others it is not dropped.
        """
        if self.sampling != "poisson" or self.batch_size is None:
            return self.batch_size
        from scipy import special  # takes long to import

        chance = TRUNCATED * self.delta / self.rounds
        size = self.batch_size + 1
        while special.gammainc(size + 1, self.batch_size) > chance:  # P(Poisson(b) > size)
            size += 1
        return size + 1

    @property
    def worst_case(self) -> graphs.WorstCase:
        """eps_step of the correlated mechanism on the secret graph, and whether that is exact."""
        if self.graph is not None:
            return graphs.worst_case(
                self.graph,
                sigma_ind=self.sigma_ind,
                sigma_cor=self.sigma_cor,
                num_byzantine=self.num_byzantine,
                num_colluding=self.num_colluding,
                clip_norm=self.sensitivity / 2,
            )
        return graphs.WorstCase(
            mechanism.step_divergence(
                sigma_ind=self.sigma_ind,
                sigma_cor=self.sigma_cor,
                num_workers=self.num_workers,
                num_byzantine=self.num_byzantine,
                num_colluding=self.num_colluding,
                clip_norm=self.sensitivity / 2,
            ),
            "exact",
        )

    @property
    def sampling_rate(self) -> float:
        """Chance that a round uses a given example, as far as the accountant profits from it."""
        if self.level == "user" or self.batch_size is None or self.samples_per_worker is None:
            return 1.0
        return self.batch_size / self.samples_per_worker

    @property
    def step_divergence(self) -> float:
        """eps_step of one round in which the changed data is used; infinite without privacy."""
        if self.threat_model == "none":
            return math.inf
        if self.threat_model == "cdp":
            # The server shows only the mean of n messages: sensitivity/n against sigma_ind/sqrt(n).
            return (self.sensitivity / self.sigma_ind) ** 2 / (2 * self.num_workers)
        return self.worst_case.step_divergence

    @property
    def honest_mean_std(self) -> float:
        """Noise, per coordinate, left in the mean of the honest messages."""
        return self.mean_std_without(0)

    def mean_std_without(self, num_vanished: int) -> float:
        """Noise, per coordinate, left in the mean of the honest messages that arrive.

        What an honest worker shares with one that has vanished, or is Byzantine, does not cancel. Privacy
        does not suffer: the server sees a part of what it would have seen, with noise of the same law. (Under
        "cdp" it does: who vanishes takes a part of the mean's noise away, and eps_step grows by n / (n - v).)

        Args:
          num_vanished: Honest workers whose messages do not come.
        """
        mechanism.check_int("num_vanished", num_vanished, 0)
        left = self.num_workers - self.num_byzantine - num_vanished
        if left < 1:
            raise UserError(
                f"num_vanished must be less than the {left + num_vanished} honest workers, got "
                f"{num_vanished}."
            )
        outside = self.num_byzantine + num_vanished
        # Exact for the complete graph; at most that many on another.
        most = self.num_workers - 1 if self.graph is None else int(self.graph.degrees.max())
        uncancelled = outside * min(most, left) / left
        return math.sqrt((uncancelled * self.sigma_cor**2 + self.sigma_ind**2) / left)

    @property
    def message_std(self) -> float:
        """Noise, per coordinate, in one message (of the worker with the most secrets)."""
        secrets = self.num_workers - 1 if self.graph is None else int(self.graph.degrees.max())
        return math.sqrt(secrets * self.sigma_cor**2 + self.sigma_ind**2)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON; an infinite float, which JSON lacks, becomes "inf"."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "graph":
                value = value and value.to_dict()
            elif field.type is float:
                value = float(value) if math.isfinite(value) else "inf"
            elif field.type is not str and value is not None:
                value = int(value)  # also from NumPy
            out[field.name] = value
        return out

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PrivacyPlan":
        """The plan that `to_dict` wrote; it is checked again."""
        fields = {field.name: field.type for field in dataclasses.fields(cls)}
        unknown, missing = sorted(set(values) - set(fields)), sorted(set(fields) - set(values))
        if unknown or missing:
            raise UserError(f"a stored privacy plan has unknown fields {unknown} and lacks {missing}.")
        plain: dict[str, Any] = {k: float(v) if fields[k] is float else v for k, v in values.items()}
        graph = values["graph"] and graphs.SecretGraph.from_dict(values["graph"])
        return cls(**plain | {"graph": graph})

    def describe(self) -> str:
        """The plan in a few lines for a person."""
        lines = [f"privacy: {_WORDS[self.threat_model]}"]
        workers = f"{self.num_workers} workers, {self.num_byzantine} Byzantine"
        if self.threat_model == "none":
            return f"{lines[0]}; {workers}, {self.rounds} rounds"
        if self.threat_model == "byzldp":
            workers += f", {self.num_colluding} colluding"
        lines.append(f"  {workers}; {self.rounds} rounds, clipped at {self.clip_norm:g}")
        if self.level == "user":
            lines.append("  protects all data of a worker (user level)")
        else:
            lines.append(
                f"  protects one example of a worker (example level), batches of {self.batch_size} "
                f"of {self.samples_per_worker} "
                + ("on average (Poisson)" if self.sampling == "poisson" else "without replacement")
            )
        if self.graph is not None:
            lines.append(f"  secrets: {self.graph.describe()}; epsilon is {HOW[self.worst_case.how]}")
        budget = "no budget set" if math.isinf(self.epsilon) else f"budget epsilon = {self.epsilon:g}"
        lines.append(f"  {budget} at delta = {self.delta:g}, accountant {self.accountant}")
        lines.append(
            f"  noise: sigma_ind = {self.sigma_ind:.6g}, sigma_cor = {self.sigma_cor:.6g}; "
            f"left in the honest mean: {'' if self.graph is None else 'at most '}{self.honest_mean_std:.6g}"
        )
        return "\n".join(lines)
