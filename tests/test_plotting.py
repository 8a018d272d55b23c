import sys

import numpy as np
import pytest

from cafcor_jax import plotting, workdir


def metrics(rounds, **columns):
    base = {name: np.ones(rounds) for name in workdir.COLUMNS} | {"round": np.arange(1.0, rounds + 1)}
    return base | columns


@pytest.mark.parametrize("rounds", [1, 30, 400])
def test_curves_show_accuracy_loss_and_epsilon(tmp_path, rounds):
    values = metrics(rounds, test_accuracy=np.linspace(0.1, 0.8, rounds))
    figure = plotting.curves(values, "a run")
    assert [axes.get_title().split()[0] for axes in figure.axes] == ["Test", "Training", "Privacy"]
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), 100 * values["test_accuracy"])
    plotting.save(figure, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_curves_leave_out_what_was_not_measured(tmp_path):
    values = metrics(
        4,
        test_accuracy=np.array([np.nan, 0.4, np.nan, 0.5]),
        loss=np.array([2.0, np.nan, np.inf, 1.0]),
        epsilon=np.full(4, np.inf),
    )
    figure = plotting.curves(values, "a run without privacy")
    assert len(figure.axes) == 2
    assert figure.axes[0].lines[0].get_xdata().tolist() == [2, 4]
    assert figure.axes[1].lines[0].get_xdata().tolist() == [1, 4]
    plotting.save(figure, tmp_path / "curves.png")


def test_a_single_round_shows_in_every_panel():
    figure = plotting.curves(metrics(1), "a run")
    assert all(axes.lines[0].get_marker() not in ("", "None") for axes in figure.axes)
    assert plotting.curves(metrics(2), "a run").axes[2].lines[0].get_marker() == ""


# Who was filtered when.


def weights(rounds, n, f, seed=0):
    """Some workers of each kind got nothing, the others a little or a lot."""
    generator = np.random.default_rng(seed)
    values = generator.random((rounds, n)) * (generator.random((rounds, n)) < 0.8)
    values[:, 0] = 1.0
    values[:, n - f :] *= 0.3
    return (values / values.sum(1, keepdims=True)).astype(np.float32)


def colours(figure, width=200, height=400):
    """The heat map as it is drawn, [height, width, 3], lowest row first."""
    axes = figure.axes[0]
    for artist in (*axes.lines, *axes.spines.values()):
        artist.set_visible(False)  # The lines between are not cells.
    figure.canvas.draw()
    box = axes.get_window_extent()
    picture = np.asarray(figure.canvas.buffer_rgba())[::-1, :, :3]
    x = np.linspace(box.x0, box.x1, width, endpoint=False) + box.width / width / 2
    y = np.linspace(box.y0, box.y1, height, endpoint=False) + box.height / height / 2
    return picture[np.ix_(y.astype(int), x.astype(int))]


SIZES = [(1, 10, 3), (30, 10, 1), (30, 100, 10), (400, 300, 3), (1000, 5, 2), (3, 300, 149)]


@pytest.mark.parametrize(("rounds", "n", "f"), SIZES)
def test_filtering_shows_every_weight_and_what_the_malicious_ones_got(tmp_path, rounds, n, f):
    values = weights(rounds, n, f)
    figure = plotting.filtering(values, f, "a run")
    heat_map, total = figure.axes[:2]
    honest, malicious = (np.ma.getdata(image.get_array()) for image in heat_map.images)
    np.testing.assert_allclose(honest, n * values[:, : n - f].T, rtol=1e-6)
    np.testing.assert_allclose(malicious, n * values[:, n - f :].T, rtol=1e-6)
    line, share = total.lines
    np.testing.assert_array_equal(line.get_xdata(), np.arange(1, rounds + 1))
    np.testing.assert_allclose(line.get_ydata(), 100 * values[:, n - f :].sum(1, dtype=float), rtol=1e-6)
    np.testing.assert_allclose(share.get_ydata(), 100 * f / n)
    assert f"f/n = {100 * f / n:.1f}" in total.get_title(loc="left")
    # The malicious workers are the upper block, never too thin, and the line is between.
    low, middle, high = heat_map.get_ylim()[0], heat_map.lines[0].get_ydata()[0], heat_map.get_ylim()[1]
    assert [image.get_extent() for image in heat_map.images] == [
        [0.5, rounds + 0.5, low, middle],
        [0.5, rounds + 0.5, middle, high],
    ]
    assert high - middle >= max(0.2 * (high - low), f) * (1 - 1e-9)
    assert [text.get_text() for text in heat_map.texts] == ["Honest", "Malicious"]
    plotting.save(figure, tmp_path / "filtering.png")
    assert (tmp_path / "filtering.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_filtering_draws_zero_black_and_nothing_else():
    n, f = 8, 2
    values = np.full((4, n), 1 / n)  # one share: white
    values[0, 0], values[1, 1], values[2, 7] = 0, 2e-9 / n, 0  # filtered; nearly; filtered
    values[3, 3] = 1e-17  # what rounding leaves of a filtered worker
    values[3, 6] = 0.5  # beyond the scale
    cells = colours(plotting.filtering(values, f, "a run"), width=4, height=1000).astype(int)

    def cell(round, worker):
        # Six honest workers have a height of 1, two malicious ones too.
        return cells[int((worker + 0.5) / n * 1000), round].tolist()

    assert cell(0, 0) == cell(2, 7) == cell(3, 3) == [0, 0, 0]
    assert cell(1, 1) == [0xD5, 0x5E, 0x00]
    assert cell(3, 6) == [0x00, 0x72, 0xB2]
    special = {(0, 0), (1, 1), (2, 7), (3, 3), (3, 6)}
    rest = [cell(t, i) for t in range(4) for i in range(n) if (t, i) not in special]
    assert np.min(rest) >= 250


def test_filtering_shows_single_cells_of_long_runs_of_many_workers():
    rounds, n, f = 1000, 300, 20
    values = np.full((rounds, n), 1 / n)
    values[np.arange(0, rounds, 50), 100] = 0  # one round in fifty, one worker
    figure = plotting.filtering(values, f, "a run")
    figure.set_dpi(150)  # as it is saved
    axes = figure.axes[0]
    figure.canvas.draw()
    box = axes.get_window_extent()
    assert box.width >= rounds and box.height >= n
    inside = np.asarray(figure.canvas.buffer_rgba())[::-1, int(box.x0) + 3 : int(box.x1) - 2, :3]
    row = int(box.y0 + box.height * 100.5 / axes.get_ylim()[1])
    black = inside[row].max(1) < 10
    assert (np.diff(black.astype(int)) == 1).sum() >= 19  # the first may begin at the edge


def test_filtering_without_malicious_workers(tmp_path):
    values = weights(30, 12, 0)
    figure = plotting.filtering(values, 0, "nobody is malicious")
    heat_map = figure.axes[0]
    (image,) = heat_map.images
    np.testing.assert_allclose(np.ma.getdata(image.get_array()), 12 * values.T, rtol=1e-6)
    assert not heat_map.lines and [text.get_text() for text in heat_map.texts] == ["Honest"]
    assert len(figure.axes) == 2  # the other is the colour scale
    assert heat_map.get_xlabel() == "Round"
    plotting.save(figure, tmp_path / "filtering.png")


@pytest.mark.parametrize(("rounds", "n", "f"), [*SIZES, (1, 5, 0)])
def test_filtering_names_rounds_and_workers_by_whole_numbers(rounds, n, f):
    figure = plotting.filtering(weights(rounds, n, f), f, "a run")
    heat_map = figure.axes[0]
    bottom = figure.axes[1] if f else heat_map
    low, high = bottom.get_xlim()
    ticks = [tick for tick in bottom.get_xticks() if low <= tick <= high]
    assert 1 <= len(ticks) <= 12
    assert all(tick == int(tick) and 1 <= tick <= rounds for tick in ticks)
    names = {
        int(label.get_text()): y
        for y, label in zip(heat_map.get_yticks(), heat_map.get_yticklabels(), strict=True)
    }
    assert all(0 <= worker < n for worker in names)
    blocks = [(0, n - f), (n - f, n)] if f else [(0, n)]
    for image, (first, end) in zip(heat_map.images, blocks, strict=True):
        _, _, low, high = image.get_extent()
        inside = {worker: y for worker, y in names.items() if first <= worker < end}
        assert inside
        for worker, y in inside.items():
            assert y == pytest.approx(low + (worker - first + 0.5) / (end - first) * (high - low))


@pytest.mark.parametrize(
    ("values", "f", "message"),
    [
        (np.full((3, 5), np.nan), 1, "the rule gives no weights"),
        (np.array([[0.5, np.inf]]), 1, "not finite"),
        (np.ones(5), 1, r"weights of shape \(5,\) must be \[rounds, workers\]"),
        (np.ones((0, 5)), 1, r"weights of shape \(0, 5\)"),
        (np.ones((3, 5)), 5, "num_byzantine=5 must be at least 0 and less than the 5 workers"),
        (np.ones((3, 5)), -1, "num_byzantine=-1 must be"),
    ],
)
def test_filtering_refuses_what_it_cannot_show(values, f, message):
    with pytest.raises(ValueError, match=message):
        plotting.filtering(values, f, "a run")
