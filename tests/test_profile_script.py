import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "profile_round.py"


@pytest.mark.slow
def test_every_part_is_timed(tmp_path):
    flags = "--dataset=synthetic --num_workers=4 --num_byzantine=1 --batch_size=4 --repeats=1".split()
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1]), "CAFCOR_JAX_DATA": str(tmp_path)}
    environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}
    done = subprocess.run(
        [sys.executable, SCRIPT, *flags], capture_output=True, text=True, check=True, env=environment
    )
    # A part is a line like "  noise, pairwise        8.262 s   76.6%".
    lines = [line.strip() for line in done.stdout.splitlines() if line.startswith("  ")]
    parts = ("gradients", "noise, independent", "noise, pairwise", "momentum", "attack", "aggregation")
    for part in (*parts, "a whole round", "evaluation"):
        line = next(line for line in lines if line.startswith(f"{part} "))
        assert float(line.removeprefix(part).split()[0]) > 0
