"""Config: defaults, every bad value with its sentence, JSON, differences, and flags."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from absl import flags

from cafcor_jax import cli, config
from cafcor_jax.config import Config
from cafcor_jax.errors import UserError

FIELDS = {field.name: field for field in dataclasses.fields(Config)}
CONFIGS = sorted((pathlib.Path(__file__).parent.parent / "configs").glob("*.cfg"))

# Tools rely on these names.
FLAG_NAMES = """dataset num_workers num_byzantine threat_model privacy_level epsilon delta rounds batch_size
    learning_rate momentum clip_norm weight_decay aggregator attack partition alpha noise_mode seed workdir
    eval_every""".split()


def parse(*args: str) -> Config:
    flag_values = flags.FlagValues()
    flags.DEFINE_string("flagfile", "", "", flag_values=flag_values)
    config.define_flags(flag_values)
    return cli.parse_flags(["train.py", *args], flag_values)


def test_defaults_are_the_papers_mnist():
    cfg = Config()
    assert (cfg.dataset, cfg.num_workers, cfg.num_byzantine, cfg.num_honest) == ("mnist", 100, 10, 90)
    assert (cfg.threat_model, cfg.epsilon, cfg.delta, cfg.rounds) == ("byzldp", 26.4, 1e-4, 30)
    assert (cfg.batch_size, cfg.learning_rate, cfg.momentum, cfg.clip_norm) == (50, 0.075, 0.85, 2.25)
    assert (cfg.aggregator, cfg.attack, cfg.weight_decay) == ("caf", "alie", 1e-4)


def test_fixed_flag_names():
    assert set(FLAG_NAMES) <= set(FIELDS)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 2  # type: ignore[misc]


# Values, and words the sentence must hold: the name, the value and what is allowed.
BAD = [
    ({"dataset": "imagenet"}, ["dataset='imagenet'", "mnist", "synthetic"]),
    ({"partition": "x"}, ["partition='x'", "homogeneous", "dirichlet", "extreme"]),
    ({"alpha": 0.0}, ["alpha=0.0", "greater than 0"]),
    ({"num_workers": 0}, ["num_workers=0", "at least 1"]),
    ({"num_byzantine": -1}, ["num_byzantine=-1", "0 or greater"]),
    ({"num_byzantine": 50}, ["num_byzantine=50", "num_workers=100", "at most 49"]),
    ({"num_workers": 5, "num_byzantine": 3}, ["num_byzantine=3", "num_workers=5", "at most 2"]),
    ({"attack": "x"}, ["attack='x'", "none", "alie"]),
    ({"num_byzantine": 0}, ["attack='alie'", "num_byzantine=0", "attack='none'"]),
    ({"attack_factor": float("nan")}, ["attack_factor=nan", "finite"]),
    ({"attack_factor": 2.0, "attack": "sign_flip"}, ["attack_factor=2", "attack='sign_flip'", "alie"]),
    ({"aggregator": "x"}, ["aggregator='x'", "mean", "caf"]),
    ({"pre_aggregator": "x"}, ["pre_aggregator='x'", "none", "nnm", "arc"]),
    ({"threat_model": "x"}, ["threat_model='x'", "none", "ldp", "cdp", "secldp", "byzldp"]),
    ({"privacy_level": "x"}, ["privacy_level='x'", "user", "example"]),
    ({"epsilon": 0.0}, ["epsilon=0", "greater than 0"]),
    ({"epsilon": -1.0}, ["epsilon=-1", "greater than 0"]),
    ({"delta": 0.0}, ["delta=0.0", "between 0 and 1"]),
    ({"delta": 1.0}, ["delta=1.0", "between 0 and 1"]),
    ({"false_alarm": 0.0}, ["false_alarm=0.0", "between 0 and 1"]),
    ({"accountant": "x"}, ["accountant='x'", "exact", "rdp", "paper"]),
    ({"accountant": "exact", "privacy_level": "example"}, ["accountant='exact'", "'example'", "'rdp'"]),
    ({"clip_norm": 0.0}, ["clip_norm=0", "threat_model='byzldp'", "greater than 0"]),
    ({"clip_norm": -1.0, "threat_model": "none"}, ["clip_norm=-1.0", "0 or greater"]),
    ({"noise_mode": "x"}, ["noise_mode='x'", "pairwise", "projected"]),
    ({"noise_mode": "independent"}, ["noise_mode='independent'", "threat_model='byzldp'", "'pairwise'"]),
    ({"noise_mode": "independent", "threat_model": "secldp"}, ["noise_mode='independent'", "'secldp'"]),
    (
        {"threat_model": "secldp", "num_byzantine": 0, "attack": "none"},
        ["num_byzantine=0", "'secldp'", "at least 1"],
    ),
    ({"num_colluding": -1}, ["num_colluding=-1", "0 or greater"]),
    ({"num_colluding": 11}, ["num_colluding=11", "num_byzantine=10", "at most 10"]),
    (
        {"num_colluding": 3, "threat_model": "secldp"},
        ["num_colluding=3", "threat_model='secldp'", "'byzldp'"],
    ),
    ({"rounds": 0}, ["rounds=0", "at least 1"]),
    ({"batch_size": 0}, ["batch_size=0", "at least 1"]),
    ({"learning_rate": 0.0}, ["learning_rate=0.0", "greater than 0"]),
    ({"learning_rate_schedule": "x"}, ["learning_rate_schedule='x'", "constant", "cosine", "linear"]),
    ({"momentum": 1.0}, ["momentum=1.0", "at least 0 and less than 1"]),
    ({"momentum": -0.1}, ["momentum=-0.1", "at least 0 and less than 1"]),
    ({"weight_decay": -1e-4}, ["weight_decay=-0.0001", "0 or greater"]),
    ({"seed": -1}, ["seed=-1", "from 0"]),
    ({"seed": 2**32}, ["seed=4294967296", "to 4294967295"]),
    ({"sampling": "shuffle"}, ["sampling='shuffle'", "without_replacement, poisson"]),
    ({"sampling": "poisson"}, ["sampling='poisson'", "privacy_level='example'"]),
    ({"noise_split": "fair"}, ["noise_split='fair'", "equal, mean_noise, robust"]),
    ({"noise_split": "robust", "threat_model": "ldp"}, ["noise_split='robust'", "'byzldp'"]),
    ({"secret_graph": "star"}, ["secret_graph='star'", "complete, ring, regular:DEGREE"]),
    ({"secret_graph": "regular:100"}, ["degree 100 over 100 workers", "at most 99"]),
    ({"secret_graph": "ring", "threat_model": "cdp"}, ["secret_graph='ring'", "secldp and byzldp"]),
    ({"precision": "float16"}, ["precision='float16'", "float32, grid"]),
    ({"precision": "grid", "accountant": "exact"}, ["accountant='exact'", "precision='grid'", "'rdp'"]),
    ({"precision": "grid", "privacy_level": "example"}, ["privacy_level='example'", "'user'"]),
    ({"precision": "grid", "threat_model": "none"}, ["threat_model='none'", "one with noise"]),
    ({"precision": "grid", "noise_mode": "projected"}, ["noise_mode='projected'", "'pairwise'"]),
    ({"grid_bits": 12}, ["grid_bits=12", "precision='float32'"]),
    ({"grid_bits": 99, "precision": "grid"}, ["grid_bits=99", "from -60 to 60"]),
    ({"secret_graph": "nonsense", "threat_model": "none"}, ["secret_graph='nonsense'"]),
    ({"noise_split": "robust", "threat_model": "none"}, ["noise_split='robust'"]),
    ({"generator": "dice"}, ["generator='dice'", "threefry2x32, chacha20"]),
    ({"workdir": ""}, ["workdir=''"]),
    ({"workdir": "runs/{sed}"}, ["workdir='runs/{sed}'", "{sed}"]),
    ({"eval_every": 0}, ["eval_every=0", "at least 1"]),
    ({"checkpoint_every": 0}, ["checkpoint_every=0", "at least 1"]),
    ({"mesh_workers": 0}, ["mesh_workers=0", "at least 1"]),
    ({"mesh_parameters": 0}, ["mesh_parameters=0", "at least 1"]),
    ({"noise_multiplier": 0.0}, ["noise_multiplier=0", "greater than 0"]),
    ({"noise_multiplier": 1.0}, ["noise_multiplier=1", "'byzldp'", "belongs to ldp and cdp"]),
    ({"tensorboard": "yes"}, ["tensorboard='yes'", "one of off, on"]),
    ({"data_dir": 3}, ["data_dir=3", "text"]),
    ({"idx_dir": None}, ["idx_dir=None", "text"]),
    ({"rounds": 3.5}, ["rounds=3.5", "a whole number"]),
    ({"rounds": True}, ["rounds=True", "a whole number"]),
    ({"seed": None}, ["seed=None", "a whole number"]),
    ({"epsilon": "1"}, ["epsilon='1'", "a number"]),
]


@pytest.mark.parametrize("values, words", BAD, ids=lambda x: str(x)[:60])
def test_bad_value_gets_its_sentence(values, words):
    with pytest.raises(UserError) as caught:
        Config(**values)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    for word in words:
        assert word in message


def test_every_field_is_tried_with_a_bad_value():
    assert {name for values, _ in BAD for name in values} == set(FIELDS)


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if config._kind(field) is float])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("threat_model", ["byzldp", "none"])
def test_not_finite_is_refused(name, value, threat_model):
    with pytest.raises(UserError, match=f"{name}=.*finite"):
        Config(**{"threat_model": threat_model, name: value})


@pytest.mark.parametrize(
    "values",
    [
        {"num_workers": 1, "num_byzantine": 0, "attack": "none"},
        {"num_workers": 21, "num_byzantine": 10},
        {"threat_model": "none", "epsilon": 0.0, "clip_norm": 0.0},
        {"threat_model": "none", "noise_mode": "independent"},
        {"threat_model": "ldp", "noise_mode": "independent"},
        {"threat_model": "cdp", "noise_mode": "independent"},
        {"threat_model": "none", "privacy_level": "example", "accountant": "exact"},
        {"privacy_level": "example", "accountant": "rdp"},
        {"attack": "none"},
        {"privacy_level": "example", "sampling": "poisson"},
        {"noise_split": "mean_noise", "secret_graph": "regular:8"},
        {"precision": "grid", "grid_bits": 12, "generator": "chacha20"},
        {"num_colluding": 0},
        {"num_colluding": 10},
        {"attack_factor": -2.0},
        {"momentum": 0.0, "weight_decay": 0.0, "seed": 0},
        {"seed": 2**32 - 1},
    ],
    ids=str,
)
def test_allowed(values):
    cfg = Config(**values)
    for name, value in values.items():
        assert getattr(cfg, name) == value


def test_numbers_become_python_numbers():
    cfg = Config(epsilon=26, rounds=np.int64(3), learning_rate=np.float32(0.5))
    assert [type(x) for x in (cfg.epsilon, cfg.rounds, cfg.learning_rate)] == [float, int, float]
    json.dumps(cfg.to_dict())


def test_workdir_takes_values_of_settings():
    assert Config().workdir == "runs/mnist_byzldp_caf_alie_seed1"
    assert Config(workdir="out/{attack}_{epsilon}_{seed}", seed=4).workdir == "out/alie_26.4_4"
    assert Config(workdir="out/plain").workdir == "out/plain"


def test_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    cfg = Config(workdir="~/runs/a", data_dir="~/data")
    assert (cfg.workdir, cfg.data_dir, cfg.idx_dir) == ("/home/someone/runs/a", "/home/someone/data", "")


def test_json_round_trip():
    for cfg in (
        Config(),
        Config(epsilon=0.1 + 0.2, num_colluding=3, attack_factor=1.25, delta=1e-7, workdir="runs/x y"),
    ):
        assert Config.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg


def test_from_dict_names_an_unknown_setting():
    with pytest.raises(UserError, match="'num_worker' is not a setting: did you mean num_workers"):
        Config.from_dict({"num_worker": 3})
    with pytest.raises(UserError, match="'zzz' is not a setting: the settings are dataset"):
        Config.from_dict({"zzz": 3})


def test_differences_are_those_that_decide_results():
    a = Config()
    b = Config(
        seed=2,
        rounds=10,
        eval_every=2,
        workdir="x",
        data_dir="y",
        idx_dir="z",
        checkpoint_every=7,
        tensorboard="on",
        epsilon=26.4,
    )
    assert config.differences(a, a) == {}
    assert config.differences(a, b) == {"seed": (1, 2), "rounds": (30, 10), "eval_every": (1, 2)}
    assert {name for name, field in FIELDS.items() if not field.metadata["result"]} == {
        "workdir",
        "data_dir",
        "idx_dir",
        "checkpoint_every",
        "mesh_workers",
        "mesh_parameters",
        "tensorboard",
    }


def test_flags_default_to_the_config():
    assert parse() == Config()


@pytest.mark.parametrize("name", FIELDS)
def test_every_flag_reaches_its_field(name):
    others = {
        "dataset": "synthetic",
        "partition": "extreme",
        "attack": "sign_flip",
        "aggregator": "mean",
        "pre_aggregator": "nnm",
        "threat_model": "ldp",
        "privacy_level": "example",
        "accountant": "exact",
        "noise_mode": "projected",
        "learning_rate_schedule": "cosine",
        "momentum": "0.5",
        "delta": "1e-5",
        "false_alarm": "0.01",
        "num_byzantine": "7",
        "num_colluding": "3",
        "workdir": "elsewhere",
        "data_dir": "d",
        "idx_dir": "i",
        "sampling": "poisson",
        "noise_split": "robust",
        "secret_graph": "ring",
        "precision": "grid",
        "grid_bits": "12",
        "generator": "chacha20",
        "tensorboard": "on",
        "noise_multiplier": "0.5",
    }
    text = others.get(name, "42")
    needed = {
        "sampling": {"privacy_level": "example"},
        "grid_bits": {"precision": "grid"},
        "noise_multiplier": {"threat_model": "cdp"},
    }.get(name, {})
    cfg = parse(f"--{name}={text}", *(f"--{other}={value}" for other, value in needed.items()))
    assert getattr(cfg, name) == config._kind(FIELDS[name])(text) != getattr(Config(), name)
    assert set(config.differences(cfg, Config())) <= {name, *needed}


def test_optional_flags_can_be_unset():
    cfg = parse("--num_colluding=3", "--attack_factor=2", "--num_colluding=none", "--attack_factor=None")
    assert cfg.num_colluding is None and cfg.attack_factor is None


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_file(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith(("# Figure ", "# Table ", "# No figure: "))
    assert all(not line or line.startswith(("#", "--")) for line in lines)
    cfg = parse(f"--flagfile={path}")
    assert cfg.workdir == f"runs/{path.stem}_seed{cfg.seed}"
    if path.stem.split("_")[-1] in FIELDS["threat_model"].metadata["choices"]:
        assert cfg.threat_model == path.stem.split("_")[-1]


def test_config_files_are_all_there():
    names = {
        f"{data}_{model}" for data in ("mnist", "fashion") for model in ("ldp", "cdp", "secldp", "byzldp")
    }
    assert names | {"mnist_dsgd", "quickstart"} <= {path.stem for path in CONFIGS}


def test_figure_1_settings():
    files = {path.stem: parse(f"--flagfile={path}") for path in CONFIGS}
    for model in ("ldp", "cdp", "secldp", "byzldp"):
        mnist = Config(threat_model=model)
        fashion = Config(
            threat_model=model,
            dataset="fashion_mnist",
            epsilon=39.6,
            batch_size=100,
            learning_rate=0.3,
            momentum=0.9,
            clip_norm=1.0,
        )
        assert config.differences(files[f"mnist_{model}"], mnist) == {}
        assert config.differences(files[f"fashion_{model}"], fashion) == {}
