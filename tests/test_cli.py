"""The command line: order of flags, help, and errors as one sentence."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags

from cafcor_jax import cli, config
from cafcor_jax.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def flag_values():
    values = flags.FlagValues()
    flags.DEFINE_string("flagfile", "", "", flag_values=values)
    config.define_flags(values)
    return values


@pytest.fixture
def flagfile(tmp_path):
    path = tmp_path / "some.cfg"
    path.write_text("# A comment.\n\n--seed=7\n--rounds=9\n--workdir=runs/some\n")
    return str(path)


@pytest.mark.parametrize(
    "args",
    [
        ["--flagfile={}", "--seed=3"],
        ["--seed=3", "--flagfile={}"],
        ["--seed=3", "--flagfile", "{}"],
        ["--seed", "3", "-flagfile", "{}"],
        ["--momentum=0.5", "--flagfile={}", "--seed=4", "--seed=3", "--momentum=0.85"],
    ],
    ids=" ".join,
)
def test_command_line_wins_over_flagfile(args, flag_values, flagfile):
    cfg = cli.parse_flags(["train.py", *(arg.format(flagfile) for arg in args)], flag_values)
    assert cfg == config.Config(seed=3, rounds=9, workdir="runs/some")


def test_later_flagfile_wins(flag_values, flagfile, tmp_path):
    later = tmp_path / "later.cfg"
    later.write_text("--seed=8\n")
    cfg = cli.parse_flags(["train.py", f"--flagfile={flagfile}", f"--flagfile={later}"], flag_values)
    assert (cfg.seed, cfg.rounds) == (8, 9)


@pytest.mark.parametrize(
    "args, sentence",
    [
        (["--flagfile=no/such.cfg"], "The flagfile 'no/such.cfg' does not exist."),
        (["--flagfile"], "--flagfile names no file: write --flagfile=FILE."),
        (["--flagfile={tmp}"], "The flagfile '{tmp}' cannot be read: Is a directory."),
        (["--flagfile={tmp}/binary.cfg"], "The flagfile '{tmp}/binary.cfg' is not a text file."),
        (["--seeed=3"], "Unknown command line flag 'seeed'. Did you mean: seed ?"),
        (["--seed=three"], "flag --seed=three: must be a whole number."),
        (["--epsilon=lots"], "flag --epsilon=lots: must be a number."),
        (["--seed"], "Missing value for flag --seed."),
        (
            ["configs/mnist_byzldp.cfg"],
            "'configs/mnist_byzldp.cfg' is not a flag: flags are written --name=value.",
        ),
        (["--epsilon=0"], "epsilon=0 is no privacy budget: it must be greater than 0"),
    ],
    ids=str,
)
def test_error_sentences(args, sentence, flag_values, tmp_path):
    (tmp_path / "binary.cfg").write_bytes(b"\x80\xff\x00")
    with pytest.raises(UserError) as caught:
        cli.parse_flags(["train.py", *(arg.format(tmp=tmp_path) for arg in args)], flag_values)
    assert str(caught.value).startswith(sentence.format(tmp=tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("columns", [40, 80, 100, 300])
def test_help_shows_every_flag(columns, flag_values, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = cli.help_text("scripts/train.py", "Trains.\n\nExamples:\n  one\n", flag_values)
    assert text.startswith("Usage: python scripts/train.py [--flagfile=FILE] [--name=value ...]\n\nTrains.")
    joined = " ".join(text.split())
    for field in dataclasses.fields(config.Config):
        assert f"\n  --{field.name}=" in text
        assert config.describe(field) in joined
        assert field.metadata["help"].endswith(".")
    assert "--num_colluding=(by the threat model)" in text
    assert max(len(line) for line in text.splitlines()) <= min(max(columns, 80), 110)


def test_help_shows_the_scripts_own_flags(flag_values):
    flags.DEFINE_integer("repeats", 5, "How often to measure.", flag_values=flag_values)
    flag_values.register_key_flag_for_module("bench.py", flag_values["repeats"])
    text = cli.help_text("bench.py", None, flag_values)
    assert "Of this script:\n  --repeats=5" in text


def _raise(error):
    raise error


@pytest.mark.parametrize(
    "error, status, err",
    [
        (UserError("seed=10 is taken."), 2, "error: seed=10 is taken.\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt("interrupted after round 3"), 130, "interrupted after round 3\n"),
    ],
    ids=repr,
)
def test_what_the_user_can_put_right_is_one_line(error, status, err, capsys):
    assert cli.status(lambda: _raise(error)) == status
    assert capsys.readouterr().err == err


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("a bug"), SystemExit(5)], ids=repr)
def test_anything_else_passes(error):
    with pytest.raises(type(error)):
        cli.status(lambda: _raise(error))


SCRIPT = '''"""Prints the seed."""
from cafcor_jax import cli, config

def main(cfg: config.Config):
    print("seed", cfg.seed)
    return 5

cli.run(main, doc=__doc__)
'''


# A process costs seconds, so there is one for each way through cli.run; the rest is tested above.
@pytest.mark.parametrize(
    "args, status, out, err",
    [
        (["--seed=3", f"--flagfile={ROOT}/configs/mnist_byzldp.cfg"], 5, "seed 3\n", ""),
        (["--help", "--seed=x"], 0, "Prints the seed.", ""),
        (["--seeed=3"], 2, "", "error: Unknown command line flag 'seeed'."),
        (["--attack=nonesuch"], 2, "", "error: attack='nonesuch' is not known: choose one of "),
    ],
    ids=["success", "help", "unknown flag", "unknown choice"],
)
def test_process(args, status, out, err, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(script), *args],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
    )
    assert done.returncode == status
    assert out in done.stdout and bool(out) == bool(done.stdout)
    assert done.stderr.startswith(err) and done.stderr.count("\n") == (1 if err else 0)
    if "--help" in args:
        assert "--num_byzantine=10" in done.stdout and "--logtostderr" not in done.stdout
