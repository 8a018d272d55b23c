"""Executes notebooks in full, each in a new kernel, and saves them in place with their outputs.

They are saved without times, counters or paths of this machine, so that two runs differ in what was measured
alone. They run in an empty folder that is removed afterwards. The first cell that fails ends the script with
one sentence; that notebook stays as it was.

Examples:
  python scripts/notebooks.py
  python scripts/notebooks.py 01_quickstart 04_runtime
"""

import base64
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from cafcor_jax import cli, progress
from cafcor_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
TIMEOUT = 1200  # seconds for one cell
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# A path begins where a word does: "docs/home" and "https://x.org/tmp" are none.
BEFORE_PATH = r"(?<![\w.~/:-])"
FOLDERS = "|".join([re.escape(ROOT.parts[1]), "root", "home", "tmp", "Users"])
MACHINE_PATH = re.compile(rf"{BEFORE_PATH}/(?:{FOLDERS})(?:/[^\s'\",;:)]*)?\b")


def find(names: Sequence[str], folder: Path = FOLDER) -> list[Path]:
    """The notebooks of these names, with or without .ipynb; all if none is named."""
    known = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
    if not known:
        raise UserError(f"{folder.name} has no notebooks.")
    for name in names:
        if name.removesuffix(".ipynb") not in known:
            raise UserError(f"{name!r} is no notebook: choose from {', '.join(known)}.")
    return [known[name.removesuffix(".ipynb")] for name in names] or list(known.values())


def execute(path: Path, *, smoke: bool = False) -> Any:
    """Runs a notebook in a new kernel and an empty folder.

    Args:
      path: the notebook; the file is only read.
      smoke: whether CAFCOR_SMOKE is set, which makes sizes small.

    Returns:
      The notebook with its outputs.

    Raises:
      UserError: if the file is no notebook, or a cell fails, takes too long or ends the kernel.
    """
    try:
        import nbclient
        import nbformat
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install -e .[dev].") from None

    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:  # JSON, nbformat and jsonschema have errors of their own.
        raise UserError(f"{path.name} is no valid notebook ({_first_line(error)}).") from None

    current = 0

    def begin(cell: Any, cell_index: int) -> None:
        nonlocal current
        current = cell_index

    with tempfile.TemporaryDirectory(prefix="notebook_") as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=TIMEOUT,
            kernel_name="python3",
            record_timing=False,
            extra_arguments=["--IPKernelApp.log_level=40"],  # errors; it warns of a port on this machine
            resources={"metadata": {"path": folder}},
            on_cell_execute=begin,
        )
        environment = {
            name: value for name, value in os.environ.items() if name not in ("CAFCOR_SMOKE", "MPLBACKEND")
        }
        # Start-up files of this user's IPython are not the notebook's.
        environment |= {
            "IPYTHONDIR": f"{folder}/.ipython",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        }
        if smoke:  # Sizes are tiny then, and most of the time is compilation.
            environment |= {
                "CAFCOR_SMOKE": "1",
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false",
                "JAX_COMPILATION_CACHE_DIR": f"{folder}/.xla",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
            }
        try:
            client.execute(env=environment)
        except nbclient.exceptions.CellExecutionError as error:
            raise _failure(path, current, f"{error.ename}: {_first_line(error.evalue)}") from None
        except nbclient.exceptions.CellTimeoutError:
            raise _failure(path, current, f"it took more than {TIMEOUT} s") from None
        except nbclient.exceptions.DeadKernelError:
            raise _failure(path, current, "the kernel died") from None
    return notebook


def normalise(notebook: Any, path: Path) -> None:
    """Takes out of a notebook, in place, all that depends on the machine and the moment.

    Raises:
      UserError: if a cell wrote to standard error, or shows a path of this machine.
    """
    notebook.metadata.clear()
    notebook.metadata.update(METADATA)
    count = 0
    for index, cell in enumerate(notebook.cells):
        cell.metadata.clear()
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            cell.outputs = list(_normalised(cell.outputs, count))
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise _failure(path, index, f"it wrote to standard error: {_first_line(output.text)}")
        for text in texts(cell):
            if found := MACHINE_PATH.search(text):
                raise _failure(path, index, f"it shows the path {found[0]} of this machine")


def _normalised(outputs: Sequence[Any], count: int) -> Iterator[Any]:
    """The outputs with neighbouring prints joined, and paths inside the repository or the home made short."""
    joined: list[Any] = []
    for output in outputs:
        if (
            joined
            and output.output_type == "stream" == joined[-1].output_type
            and output.name == joined[-1].name
        ):
            joined[-1].text += output.text
        else:
            joined.append(output)
    for output in joined:
        if output.output_type == "stream":
            output.text = _short(output.text)
        else:
            output.metadata = type(output)()
            for kind, value in output.get("data", {}).items():
                output.data[kind] = _short(value) if kind.startswith("text/") else value
                if kind == "image/png":
                    output.data[kind] = _smaller(value)
        if output.output_type == "execute_result":
            output.execution_count = count
        yield output


def _short(text: str) -> str:
    for folder, name in ((ROOT, "."), (Path.home(), "~")):
        text = re.sub(rf"{BEFORE_PATH}{re.escape(str(folder))}(?![\w.-])", name, text)
    return text


def _smaller(picture: str) -> str:
    """A PNG file in base64, on white and with 256 colours: the same to the eye, at a third of the size."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        layer = image.convert("RGBA")
        opaque = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
        opaque.quantize(256, dither=Image.Dither.NONE).save(buffer, format="png", optimize=True)
    smaller = base64.b64encode(buffer.getvalue()).decode()
    return smaller if len(smaller) < len(picture) else picture


def texts(cell: Any) -> Iterator[str]:
    """All that can be read in a cell: its source and the texts of its outputs, not its pictures."""
    yield cell.source
    for output in cell.get("outputs", []):
        yield from (output[name] for name in ("text", "ename", "evalue") if name in output)
        yield from output.get("traceback", [])
        yield from (value for kind, value in output.get("data", {}).items() if kind.startswith("text/"))


def save(notebook: Any, path: Path) -> None:
    """Writes a notebook such that readers see the old one or the whole new one."""
    import nbformat

    temporary = path.with_suffix(".ipynb.tmp")
    try:
        nbformat.validate(notebook)
        nbformat.write(notebook, temporary)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path.name} cannot be written: {error.strerror}.") from None


def _failure(path: Path, index: int, why: str) -> UserError:
    return UserError(f"{path.name}, cell {index + 1}: {why.rstrip('.')}.")


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def main(argv: Sequence[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(f"Usage: python {argv[0]} [name ...]\n\n{__doc__}")
        return
    paths = find(argv[1:])
    show = progress.automatic()
    for number, path in enumerate(paths, 1):
        begin = time.monotonic()
        with show.phase(f"{number}/{len(paths)}  {path.stem}"):
            notebook = execute(path)
            normalise(notebook, path)
            save(notebook, path)
        size = path.stat().st_size / 1000
        show.log(f"saved {path.name}: {time.monotonic() - begin:.0f} s, {size:.0f} kB")


if __name__ == "__main__":
    sys.exit(cli.status(lambda: main(sys.argv)))
