"""Meshes: eight devices in one process, and two processes that compute one run; started from here."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cafcor_jax import hosts, sharding
from cafcor_jax.errors import UserError
from cafcor_jax.workdir import read_metrics

ROOT = Path(__file__).parent.parent


def start(*arguments, devices):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_cpu_use_fusion_emitters=false",
    }
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process, timeout=600):
    out, _ = process.communicate(timeout=timeout)
    return process.returncode, out


def test_on_eight_devices():
    code, out = finish(
        start("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/mesh_checks.py", devices=8)
    )
    assert code == 0, out


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def test_two_processes_compute_what_one_computes(tmp_path):
    script, port = ROOT / "tests/one_of_two_processes.py", free_port()

    def begin(count, devices, folder):
        return [
            start(script, i, count, port, devices, tmp_path / folder, devices=devices) for i in range(count)
        ]

    for count, devices, folder in ((2, 2, "two"), (1, 1, "one")):
        for code, out in map(finish, begin(count, devices, folder)):
            assert code == 0, out
    one, two = (read_metrics(tmp_path / folder / "metrics.csv") for folder in ("one", "two"))
    for name in one.keys() - {"seconds"}:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-6, err_msg=name)
    # Only one of them wrote: a second row of a round would have been noticed above, and here is all the rest.
    assert {path.name for path in (tmp_path / "two").iterdir()} == {
        path.name for path in (tmp_path / "one").iterdir()
    }


def test_no_process_trains_in_a_folder_that_the_first_cannot_use(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    script, port = ROOT / "tests/one_of_two_processes.py", free_port()
    outcomes = [start(script, i, 2, port, 1, tmp_path, devices=1) for i in range(2)]
    for (code, out), words in zip(
        map(finish, outcomes), ("holds other files", "process 0 says why"), strict=True
    ):
        assert code != 0
        assert words in out


@pytest.mark.parametrize(
    "values, words",
    [
        (("here", 2, 0), "coordinator='here' must be host:port"),
        (("here:99999", 2, 0), "coordinator='here:99999' must be host:port"),
        (("here:80", 0, 0), "num_processes=0 must be at least 1"),
        (("here:80", 2, 2), "process_id=2 must be from 0 to 1, for num_processes=2"),
    ],
)
def test_bad_address_gets_its_sentence(values, words):
    with pytest.raises(UserError, match=words):
        hosts.join(*values)


def test_mesh_is_not_larger_than_the_devices():
    with pytest.raises(UserError, match=r"mesh_workers=64 times mesh_parameters=2 is a mesh of 128 devices"):
        sharding.make_mesh(64, 2)
