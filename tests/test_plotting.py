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
