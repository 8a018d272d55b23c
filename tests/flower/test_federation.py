"""Set-up, rounds, faults and refusals, in one process and without Flower's network."""

import dataclasses
import importlib
import io
import itertools
import json
import pickle
import re
import sys
import types

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flwr.app import Error

from cafcor_jax import experiment, grid, noise, privacy, progress, secrets
from cafcor_jax.errors import InUseError, UserError
from cafcor_jax.federation import Data, WorkerKeys, one_worker
from cafcor_jax.flower import identity, messages, server, settings, virtual
from cafcor_jax.flower import worker as worker_module
from cafcor_jax.flower.worker import Worker, read_memory, simulation_keys
from tests import tiny
from tests.compiling import compiled_as_users  # noqa: F401 (a fixture)
from tests.flower import fake
from tests.flower.fake import QUICK, altered, altered_arrays, grid_of, make, only_in
from tests.tiny import compile_once  # noqa: F401 (a fixture)


@pytest.fixture(scope="module")
def kept():
    return {}


@pytest.fixture(autouse=True)
def small(monkeypatch, kept):
    """A tiny model; and what is built and compiled is the same in most tests, so it is kept."""
    tiny.use(monkeypatch)
    build, compiled = experiment.build, worker_module._compiled

    def build_once(config, *, keys=None, **others):
        name = settings.decisive_json(config)
        if keys is not None:
            return build(config, keys=keys, **others)
        if name not in kept:
            kept[name] = build(config, **others)
        return dataclasses.replace(kept[name], config=config)

    def compile_program_once(built, malicious, own):
        name = settings.decisive_json(built.config), malicious, str(jax.tree.map(jnp.shape, own))
        if name not in kept:
            kept[name] = compiled(built, malicious, own)
        return kept[name]

    monkeypatch.setattr(experiment, "build", build_once)
    monkeypatch.setattr(worker_module, "_compiled", compile_program_once)


def silent(text):
    del text


def run(grid, config, timeouts=QUICK):
    return server.run(grid, config, timeouts, log=silent)


def params_of(config):
    like = jax.tree.map(np.asarray, experiment.build(config).init_params())
    with server.Workdir(config.workdir, config) as folder:
        built = experiment.build(config)
        state = server.server_init(built.aggregator, built.optimizer, like, config.num_workers)
        return folder.restore(max(folder.rounds()), state).params


def simulated(config, memories, rounds=None):
    """The trajectory of the simulation with the very keys of these workers."""
    built = experiment.build(config, keys=simulation_keys(memories, config.num_honest, config.generator))
    state, step = built.init(), jax.jit(built.federation.step)
    for _ in range(rounds or config.rounds):
        state, _ = step(built.key, state, built.data)
    return state


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attack": "gaussian", "generator": "chacha20", "aggregator": "caf_history", "rounds": 3},
        {"precision": "grid", "epsilon": 10.0, "attack": "zero"},
        {"privacy_level": "example", "sampling": "poisson", "epsilon": 30.0, "attack": "nan"},
    ],
)
def test_the_federation_is_the_simulation(tmp_path, changes):
    config = make(tmp_path / "run", **changes)
    members = fake.workers(config, tmp_path)
    summary = run(grid_of(members), config)
    state = simulated(config, [worker.memory for worker in members])
    got, want = jax.tree.leaves(params_of(config)), jax.tree.leaves(state.params)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(b).max())
    # Each honest worker's momentum too, which is where its noise is.
    for worker in members[: config.num_honest]:
        for a, b in zip(worker.memory.momentum, jax.tree.leaves(state.momentum), strict=True):
            np.testing.assert_allclose(a, b[worker.index], rtol=1e-4, atol=1e-6 * np.abs(b).max())
    assert summary["rounds"] == config.rounds
    faults = summary["absences"]
    assert faults == (
        ["worker 4 in rounds 1, 2, 3, 4: is not finite"] if changes.get("attack") == "nan" else []
    )


@pytest.mark.usefixtures("compiled_as_users")
@pytest.mark.parametrize("bits", [None, 15])
def test_a_worker_draws_its_row_of_the_noise_to_the_bit(bits):
    """From its own keys alone, and over all workers the shared part cancels."""
    n, size = 4, 9000
    plan = privacy.calibrate(
        threat_model="byzldp",
        epsilon=5.0,
        delta=1e-4,
        num_workers=n,
        num_byzantine=1,
        rounds=3,
        clip_norm=1.0,
    )
    private = [secrets.generate_private_key() for _ in range(n)]
    matrix = secrets.agreed_key_matrix(private, session=b"session", impl="threefry2x32")
    own = jax.random.split(jax.random.key(0), n)
    if bits:
        want = grid.independent(own, 2, size, plan.sigma_ind, bits) + grid.pairwise(
            matrix, 2, size, plan.sigma_cor, bits
        )
    else:
        want = noise.independent(own, 2, size, plan.sigma_ind) + noise.pairwise(
            matrix, 2, size, plan.sigma_cor
        )
    for i in range(n):
        worker = one_worker(i, loss_fn=None, plan=plan, momentum=0.5, batch_size=1, grid_bits=bits)
        published = [secrets.public_key(key) for key in private]
        row = secrets.derive_row(private[i], published, i, session=b"session", impl="threefry2x32")
        got = worker.noise(WorkerKeys(own[i], own[i], row), jnp.int32(2), size)
        assert np.asarray(got).tobytes() == np.asarray(want[i]).tobytes()


def test_the_server_never_has_a_secret(tmp_path, monkeypatch):
    """Neither in what it gets and sends, nor in what it stores, nor in the object itself after a run."""
    config = make(tmp_path / "run", generator="threefry2x32")
    members = fake.workers(config, tmp_path / "workers")
    kept = []
    original = server._Server.run
    monkeypatch.setattr(server._Server, "run", lambda self: (kept.append(self), original(self))[1])
    grid = grid_of(members)
    run(grid, config)
    stored = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    attributes = {
        name: value
        for name, value in vars(kept[0]).items()
        if name not in ("_grid", "_evaluate", "_step", "_log", "_folder")
    }
    held = pickle.dumps(jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, attributes))
    seen = b"".join(grid.received) + b"".join(grid.asked) + stored + held

    def occurs(secret):
        return secret in seen or secret.hex().encode() in seen.lower()

    memories = [worker.memory for worker in members]
    assert all(occurs(secrets.public_key(memory.private)) for memory in memories)  # what to look for is found
    for memory in memories:
        keys = memory.keys(memories.index(memory), "threefry2x32")
        row = np.asarray(jax.random.key_data(keys.pairs))
        pair_keys = [row[j].tobytes() for j in range(len(row)) if row[j].any()]
        own = [np.asarray(jax.random.key_data(key)).tobytes() for key in (keys.own, keys.batches)]
        for secret in [memory.private, memory.seed, *pair_keys, *own]:
            assert len(secret) >= 8 and not occurs(secret)
    # Nor a gradient without noise: neither of the first round that has one, nor its parts.
    built = experiment.build(config)
    for worker in members[: config.num_honest]:
        assert occurs(worker.memory.momentum[0].tobytes())
        row = Data(*(leaf[worker.index] for leaf in built.data))
        keys = worker.memory.keys(worker.index, "threefry2x32")
        one = one_worker(
            worker.index, loss_fn=built.model.loss, plan=built.plan, momentum=config.momentum, batch_size=8
        )
        for t in range(2):  # The parameters of rounds 0 and 1 are the initial ones: momenta start at 0.
            gradient = one.gradient(keys, jnp.int32(t), built.init_params(), row).gradient
            assert not any(occurs(np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(gradient))
        assert not occurs(np.asarray(row.images[0]).tobytes())


# Faults.

FAULTS = {
    "late": (lambda content, worker: (worker.handle(content), None)[1], "no answer within 0.05 s"),
    "vanished": (lambda content, worker: None, "no answer within 0.05 s"),
    "no SuperLink": (
        lambda content, worker: ConnectionError("refused"),
        r"the SuperLink cannot be reached \(ConnectionError\)",
    ),
    "not Flower's": (lambda content, worker: ValueError("bad"), r"not decodable \(ValueError\)"),
    "SuperLink refuses": (
        lambda content, worker: httpx.HTTPStatusError("404", request=None, response=None),
        r"not decodable \(HTTPStatusError\)",
    ),
    "its worker is gone": (
        lambda content, worker: Error(0, "<class 'ConnectionError'>:<'its worker does not answer: refused'>"),
        r"no answer: its worker does not answer: refused \(ConnectionError\)",
    ),
    "random bytes": (lambda content, worker: b"\x00" * 50, "cannot be read"),
    "cut off": (lambda content, worker: worker.handle(content)[:-9], "an array is cut off"),
    "wrong shape": (altered_arrays(lambda a: a[..., :-1]), "other shapes"),
    "wrong type": (altered_arrays(lambda a: a.astype(np.float64)), "other types"),
    "nan": (altered_arrays(lambda a: a * np.float32("nan")), "is not finite"),
    "inf": (altered_arrays(lambda a: a + np.float32("inf")), "is not finite"),
    "old round": (altered(round=0), "answers round 0"),
    "other session": (altered(session=b"x" * 16), "another question or session"),
    "other worker": (altered(worker=2), "says that it is worker 2"),
    "refusal": (lambda content, worker: messages.encode({"kind": "refused", "why": "no"}), "refuses: no"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_up_to_f_faults_do_not_stop_a_run(tmp_path, name):
    change, what = FAULTS[name]
    config = make(tmp_path / "run", attack="none", num_workers=5, num_byzantine=1, threat_model="ldp")
    members = [
        Worker(config, i, tmp_path / f"w{i}", log=silent, examples=_examples(tmp_path)) for i in range(5)
    ]
    grid = grid_of(members)
    grid.nodes[101] = only_in([1, 2], members[1], change)
    summary = run(grid, config)
    (line,) = summary["absences"]
    assert line.startswith("worker 1 in rounds 2, 3: ") and re.search(what, line)
    weights = np.load(tmp_path / "run" / "weights.npy")
    assert (weights[1:3, 1] == 0).all() and weights[3, 1] > 0  # it is back in the round after
    assert "privacy holds" in summary["privacy_of_absences"]


def test_what_a_worker_says_cannot_pass_for_what_the_server_says(tmp_path):
    config = make(tmp_path / "run", rounds=2)
    members = fake.workers(config, tmp_path)
    grid = grid_of(members)
    why = "no\nround 999/2  accuracy 99.9%  test loss 0.1\r\nerror: gone\x1b[2J\u2028error: \0"
    refusal, reason = messages.encode({"kind": "refused", "why": why}), f"no\n{why} error: "
    grid.nodes[104] = only_in([0], members[4], lambda content, worker: refusal)
    lines = []
    with pytest.raises(UserError, match="more than num_byzantine=1"):
        grid.nodes[103] = only_in([0], members[3], lambda content, worker: Error(0, reason))
        server.run(grid, config, QUICK, log=lines.append)
    grid.nodes[103] = members[3].handle
    summary = server.run(grid, config, QUICK, log=lines.append)
    (line,) = summary["absences"]
    assert line.startswith("worker 4 in round 1: refuses: no round 999/2 accuracy 99.9% test loss 0.1 error:")
    assert all(line.isprintable() for line in lines)

    # And if it could: the launcher takes no such line.
    launcher = importlib.import_module("scripts.federation")
    told = [*lines, "round 999/2  accuracy 9.9%  test loss 0.1", "round 0/2  accuracy 9.9%  test loss 0.1"]
    process = types.SimpleNamespace(stdout=io.BytesIO("\n".join([*told, *lines, "error: so"]).encode()))
    built = experiment.build(dataclasses.replace(config, workdir=str(tmp_path / "other")))
    assert launcher._follow(process, None, built, tmp_path, progress.Silent()) == "so"


def refuse_every_first_pull(monkeypatch, grid):
    """A connection error at the first look for each answer."""
    pull, asked = grid.pull_messages, set()

    def pull_at_the_second_time(ids):
        if ids[0] not in asked:
            asked.add(ids[0])
            raise httpx.ConnectError("refused")
        return pull(ids)

    monkeypatch.setattr(grid, "pull_messages", pull_at_the_second_time)


def test_a_connection_error_that_passes_costs_nothing(tmp_path, monkeypatch):
    config = make(tmp_path / "run", rounds=1)
    grid = grid_of(fake.workers(config, tmp_path))
    refuse_every_first_pull(monkeypatch, grid)
    assert run(grid, config, server.Timeouts(setup=60, round=60, poll=0.01))["absences"] == []


def test_a_connection_error_that_passed_is_not_the_reason_for_silence(tmp_path, monkeypatch):
    config = make(tmp_path / "run", rounds=1)
    members = fake.workers(config, tmp_path)
    grid = grid_of(members)
    grid.nodes[104] = only_in([0], members[4], FAULTS["vanished"][0])
    refuse_every_first_pull(monkeypatch, grid)
    summary = run(grid, config, server.Timeouts(setup=60, round=0.3, poll=0.01))
    assert summary["absences"] == ["worker 4 in round 1: no answer within 0.3 s"]


@pytest.mark.parametrize("unsent", ["", None])
def test_a_message_that_flower_does_not_take_is_a_fault(tmp_path, monkeypatch, unsent):
    config = make(tmp_path / "run", rounds=2)
    grid = grid_of(fake.workers(config, tmp_path))
    push, pushed = grid.push_messages, itertools.count()

    def push_some(outgoing):
        ids, time = push(outgoing), next(pushed)
        if time == 2:  # the first round; two were the set-up
            return [*ids[:3], unsent, ids[4]]
        return [] if time == 3 else ids  # as when they are too large

    monkeypatch.setattr(grid, "push_messages", push_some)
    with pytest.raises(UserError, match=r"Round 2 has .* 5 workers.*\(worker 0: could not be sent; worker 1"):
        run(grid, config)
    faults = json.loads((tmp_path / "run" / "federation.json").read_text())["faults"]
    assert faults[0] == {"round": 0, "worker": 3, "what": "could not be sent"} and len(faults) == 6


def test_who_hangs_costs_the_whole_time_twice_and_may_come_back(tmp_path):
    config = make(tmp_path / "run", attack="none", threat_model="ldp", rounds=6)
    members = [
        Worker(config, i, tmp_path / f"w{i}", log=silent, examples=_examples(tmp_path)) for i in range(5)
    ]
    grid = grid_of(members)
    grid.nodes[101] = only_in([0, 1, 2, 3], members[1], FAULTS["vanished"][0])
    summary = run(grid, config, dataclasses.replace(QUICK, round=1.0))
    assert summary["absences"] == [
        "worker 1 in rounds 1, 2: no answer within 1 s",
        "worker 1 in rounds 3, 4: no answer for as long as the others took",
    ]
    seconds = experiment.read_metrics(tmp_path / "run" / "metrics.csv")["seconds"]
    assert min(seconds[:2]) > 1 > max(seconds[2:])
    assert (np.load(tmp_path / "run" / "weights.npy")[4:, 1] > 0).all()


def _examples(folder):
    path = folder / "own.npz"
    if not path.exists():
        np.savez(path, images=tiny.DATASET.train_images[:50], labels=tiny.DATASET.train_labels[:50])
    return str(path)


def test_a_huge_message_is_left_to_the_rule(tmp_path):
    config = make(tmp_path / "run")
    members = fake.workers(config, tmp_path)
    grid = grid_of(members)
    grid.nodes[104] = only_in([1, 2, 3], members[4], altered_arrays(lambda a: np.full_like(a, 3e38)))
    summary = run(grid, config)
    assert summary["absences"] == []
    assert (np.load(tmp_path / "run" / "weights.npy")[1:, 4] < 1e-6).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params_of(config)))


def test_more_than_f_faults_stop_and_the_same_command_goes_on(tmp_path):
    """Killed, too: the server starts anew from its checkpoint, the workers with what they remember."""
    config = make(tmp_path / "run")
    members = fake.workers(config, tmp_path)
    grid = grid_of(members)
    gone = [0, 1]
    for i in gone:
        grid.nodes[100 + i] = only_in([2], members[i], FAULTS["vanished"][0])
    with pytest.raises(
        UserError, match=r"Round 3 has no usable message of 2 workers, more than num_byzantine=1"
    ):
        run(grid, config)
    # Worker 3 is killed as well; its answer to round 2, which the server never used, is given again.
    members[3].close()
    members[3] = Worker(config, 3, tmp_path / "worker3", log=silent)
    run(grid_of(members), config)
    state = simulated(config, [worker.memory for worker in members])
    for a, b in zip(jax.tree.leaves(params_of(config)), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["absences"] == []  # of the round that was repeated only what happened in the end


def test_only_who_was_absent_in_the_last_round_is_back(tmp_path):
    config = make(tmp_path / "run", attack="nan", rounds=3)
    config = dataclasses.replace(config, num_byzantine=2, num_workers=7)
    members = fake.workers(config, tmp_path)
    grid, gone = grid_of(members), FAULTS["vanished"][0]
    for worker in (0, 1):  # they are silent in the second round, and the last two workers not finite in each
        grid.nodes[100 + worker] = only_in([1], members[worker], gone)
    with pytest.raises(UserError, match="Round 2 has no usable message of 4 workers"):
        run(grid, config)
    lines = []
    server.run(grid_of(members), config, QUICK, log=lines.append)
    back = [line for line in lines if "is back" in line]
    assert back == ["worker 0 is back", "worker 1 is back"]


def test_a_worker_rejoins_from_another_node_and_an_impostor_does_not(tmp_path):
    config = make(tmp_path / "run", rounds=5)
    members = fake.workers(config, tmp_path)
    grid = grid_of(members)
    stranger = Worker(config, 2, tmp_path / "impostor", log=silent)

    def impostor(content):
        values, _ = messages.decode(content)
        if values["kind"] == "rejoin":
            return messages.encode({"kind": "rejoin", "worker": 2, "proof": b"x" * 32})
        return stranger.handle(content)

    def last(content):  # things happen when worker 4 is asked for a round
        values, _ = messages.decode(content)
        if values.get("round") == 1:
            del grid.nodes[102]
            grid.nodes[500] = impostor
        if values.get("round") == 2:
            grid.nodes[600] = members[2].handle
        return members[4].handle(content)

    grid.nodes[104] = last
    summary = run(grid, config)
    lines = summary["absences"]
    assert any(line == "worker 2 in rounds 3, 4: not connected" for line in lines), lines
    assert any("SuperNode 500 is not let in: it says that it is worker 2" in line for line in lines)
    assert members[2].memory.round == 4
    assert np.load(tmp_path / "run" / "weights.npy")[4, 2] > 0


def test_who_missed_rounds_goes_on_with_its_momentum(tmp_path):
    config = make(tmp_path / "run", threat_model="none", clip_norm=1.0, rounds=4)
    members = fake.workers(config, tmp_path)
    grid = grid_of(members)
    before = []

    def change(content, worker):
        before.append([leaf.copy() for leaf in worker.memory.momentum])

    grid.nodes[101] = only_in([2], members[1], change)
    run(grid, config)
    built = experiment.build(config)
    keys = members[1].memory.keys(1, experiment.GENERATORS[config.generator])
    one = one_worker(
        1, loss_fn=built.model.loss, plan=built.plan, momentum=config.momentum, batch_size=config.batch_size
    )
    asked = [messages.decode(content) for content in grid.asked]
    (params,) = [arrays for values, arrays in asked if values.get("round") == 3][:1]
    tree = jax.tree.unflatten(jax.tree.structure(built.init_params()), params)
    own = jax.tree.map(lambda leaf: leaf[1], built.data)
    gradient = jax.tree.leaves(one.gradient(keys, jnp.int32(3), tree, own).gradient)
    for m, g, after in zip(before[0], gradient, members[1].memory.momentum, strict=True):
        np.testing.assert_allclose(
            after, config.momentum * m + (1 - config.momentum) * g, rtol=1e-5, atol=1e-7
        )


# What a worker refuses.


@pytest.fixture
def trained(tmp_path):
    config = make(tmp_path / "run", rounds=2)
    members = fake.workers(config, tmp_path)
    grid = grid_of(members)
    run(grid, config)
    return config, members, grid


def refusal(worker, values, arrays=()):
    answer, _ = messages.decode(worker.handle(messages.encode(values, arrays)))
    return answer.get("why", "")


def test_a_worker_gives_no_noise_twice(trained):
    config, members, grid = trained
    worker = members[0]
    values, params = messages.decode([c for c in grid.asked if b'"train"' in c][-1])
    first = worker.handle(messages.encode(values, params))
    assert worker.handle(messages.encode(values, params)) == first  # the same question, the same answer
    other = [array + np.float32(1) for array in params]
    assert "would have the same noise" in refusal(worker, values, other)
    assert "would have the same noise" in refusal(worker, values | {"round": 0}, params)
    assert "pays for rounds 0 to 1" in refusal(worker, values | {"round": 2}, params)
    assert "does not take part in session" in refusal(worker, values | {"session": b"y" * 16}, params)
    assert "shapes and types" in refusal(worker, values, params[:1])
    hello = {"kind": "hello", "session": b"z" * 16, "settings": settings.decisive_json(config)}
    assert "its budget pays for one session" in refusal(worker, hello)
    assert "is no message" in refusal(worker, {"kind": "secrets"})
    assert "cannot be read" in messages.decode(worker.handle(b"nonsense"))[0]["why"]
    keys = {"kind": "keys", "session": values["session"], "signatures": []}
    assert "must be a list of bytes" in refusal(worker, keys | {"public_keys": 3})
    swapped = list(reversed(worker.memory.public_keys))
    assert "must stay the same" in refusal(worker, keys | {"public_keys": swapped})


def test_a_worker_goes_on_with_its_own_settings_only(trained):
    member = trained[1][0]
    member.close()
    folder = member._folder
    with pytest.raises(UserError, match="is that of a run with other settings"):
        Worker(dataclasses.replace(member.config, clip_norm=3.0), member.index, folder, log=silent)
    Worker(member.config, member.index, folder, log=silent).close()


def test_what_nobody_thought_of_does_not_end_a_worker(trained, monkeypatch, capsys):
    member = trained[1][0]
    monkeypatch.setattr(messages, "decode", lambda content: 1 / 0)
    content = member.handle(b"")
    monkeypatch.undo()
    assert "could not answer (ZeroDivisionError)" in messages.decode(content)[0]["why"]
    assert "Traceback" in capsys.readouterr().err


def test_a_state_folder_belongs_to_one_worker_and_is_private(trained, tmp_path):
    config, members, _ = trained
    assert (tmp_path / "worker0").stat().st_mode & 0o077 == 0
    with pytest.raises(UserError, match="in use by another worker"):
        Worker(config, 0, tmp_path / "worker0", log=silent)
    members[0].close()
    (tmp_path / "worker0" / "state").write_bytes(b"damaged")
    with pytest.raises(UserError, match="is damaged"):
        Worker(config, 0, tmp_path / "worker0", log=silent)
    with pytest.raises(UserError, match="does not exist"):
        read_memory(tmp_path / "nobody")


# Flower's own simulation: the workers are wherever a message is.


def test_virtual_workers_train_as_the_simulation_does(tmp_path, monkeypatch):
    config = make(tmp_path / "run")
    flagfile = tmp_path / "settings.cfg"
    flagfile.write_text(settings.as_flagfile(config))
    monkeypatch.setattr(experiment, "cache_compilations", lambda config: None)
    processes = {}, {}  # what each of a pool of two knows

    def node(worker):
        asked = itertools.count(worker)

        def ask(content):
            monkeypatch.setattr(virtual, "_known", processes[next(asked) % 2])
            return virtual.answer(str(flagfile), worker, content)

        return ask

    assert run(fake.FakeGrid({i: node(i) for i in range(5)}), config)["absences"] == []
    memories = [read_memory(virtual.folder(config, i)) for i in range(5)]
    state = simulated(config, memories)
    for a, b in zip(jax.tree.leaves(params_of(config)), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(b).max())
    assert len({memory.private for memory in memories}) == 5  # nobody's keys are from the seed
    answer, _ = messages.decode(virtual.answer(str(flagfile), 7, b""))
    assert "worker=7 is no place among num_workers=5" in answer["why"]
    # Somebody else answers: that passes, and is no refusal, which would bar the node.
    with Worker(config, 0, virtual.folder(config, 0), log=silent), pytest.raises(InUseError):
        virtual.answer(str(flagfile), 0, b"")
    assert b"cannot be read" in virtual.answer(str(flagfile), 0, b"")


def test_only_nodes_of_a_simulation_are_virtual(monkeypatch):
    ray = types.SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert virtual.is_virtual({"partition-id": 0, "num-partitions": 5})
    assert not virtual.is_virtual({})
    monkeypatch.delitem(sys.modules, "ray")
    assert not virtual.is_virtual({"partition-id": 0, "num-partitions": 5})


# Set-up.


def with_hello(member, /, **changes):
    """A node that says other things of itself in the set-up."""

    def node(content):
        answer, arrays = messages.decode(member.handle(content))
        changed = answer | changes if answer["kind"] == "hello" else answer
        return messages.encode(changed, arrays)

    return node


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda g, w: g.nodes.pop(101), r"4 SuperNodes are connected after 0.2 s; num_workers=5 needs 5"),
        (lambda g, w: g.nodes.update({101: with_hello(w[1], worker=2)}), "Two SuperNodes say"),
        (lambda g, w: g.nodes.update({101: with_hello(w[1], worker=7)}), "is worker 7; with num_workers=5"),
        (lambda g, w: g.nodes.update({101: with_hello(w[1], worker="1")}), "it is worker '1'"),
        (
            lambda g, w: g.nodes.update({101: with_hello(w[1], public_key=bytes(32))}),
            "The public key 0{64} is a point of low order",
        ),
        (lambda g, w: g.nodes.update({101: with_hello(w[1], public_key=b"short")}), "place 1 has 5 bytes"),
        (lambda g, w: g.nodes.update({101: with_hello(w[1], public_key=None)}), "is of type NoneType"),
        (
            lambda g, w: g.nodes.update({101: with_hello(w[1], public_key=bytes([9]) + bytes(31))})
            or g.nodes.update({103: with_hello(w[3], public_key=bytes([9]) + bytes(31))}),
            "places 1 and 3 are the same",
        ),
        (lambda g, w: g.nodes.update({101: lambda content: None}), "failed at SuperNode 101: no answer"),
        (lambda g, w: g.nodes.update({101: lambda content: b"?"}), "A message of 1 bytes cannot be read"),
    ],
)  # fmt: skip
def test_a_bad_set_up_is_refused(tmp_path, change, sentence):
    config = make(tmp_path / "run", rounds=1)
    members = fake.workers(config, tmp_path)
    grid = grid_of(members)
    change(grid, members)
    with pytest.raises(UserError, match=sentence) as raised:
        run(grid, config)
    assert "\n" not in str(raised.value)
    # Nothing was spent: the same workers take part in the next set-up.
    assert run(grid_of(members), config)["rounds"] == 1


def test_other_settings_are_refused(tmp_path):
    config = make(tmp_path / "run")
    members = fake.workers(make(tmp_path / "other", clip_norm=5.0), tmp_path)
    with pytest.raises(UserError, match=r"Worker 0 refuses: .*clip_norm \(2.25 there, 5.0 here\)"):
        run(grid_of(members), config)


def test_the_number_of_workers_is_one_of_the_settings(tmp_path):
    with pytest.raises(UserError, match=r"num_workers \(5 there, 6 here\); they must be the same"):
        settings.check_same(make(tmp_path, num_workers=6), settings.decisive_json(make(tmp_path)))


def test_a_worker_refuses_public_keys_that_cannot_be(tmp_path):
    config = make(tmp_path / "run")
    session = b"s" * 16
    with Worker(config, 0, tmp_path / "w", log=silent) as worker:
        hello = {"kind": "hello", "session": session, "settings": settings.decisive_json(config)}
        own = messages.decode(worker.handle(messages.encode(hello)))[0]["public_key"]
        good = [own, *(secrets.public_key(identity.generate()) for _ in range(4))]
        for public_keys, sentence in [
            (good[:4], "There are 4 public keys; num_workers=5 of them are needed"),
            ([*good, good[1]], "There are 6 public keys; num_workers=5 of them are needed"),
            ([*good[:4], good[1]], "The public keys at places 1 and 4 are the same"),
            ([*good[:4], bytes(32)], "is a point of low order"),
            ([*good[:4], b"short"], "The public key at place 4 has 5 bytes"),
            ([good[1], own, *good[2:]], "it must be that of the worker's own private key"),
        ]:
            keys = {"kind": "keys", "session": session, "public_keys": public_keys, "signatures": [b""] * 5}
            assert sentence in refusal(worker, keys)
        assert worker.memory.public_keys == []


def test_swapped_keys_are_found_by_signatures(tmp_path):
    config = make(tmp_path / "run", rounds=1)
    private = [identity.generate() for _ in range(config.num_workers)]
    public = [identity.public_identity(key) for key in private]
    members = [
        Worker(
            config,
            i,
            tmp_path / f"w{i}",
            malicious=i == 4,
            log=silent,
            private_identity=private[i],
            identities=public,
        )
        for i in range(config.num_workers)
    ]  # fmt: skip
    mine = secrets.public_key(bytes(range(32)))
    grid = grid_of(members)
    grid.nodes[103] = with_hello(members[3], public_key=mine)
    with pytest.raises(
        UserError, match=f"Worker 0 refuses: The public key {mine.hex()} of worker 3 is not signed"
    ):
        run(grid, config)
    grid.nodes[103] = with_hello(members[3], signature=b"")
    with pytest.raises(UserError, match="of worker 3 is not signed by its identity"):
        run(grid, config)
    # A signature of another session is none.
    session, keys = b"a" * 16, [secrets.public_key(identity.generate()) for _ in public]
    signed = [
        identity.sign(p, session=session, worker=i, num_workers=5, public_key=k)
        for i, (p, k) in enumerate(zip(private, keys, strict=True))
    ]
    identity.check_signatures(public, signed, keys, session=session)
    with pytest.raises(UserError, match="not signed"):
        identity.check_signatures(public, signed, keys, session=b"b" * 16)
    assert run(grid_of(members), config)["absences"] == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"noise_mode": "projected"}, "noise_mode='projected' is for simulation"),
        ({"attack": "alie"}, "attack='alie' looks at what honest workers send"),
        ({"attack_factor": None}, "attack='bias_fixed' has no attack_factor"),
        ({"threat_model": "secldp"}, "threat_model='secldp' .* all workers may keep to the protocol"),
        ({"num_colluding": 0}, "threat_model='byzldp' with num_colluding=0 counts on noise"),
        ({"mesh_workers": 2}, "mesh_workers=2, .* are for simulations"),
        ({"tensorboard": "on"}, "tensorboard='on' are for simulations"),
        ({"num_workers": 1, "num_byzantine": 0, "attack": "none"}, "num_workers=1 is too few"),
    ],
)
def test_settings_that_only_a_simulation_can_have(tmp_path, changes, sentence):
    config = make(tmp_path / "run", **changes)
    with pytest.raises(UserError, match=sentence):
        run(fake.FakeGrid({}), config)
    with pytest.raises(UserError, match=sentence):
        Worker(config, 0, tmp_path / "w", log=silent)


@pytest.mark.parametrize(
    ("index", "options", "sentence"),
    [
        (5, {}, "worker=5 is no place among num_workers=5: it must be from 0 to 4"),
        (-1, {}, "worker=-1 is no place"),
        (4, {}, "Worker 4 has no part of the data"),
        (0, {"malicious": True}, "Worker 0 cannot be malicious"),
        (0, {"examples": "missing.npz"}, "missing.npz cannot be read"),
    ],
)
def test_a_worker_that_cannot_be(tmp_path, index, options, sentence):
    with pytest.raises(UserError, match=sentence):
        Worker(make(tmp_path / "run"), index, tmp_path / "w", log=silent, **options)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"images": np.zeros((9, 28, 28, 1), np.uint8)}, "holds no examples"),
        (
            {"images": np.zeros((9, 28, 28), np.uint8), "labels": np.zeros(9, int)},
            r"must be uint8 \[m, 28, 28, 1\]",
        ),
        ({"images": np.zeros((9, 28, 28, 1), np.uint8), "labels": np.full(9, 10)}, "from 0 to 9"),
        ({"images": np.zeros((3, 28, 28, 1), np.uint8), "labels": np.zeros(3, int)}, "has 3 examples"),
    ],
)
def test_examples_that_cannot_be_used(tmp_path, arrays, sentence):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(UserError, match=sentence):
        Worker(make(tmp_path / "run"), 0, tmp_path / "w", log=silent, examples=str(tmp_path / "own.npz"))


def test_a_flagfile_keeps_all_settings(tmp_path):
    config = make(tmp_path / "run", attack_factor=3.5)
    (tmp_path / "all.cfg").write_text(settings.as_flagfile(config))
    assert settings.read(str(tmp_path / "all.cfg")) == config
    with pytest.raises(UserError, match="does not exist"):
        settings.read(str(tmp_path / "none.cfg"))


def test_a_simulated_run_is_not_taken_for_a_federation(tmp_path):
    config = make(tmp_path / "run", rounds=1)
    experiment.run(config)
    (tmp_path / "run" / "summary.json").unlink()
    members = fake.workers(config, tmp_path)
    with pytest.raises(UserError, match="holds no session to go on with"):
        run(grid_of(members), config)


def test_timeouts_must_be_positive():
    with pytest.raises(UserError, match="round-timeout=0 must be a number of seconds greater than 0"):
        server.Timeouts(round=0)


@pytest.mark.parametrize("threat_model", ["none", "cdp", "byzldp"])
def test_what_absences_cost_is_said(threat_model):
    plan = privacy.calibrate(
        threat_model=threat_model,
        epsilon=5.0,
        delta=1e-4,
        num_workers=6,
        num_byzantine=2,
        rounds=3,
        clip_norm=1.0,
    )
    faults = [{"round": 1, "worker": w, "what": "late"} for w in (0, 3)]
    text = server.privacy_of_absences(plan, faults)
    assert "Up to 2 messages" in text
    assert {"none": "no noise", "cdp": "1.50 times", "byzldp": "privacy holds"}[threat_model] in text
    assert server.privacy_of_absences(plan, []) == "Every worker's message came in every round."
