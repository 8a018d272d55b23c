"""A whole federation on this machine: a SuperLink, workers with their SuperNodes, and a run over them.

All of it is on 127.0.0.1, with TLS, on free ports, in processes that end with this one; a worker or SuperNode
that ends before is started again. In the end the result stands beside that of a simulation with the very keys
that the workers agreed on, which on one machine can be read. The same command again goes on with a run that
was stopped.

Examples:
  python scripts/federation.py --flagfile=configs/federation.cfg
  python scripts/federation.py --flagfile=configs/federation.cfg --seed=2 --nocompare
  python scripts/federation.py --flagfile=configs/federation.cfg --virtual   # on Flower's own simulation
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from absl import flags

import cafcor_jax
from cafcor_jax import cli, config, experiment, privacy, progress
from cafcor_jax.errors import UserError
from cafcor_jax.flower import certificates, settings, virtual
from cafcor_jax.flower.worker import read_memory, simulation_keys
from cafcor_jax.workdir import hold

_COMPARE = flags.DEFINE_boolean("compare", True, "Simulate the run with the same keys, and compare.")
_ROUND_TIMEOUT = flags.DEFINE_float("round_timeout", 120.0, "Seconds to wait for the answers to a round.")
_SETUP_TIMEOUT = flags.DEFINE_float("setup_timeout", 240.0, "Seconds to wait for workers in the set-up.")
_VIRTUAL = flags.DEFINE_boolean(
    "virtual",
    False,
    "Run it on Flower's own simulation: virtual nodes instead of SuperNodes and workers. It needs the extra "
    "flower_simulation.",
)

# Seconds in which Flower may still bring lines of a run that is finished; sometimes it never brings the last.
_LAST_LINES = 3

# A process that has ended so often, each time within so many seconds of its start, is not started again.
_QUICK_ENDINGS = 3
_QUICK = 10

_ROOT = Path(cafcor_jax.__file__).resolve().parent
_ROUND = re.compile(r"round (\d+)/\d+  accuracy ([\d.]+)%  test loss ([\d.]+|nan|inf)")


class Children:
    """The processes that belong to this one: each in a session of its own, with a log, ended by its id."""

    def __init__(self, logs: Path):
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, Sequence[str]] = {}
        self._begun: dict[str, tuple[float, int]] = {}  # when, and how long its log was
        self._quick: dict[str, int] = {}  # how many quick endings in a row
        # Few threads each: there are more processes than cores. What Flower keeps goes beside the logs.
        self._environment = os.environ | {
            "FLWR_HOME": str(logs / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",  # what is said of a round is shown at once
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    def start(self, name: str, command: Sequence[str], *, pipe: bool = False) -> subprocess.Popen[bytes]:
        self._commands[name] = command
        with open(self._logs / f"{name}.log", "ab") as log:
            self._begun[name] = time.monotonic(), log.tell()
            self._running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else log,
                stderr=subprocess.STDOUT if pipe else log,
                env=self._environment,
                start_new_session=True,
            )
        return self._running[name]

    def ended(self) -> list[str]:
        """The names of those that have ended by themselves."""
        return [name for name, process in self._running.items() if process.poll() is not None]

    def check(self) -> None:
        """Raises a UserError if one has ended by itself."""
        for name in self.ended():
            raise self._failure(name)

    def _failure(self, name: str) -> UserError:
        log = self._logs / f"{name}.log"
        return UserError(f"The process {name} has ended: {self._last_words(name)} ({log} has all of it).")

    def _last_words(self, name: str) -> str:
        return _last_error(self._logs / f"{name}.log", self._begun[name][1])

    def revive(self, show: progress.Progress) -> None:
        """Starts workers and SuperNodes again that have ended.

        Raises:
          UserError: if the SuperLink has ended, or another of them at once, several times in a row.
        """
        for name in self.ended():
            if name == "superlink":
                raise UserError(
                    f"The process superlink has ended ({_status(self._running[name])}): the same command "
                    "goes on from the last checkpoint."
                )
            if name != "run":
                quick = time.monotonic() - self._begun[name][0] < _QUICK
                self._quick[name] = self._quick.get(name, 0) + 1 if quick else 0
                if self._quick[name] == _QUICK_ENDINGS:
                    raise self._failure(name)
                show.log(
                    f"the process {name} has ended ({_status(self._running[name])}: "
                    f"{self._last_words(name)}) and is started again"
                )
                with contextlib.suppress(ProcessLookupError):  # Processes of its own may be left.
                    os.killpg(self._running[name].pid, signal.SIGKILL)
                self.start(name, self._commands[name])

    def stop(self) -> None:
        """Ends all: the workers' side first, then the SuperLink."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in reversed(self._running.values()):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            end = time.monotonic() + 10
            for process in self._running.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, end - time.monotonic()))


def main(cfg: config.Config) -> None:
    show = progress.automatic()
    settings.check(cfg)
    # The full path: Flower's and Ray's processes may be in other folders.
    cfg = dataclasses.replace(cfg, workdir=str(Path(cfg.workdir).resolve()))
    _check_installed("flwr", "flower")
    if _VIRTUAL.value:
        _check_installed("ray", "flower_simulation")
    from cafcor_jax.flower import server  # with Flower, which may not be there

    server.Timeouts(setup=_SETUP_TIMEOUT.value, round=_ROUND_TIMEOUT.value)  # says at once what cannot be
    experiment.cache_compilations(cfg)
    built = experiment.build(cfg, progress=show)  # fetches the data once, and says what is wrong at once
    show.log(built.describe())
    place = Path(cfg.workdir)
    logs = place.with_name(place.name + "_processes")
    with hold(logs, cfg.workdir):  # before anything is written there
        _run_and_compare(cfg, built, logs, show)


def _run_and_compare(
    cfg: config.Config, built: experiment.Experiment, logs: Path, show: progress.Progress
) -> None:
    place = Path(cfg.workdir)
    if not (place / "summary.json").exists():
        _run(cfg, built, logs, show)
    summary = json.loads((place / "summary.json").read_text())
    show.log(
        f"test accuracy  {summary['final_accuracy']:.2%} after {summary['rounds']} rounds over the network"
    )
    if _COMPARE.value:
        _compare(cfg, built, logs, summary, show)
    show.log(f"privacy        {summary['privacy_of_absences']}")
    show.log("faults         " + ("; ".join(summary["absences"]) or "none"))
    show.log(f"time           {summary['seconds']:.1f} s for {summary['rounds']} rounds")
    secret = virtual.folder(cfg, 0).parent if _VIRTUAL.value else logs / "workers"
    show.log(f"files          {cfg.workdir}; {logs} has the logs, {secret} the workers' secrets")


def _run(cfg: config.Config, built: experiment.Experiment, logs: Path, show: progress.Progress) -> None:
    flagfile = logs / "settings.cfg"
    flagfile.write_text(settings.as_flagfile(cfg))
    with _children(logs) as (children, sockets):
        if _VIRTUAL.value:
            flags_of_run = _start_virtual(children, cfg, logs, sockets, show)
        else:
            _start_processes(children, cfg, logs, flagfile, sockets, show)
            flags_of_run = []
        run = children.start(
            "run",
            [
                "flwr", "run", str(_ROOT / "flower" / "app"), "here", "--stream", "--run-config",
                f'flagfile="{flagfile.resolve()}" setup-timeout={_SETUP_TIMEOUT.value} '
                f"round-timeout={_ROUND_TIMEOUT.value}",
                *flags_of_run,
            ],
            pipe=True,
        )  # fmt: skip
        problem = _follow(run, children, built, logs, show)
        if not (Path(cfg.workdir) / "summary.json").exists():
            raise UserError(
                problem
                or f"The run ended without a result ({logs / 'run.log'} has what it said): the same command "
                "goes on from the last checkpoint."
            )


def _start_processes(
    children: Children,
    cfg: config.Config,
    logs: Path,
    flagfile: Path,
    sockets: Path,
    show: progress.Progress,
) -> None:
    """Starts a SuperLink, workers and SuperNodes."""
    ports = _free_ports(cfg.num_workers + 1)
    with show.phase(f"starting a SuperLink and {cfg.num_workers} workers with their SuperNodes"):
        authority = _start_superlink(children, ports[0], logs, sockets)
        # One honest and one malicious worker first: the others find their compiled code in the cache.
        first = {0, cfg.num_workers - 1}
        for group in (first, set(range(cfg.num_workers)) - first):
            for worker in sorted(group):
                _start_worker(children, cfg, worker, logs, flagfile, sockets)
            ready = [sockets / str(worker) for worker in group]
            _wait(lambda ready=ready: all(map(Path.exists, ready)), children, "the workers to be ready")
        _wait(lambda: _listens(ports[0]), children, "the SuperLink to listen")
        for worker, port in enumerate(ports[1:]):
            node = f'worker-socket="{sockets / str(worker)}"'
            address = ["--superlink", f"127.0.0.1:{ports[0]}", "--port", str(port)]
            trust = ["--root-certificates", str(authority)]
            children.start(
                f"supernode{worker}", ["flower-supernode", *trust, *address, "--node-config", node]
            )


def _start_virtual(
    children: Children, cfg: config.Config, logs: Path, sockets: Path, show: progress.Progress
) -> list[str]:
    """Starts a SuperLink that simulates its SuperNodes; returns what `flwr run` needs to be told beside."""
    (port,) = _free_ports(1)
    with show.phase("starting a SuperLink that simulates its SuperNodes"):
        _start_superlink(children, port, logs, sockets, "--simulation")
        _wait(lambda: _listens(port), children, "the SuperLink to listen")
    return ["--federation-config", f"num-supernodes={cfg.num_workers} client-resources-num-cpus=1"]


def _start_superlink(children: Children, port: int, logs: Path, sockets: Path, *options: str) -> Path:
    """Starts a SuperLink and tells `flwr` of it; returns the certificate by which others know it."""
    authority, certificate, key = certificates.make(sockets / "tls")  # gone when the run is over
    tls = [f"--ssl-ca-certfile={authority}", f"--ssl-certfile={certificate}", f"--ssl-keyfile={key}"]
    address = ["--host=127.0.0.1", f"--port={port}", "--disable-runtime-dependency-installation"]
    children.start("superlink", ["flower-superlink", *tls, *address, *options])
    (logs / "flwr").mkdir(exist_ok=True)
    (logs / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{authority}"\n'
    )
    return authority


def _start_worker(
    children: Children, cfg: config.Config, worker: int, logs: Path, flagfile: Path, sockets: Path
) -> None:
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), f"--flagfile={flagfile}"]
    command += [f"--worker={worker}", f"--socket={sockets / str(worker)}"]
    command += [f"--state_dir={logs / 'workers' / str(worker)}"]
    if worker >= cfg.num_honest:
        command.append("--malicious")
    children.start(f"worker{worker}", command)


def _follow(
    run: subprocess.Popen[bytes],
    children: Children,
    built: experiment.Experiment,
    logs: Path,
    show: progress.Progress,
) -> str:
    """Shows what the server says until its run ends; returns the sentence with which it failed, if it did."""
    cfg, problem = built.config, ""
    spent = [float(value) for value in privacy.epsilon_schedule(built.plan)]
    shown = quiet = 0
    with open(logs / "run.log", "a") as log, show.training(0, cfg.rounds):
        for line in _lines(run):
            # The stream does not always end with the run. The summary may be there before the last lines are.
            quiet = 0 if line else quiet + 1
            if (Path(cfg.workdir) / "summary.json").exists() and (shown == cfg.rounds or quiet > _LAST_LINES):
                break
            if not line:
                children.revive(show)
                continue
            log.write(line + "\n")
            log.flush()
            told = _ROUND.match(line)
            if told and 1 <= int(told[1]) <= cfg.rounds:
                shown = int(told[1])
                show.update(
                    shown,
                    loss=float(told[3]),
                    accuracy=float(told[2]) / 100,
                    epsilon=spent[shown - 1],
                )
            elif line.startswith("error: ") and not problem:
                problem = line.removeprefix("error: ")
            elif re.match(
                r"(round \d+: worker|SuperNode \d+ is not|worker \d+ is back|set-up: |resuming )", line
            ):
                show.log(line)
    return problem


def _lines(run: subprocess.Popen[bytes]) -> Iterator[str]:
    """The lines of a process, without colours, and an empty one in every second in which there are none."""
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        assert run.stdout is not None
        for line in run.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            raw = lines.get(timeout=1.0)
        except queue.Empty:
            raw = b""
        if raw is None:
            return
        yield re.sub(r"\x1b\[[0-9;]*m", "", raw.decode(errors="replace")).rstrip()


def _compare(
    cfg: config.Config, built: experiment.Experiment, logs: Path, summary: dict, show: progress.Progress
) -> None:
    """Simulates the run with the keys that the workers agreed on."""
    with show.phase("simulating the same run"):
        folders = [
            virtual.folder(cfg, worker) if _VIRTUAL.value else logs / "workers" / str(worker)
            for worker in range(cfg.num_workers)
        ]
        memories = [read_memory(folder) for folder in folders]
        keys = simulation_keys(memories, cfg.num_honest, cfg.generator)
        same = experiment.build(cfg, keys=keys)
        state, step = same.init(), jax.jit(same.federation.step)
        for _ in range(cfg.rounds):
            state, _info = step(same.key, state, same.data)
        tests = same.dataset.test_images, same.dataset.test_labels
        _, accuracy = jax.jit(same.model.evaluate)(state.params, *tests)
    show.log(f"simulated      {float(accuracy):.2%} with the same settings and the same keys")
    if summary["faults"]:
        show.log("               (the simulation has none of the faults below)")
    ours = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.params)])
    theirs = _final_params(cfg, same)
    moved = np.linalg.norm(
        ours - np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(built.init_params())])
    )
    show.log(
        f"difference     {np.linalg.norm(ours - theirs) / moved:.1e} of the way that the parameters went"
    )


def _final_params(cfg: config.Config, built: experiment.Experiment) -> np.ndarray:
    from cafcor_jax.federation import server_init
    from cafcor_jax.workdir import Workdir

    with Workdir(cfg.workdir, cfg) as folder:
        like = server_init(built.aggregator, built.optimizer, built.init_params(), cfg.num_workers)
        params = folder.restore(max(folder.rounds()), like).params
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


@contextlib.contextmanager
def _children(logs: Path) -> Iterator[tuple[Children, Path]]:
    """Children, and a folder for sockets and keys with a short name; both end when the block does."""
    sockets = Path(tempfile.mkdtemp(prefix="cafcor"))
    children = Children(logs)
    # A terminal that is closed, or a kill, must not leave twenty processes behind.
    before = {
        number: signal.signal(number, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield children, sockets
    finally:
        # A second Ctrl-C must not leave them either.
        before |= {signal.SIGINT: signal.getsignal(signal.SIGINT)}
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        children.stop()
        shutil.rmtree(sockets, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait(condition, children: Children, what: str) -> None:
    end = time.monotonic() + _SETUP_TIMEOUT.value
    while not condition():
        children.check()
        if time.monotonic() > end:
            raise UserError(
                f"{_SETUP_TIMEOUT.value:g} s were not enough for {what}: give a larger --setup_timeout."
            )
        time.sleep(0.2)


def _check_installed(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"The package {package} is not installed: pip install -c requirements.txt -e '.[{extra}]'."
        )


def _status(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"signal {-code}" if code < 0 else f"status {code}"


def _last_error(log: Path, begin: int) -> str:
    text = log.read_bytes()[begin:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.partition("error: ")[2].rstrip(".") for line in lines if "error: " in line]
    return (errors or lines or ["it said nothing"])[-1][:300]


if __name__ == "__main__":
    cli.run(main, doc=__doc__)
