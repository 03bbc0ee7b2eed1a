"""models/mot/layout.py: ids, order, labels, against what is written out by hand."""

import numpy as np
import pytest

from common.errors import UserError
from common.loss import IGNORE
from models.mot.layout import Layout, code_ids, music

V = 128256
CODES = np.array([[1, 2, 3], [10, 20, 30], [100, 200, 300], [2047, 0, 5]])  # [4, 3] as earlier trainers stored it

GOLDEN = [128257, 130314, 132452, 136447, 128258, 130324, 132552, 134400, 128259, 130334, 132652, 134405]


def test_golden_ids():
    layout = Layout(V)
    assert (layout.bos, layout.eos) == (136448, 136449)
    inputs, codebook, labels = music(CODES.T, layout, final=True)
    assert inputs[:, 0].tolist() == [layout.bos, *GOLDEN]
    assert codebook[:, 0].tolist() == [4, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    # One label per position, in the column of its codebook, shifted once: the first code is A_BOS's label.
    shifted = [max(row) for row in labels.tolist()]
    assert shifted == [*GOLDEN, layout.eos]
    assert [row.index(max(row)) for row in labels.tolist()] == [0, 1, 2, 3] * 3 + [0]
    assert (np.sort(labels, axis=1)[:, :-1] == IGNORE).all()


def test_a_window_that_stops_early_has_no_end_label():
    _, _, labels = music(CODES.T, Layout(V), final=False)
    assert (labels[-1] == IGNORE).all() and (labels[:-1].max(1) > 0).all()


def test_codes_out_of_range_are_errors_never_clamped():
    for bad in (-1, 2048):
        with pytest.raises(UserError, match=f"code {bad} is outside"):
            code_ids(np.full((1, 4), bad), Layout(V))


def test_delayed_layout_by_hand():
    layout = Layout(V, codebooks=3, size=100, order="delay")
    b, e = layout.bos, layout.eos
    codes = np.array([[1, 2, 3], [4, 5, 6]])
    inputs, codebook, labels = music(codes, layout, final=True)
    i = codes + layout.first(np.arange(3))
    assert inputs.tolist() == [[b, b, b], [i[0, 0], b, b], [i[1, 0], i[0, 1], b], [e, i[1, 1], i[0, 2]]]
    x = IGNORE
    assert labels.tolist() == [[i[0, 0], x, x], [i[1, 0], i[0, 1], x], [e, i[1, 1], i[0, 2]], [x, x, i[1, 2]]]
    assert codebook.tolist() == [[3, 3, 3], [0, 3, 3], [0, 1, 3], [3, 1, 2]]
    inputs, _, labels = music(codes, layout, final=False)
    assert len(inputs) == 2 and labels.tolist() == [[i[0, 0], x, x], [i[1, 0], i[0, 1], x]]


@pytest.mark.parametrize("order", ["flat", "delay"])
@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("frames", [1, 2, 3, 4, 9])
def test_counts_known_from_the_length_are_those_of_the_labels(order, final, frames):
    layout = Layout(V, order=order)
    inputs, _, labels = music(np.zeros((frames, 4), dtype=int), layout, final)
    assert layout.targets(frames, final).tolist() == (labels != IGNORE).sum(0).tolist()
    assert len(inputs) <= layout.positions(frames) and (len(inputs) == layout.positions(frames) or not final)
