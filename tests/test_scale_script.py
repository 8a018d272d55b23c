"""`scripts/scale.py`, called in this process, on messages so small that only compiling takes time."""

import importlib
import json

import pytest

from cafcor_jax import cli
from tests.compiling import compiled_quickly  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(scope="module")
def scale():
    return importlib.import_module("scripts.scale")


def test_cost_model_finds_the_coefficients_that_made_the_times(scale):
    true = {"Gram matrix": {"n d": 3e-9, "n^2 d": 2e-10}, "noise of k pairs": {"n k d": 1e-9}}
    rows = [
        scale.Timed(part, n, d, scale.predict(true, n, d, 8)[part])
        for part in true
        for n in (10, 100)
        for d in (10**5, 10**6)
    ]
    model = scale.fit(rows, 8)
    for part, terms in true.items():
        assert model[part] == pytest.approx(terms)
    assert max(scale.worst_error(model, rows, 8).values()) == pytest.approx(1)
    halved = [row if row.n < 50 else scale.Timed(row.part, row.n, row.d, row.seconds / 2) for row in rows]
    assert max(scale.worst_error(scale.fit(halved, 8), halved, 8).values()) > 1.2


def test_devices_share_what_grows_with_d(scale):
    model = {"CAF's weights": {"n^3": 1e-9}, "mixing": {"n d": 1e-9}}
    one, many = (scale.predict(model, 100, 1e6, 8, devices) for devices in (1, 4))
    assert many["mixing"] == one["mixing"] / 4
    assert many["CAF's weights"] == one["CAF's weights"]


def test_everything_is_printed_and_stored(scale, capsys, tmp_path):
    path = tmp_path / "scale.json"
    flags = ("--n=10", "--dims=2e3", "--repeats=1", "--secrets_each=4", f"--json={path}")
    assert cli.status(lambda: scale.main(["scale.py", *flags])) == 0
    out = capsys.readouterr().out
    for words in (*scale.PARTS, "a round is 8 kB up and 8 kB down", "on 8 x 8 devices"):
        assert words in out
    stored = json.loads(path.read_text())
    assert {row["part"] for row in stored["rows"]} == set(scale.PARTS) == set(stored["model"])


@pytest.mark.parametrize(
    "flag, words",
    [("--n=3", "--n=3: it must be whole numbers of at least 7"), ("--max_gigabytes=0", "leaves no n and d")],
)
def test_bad_flag_gets_its_sentence(scale, capsys, flag, words):
    assert cli.status(lambda: scale.main(["scale.py", flag])) == 2
    assert words in capsys.readouterr().err
