"""Every notebook runs in a new kernel, and what is saved of it is whole, short and of no machine."""

import base64
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image

from cafcor_jax import aggregators, attacks, cli
from cafcor_jax.errors import UserError

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BADGE = "https://colab.research.google.com/github/cafcor_jax/cafcor_jax/blob/main/notebooks/{}.ipynb"
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("notebooks_script", ROOT / "scripts/notebooks.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def printed(notebook):
    return "".join(output.text for output in outputs(notebook) if output.output_type == "stream")


def num_pictures(cell_outputs):
    return sum("image/png" in output.get("data", {}) for output in cell_outputs)


def check_quickstart(text):
    assert re.search(r"^caf .*\n +(0\.10 ){10}0\.00 0\.00 0\.00$", text, re.MULTILINE)
    assert re.search(r"^test accuracy +\d+\.\d+% at the end", text, re.MULTILINE)
    assert re.search(
        r"^privacy spent +epsilon \d+\.\d+ at delta 0.0001 \(accountant exact\)", text, re.MULTILINE
    )
    shares = re.findall(r"weight of all malicious workers together: .* ([\d.]+)% on average", text)
    assert len(shares) == 1 and float(shares[0]) < 5


def check_privacy(text):
    # The paper's setting: sigma_cor = 0.6 under SecLDP, and its three epsilons.
    assert re.search(r"^SecLDP +0\.000 +0\.600 ", text, re.MULTILINE)
    assert re.findall(r"^(\w+) +sigma_cor = 0.6 spends epsilon = ([\d.]+)", text, re.MULTILINE) == [
        ("paper", "27.77"),
        ("rdp", "26.39"),
        ("exact", "24.59"),
    ]
    verdicts = re.findall(r" (2\.00) +([\d.]+)  (holds|REFUTED)$", text, re.MULTILINE)
    assert [verdict for _, _, verdict in verdicts] == ["holds"] * 4 + ["REFUTED"] * 3
    assert all((float(shown) > float(claim)) == (word == "REFUTED") for claim, shown, word in verdicts)


def check_attacks(text):
    for name in (*attacks.BY_NAME, *aggregators.BY_NAME):
        assert name in text.split("steps")[0]
    assert "the library agrees" in text
    shares = re.findall(r"at most ([\d.]+)% of the bound", text)
    assert len(shares) == 2 and all(0 < float(share) <= 100 for share in shares)
    # The mean is worse than CAF, on plain gradients and with noise.
    worst = {name: re.findall(rf"^  {name} +(\S+)  under", text, re.MULTILINE) for name in ("mean", "caf")}
    assert len(worst["mean"]) == 2
    assert all(float(a) > 3 * float(b) for a, b in zip(worst["mean"], worst["caf"], strict=True))


def check_runtime(text):
    table = dict(re.findall(r"^(mean|CAF|SMEA|Meamed|GM|Multi-Krum) +([\d.]+)\b", text, re.MULTILINE))
    assert len(table) == 6
    assert all(float(ratio) > 0 for ratio in table.values())
    parts = dict(re.findall(r"^(Gram matrix|filter|mixing|all of CAF) +([\d.]+) ms$", text, re.MULTILINE))
    assert len(parts) == 4


def check_hidden(text):
    def number(pattern):
        (found,) = re.findall(pattern, text, re.MULTILINE)
        return float(found.replace(",", ""))

    share = 100 * number(r"^n = .* f = (\d+) malicious") / number(r"^n = (\d+) workers")
    clip_norm = number(r"^n = .* C = ([\d.]+)$")
    # At the tau that was searched CAF treats the malicious workers as all others, and 1.5 does nothing.
    searched = r"^tau = [\d.]+ \(searched\), {}: error ([\d.]+), "
    weight = r"^tau = [\d.]+ \({}\), {}: .* weight of malicious workers ([\d.]+)%$"
    assert number(searched.format("caf")) > 5 * clip_norm
    assert number(searched.format("caf_noise_aware")) < 0.1
    assert number(weight.format("searched", "caf")) == pytest.approx(share, abs=0.1)
    for what, name in (("searched", "caf_noise_aware"), ("usual", "caf"), ("usual", "caf_noise_aware")):
        assert number(weight.format(what, name)) == 0
    assert number(r"^honest lengths and products beyond the limits: (\d+) of ") == 0
    assert number(r"length off by (\d+) standard") > 2 * number(r"standard deviations, limit ([\d.]+)$")
    # A bias that CAF does not see; over rounds; and what stays hidden.
    bias = r"^bias of \d+ a worker, weight of malicious workers: .*\b{} ([\d.]+)%"
    assert number(bias.format("caf")) == pytest.approx(share, abs=0.1)
    assert number(bias.format("caf_noise_aware")) < share / 3
    unseen = r"^{}: a bias of (\d+) is not seen"
    assert number(unseen.format("caf")) > 3 * number(unseen.format("caf_noise_aware"))
    late = r"^{}: weight of malicious workers ([\d.]+)% over the last third"
    assert number(late.format("caf_history")) < number(late.format("caf_noise_aware")) / 2
    moved = r"^{}, d = 431,080: caf_noise_aware ([\d.]+)"
    assert number(moved.format("SecLDP")) < clip_norm < number(moved.format("ByzLDP"))
    # The end: cancelled, led backward by CAF, forward by the other, and backward again.
    assert number(r"^bias_cancel, .* caf_noise_aware leaves ([\d.]+)$") < 0.05
    left = r"^bias of \d+: caf leaves (\S+), caf_noise_aware (\S+), with one malicious worker silent (\S+)$"
    (signs,) = re.findall(left, text, re.MULTILINE)
    assert [float(value) > 0 for value in signs] == [False, True, False]


CHECKS = {
    "01_quickstart": check_quickstart,
    "02_threat_models_and_privacy": check_privacy,
    "03_aggregators_against_attacks": check_attacks,
    "04_runtime": check_runtime,
    "05_hidden_attacks": check_hidden,
}


def test_every_notebook_is_checked():
    assert [path.stem for path in NOTEBOOKS] == list(CHECKS)


@pytest.mark.slow
@every_notebook
def test_notebook_runs(script, path):
    notebook = script.execute(path, smoke=True)
    script.normalise(notebook, path)  # raises if a cell writes to stderr or shows a path
    CHECKS[path.stem](printed(notebook))
    saved = nbformat.read(path, as_version=4)
    assert num_pictures(outputs(notebook)) == num_pictures(outputs(saved)) > 0


@every_notebook
def test_saved_notebook_is_whole(script, path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 400_000
    assert dict(notebook.metadata) == script.METADATA
    assert [cell.execution_count for cell in code_cells(notebook)] == list(
        range(1, 1 + len(code_cells(notebook)))
    )
    for cell in code_cells(notebook):
        assert not cell.metadata
        kinds = [output.output_type for output in cell.outputs]
        assert "error" not in kinds
        assert all(output.get("name") != "stderr" for output in cell.outputs)
        if re.search(r"^ *print\(", cell.source, re.MULTILINE):
            assert "stream" in kinds, cell.source
        # One picture for every figure; a loop over figures has one `show` and several pictures.
        shows = len(re.findall(r"plt\.show\(\)|^Image\(", cell.source, re.MULTILINE))
        assert num_pictures(cell.outputs) >= shows
        assert bool(cell.outputs) == bool(shows or "print(" in cell.source or "progress=" in cell.source)
    CHECKS[path.stem](printed(notebook))


@every_notebook
def test_saved_notebook_names_no_machine(script, path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for text in script.texts(cell):
            assert not re.search(r"(?<![\w.])/(work|root|home|tmp)\b", text)
            assert not script.MACHINE_PATH.search(text)


@every_notebook
def test_notebook_is_ready_for_colab(path):
    notebook = nbformat.read(path, as_version=4)
    title, install, device = notebook.cells[:3]
    assert title.source.startswith("# ")
    assert f"]({BADGE.format(path.stem)})" in title.source
    assert 'SMOKE = bool(os.environ.get("CAFCOR_SMOKE"))' in device.source
    assert re.search(r"^device: \w+ \(.+\)", device.outputs[0].text)
    first = nbformat.read(NOTEBOOKS[0], as_version=4).cells[1]
    assert install.source == first.source and not install.outputs


@pytest.mark.parametrize("installed", [True, False])
def test_install_cell(monkeypatch, tmp_path, installed):
    """It does nothing where the package is there, and else fetches and installs it."""
    source = nbformat.read(NOTEBOOKS[0], as_version=4).cells[1].source
    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append((command, check)))
    exec(compile(source, "install cell", "exec"), {})
    if installed:
        assert not calls
        return
    (clone, clone_checked), (install, install_checked) = calls
    assert clone[:2] == ["git", "clone"] and clone[-2:] == [
        "https://github.com/cafcor_jax/cafcor_jax",
        "cafcor_jax_source",
    ]
    assert install[:4] == [sys.executable, "-m", "pip", "install"] and install[-1] == "./cafcor_jax_source"
    assert clone_checked and install_checked


def write(folder, name, *sources):
    path = folder / f"{name}.ipynb"
    cells = [new_code_cell(source, id=f"c{index}") for index, source in enumerate(sources)]
    nbformat.write(new_notebook(cells=cells), path)
    return path


@pytest.fixture
def call(script, capsys, monkeypatch, tmp_path):
    """Runs the script on the notebooks of a folder of its own: status, output, errors."""
    monkeypatch.setattr(script, "find", lambda names, find=script.find: find(names, tmp_path))

    def run(*names):
        status = cli.status(lambda: script.main(["notebooks.py", *names]))
        return status, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_script_saves_with_outputs(call, script, tmp_path, monkeypatch):
    monkeypatch.setenv("CAFCOR_SMOKE", "1")  # of this process; full mode is what the script runs
    monkeypatch.setenv("PYTHON_OF_THE_TEST", sys.executable)
    path = write(
        tmp_path,
        "good",
        "import os, sys\nprint(os.environ.get('CAFCOR_SMOKE'), os.listdir())",
        "import cafcor_jax\nprint(os.path.dirname(cafcor_jax.__file__))\nsys.stdout.flush()\n"
        "print(sys.executable == os.environ['PYTHON_OF_THE_TEST'])",
        "1 + 1",
    )
    status, out, err = call("good.ipynb")
    assert (status, err) == (0, "")
    assert "saved good.ipynb" in out
    first, second, third = nbformat.read(path, as_version=4).cells
    assert re.fullmatch(r"None \[.*\]\n", first.outputs[0].text)
    assert "good.ipynb" not in first.outputs[0].text  # an empty folder, not that of the notebook
    assert [output.text for output in second.outputs] == ["./cafcor_jax\nTrue\n"]
    assert third.outputs[0].data["text/plain"] == "2" and third.execution_count == 3
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise KeyError('seven')", "KeyError: 'seven'"),
        ("import os\nos._exit(1)", "the kernel died"),
    ],
)
def test_script_names_the_cell_that_fails(call, tmp_path, source, why):
    path = write(tmp_path, "bad", "print(1)", source, "print(2)")
    before = path.read_bytes()
    assert call() == (2, "1/1  bad ...\n", f"error: bad.ipynb, cell 2: {why}.\n")
    assert path.read_bytes() == before


def test_script_refuses_what_is_no_notebook(call, tmp_path):
    assert call()[0] == 2
    (tmp_path / "text.ipynb").write_text("no notebook")
    status, _, err = call("text")
    assert status == 2 and err.startswith("error: text.ipynb is no valid notebook (") and err.count("\n") == 1
    status, _, err = call("other")
    assert (status, err) == (2, "error: 'other' is no notebook: choose from text.\n")


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (new_output("stream", name="stderr", text="careful\n"), "standard error: careful"),
        (new_output("stream", name="stdout", text="in /tmp/x_1/run now\n"), "the path /tmp/x_1/run of"),
        (new_output("display_data", {"text/html": "<a href='/home/me'>"}), "the path /home/me of"),
    ],
)
def test_what_is_not_to_be_saved(script, output, why):
    notebook = new_notebook(cells=[new_code_cell("1"), new_code_cell("2", outputs=[output])])
    with pytest.raises(UserError, match=re.escape(why)) as caught:
        script.normalise(notebook, Path("some.ipynb"))
    assert str(caught.value).startswith("some.ipynb, cell 2: ")


def test_paths_of_no_machine_are_kept(script):
    text = "https://x.org/home/tmp docs/root.md notebooks/tmp 1/tmp a/work\n"
    picture = new_output("display_data", {"image/jpeg": "/tmp/root/home/", "text/plain": "<Figure>"})
    cell = new_code_cell(text, outputs=[new_output("stream", name="stdout", text=text), picture])
    script.normalise(new_notebook(cells=[cell]), Path("some.ipynb"))
    assert cell.outputs[0].text == text
    assert cell.outputs[1].data["image/jpeg"] == "/tmp/root/home/"  # base64 may spell anything


def test_pictures_become_smaller_and_stay_the_same(script):
    """A chart of few colours keeps every pixel; what is transparent becomes white."""
    pixels = np.full((200, 300, 4), 255, np.uint8)
    pixels[20:60, 30:90] = (0, 114, 178, 255)
    pixels[100:140, 100:250] = (213, 94, 0, 255)
    pixels[150:, :, 3] = 0
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png", compress_level=1)
    before = base64.b64encode(buffer.getvalue()).decode()
    cell = new_code_cell("1", outputs=[new_output("display_data", {"image/png": before})])
    script.normalise(new_notebook(cells=[cell]), Path("some.ipynb"))
    after = cell.outputs[0].data["image/png"]
    assert len(after) < len(before) / 2
    with Image.open(io.BytesIO(base64.b64decode(after))) as image:
        np.testing.assert_array_equal(np.asarray(image.convert("RGB")), pixels[..., :3])
