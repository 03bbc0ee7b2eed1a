"""models/mot/layout.py: ids, order, labels, against what is written out by hand."""

import numpy as np
import pytest

from common.errors import UserError
from common.loss import IGNORE
from models.mot.layout import Layout, flatten, music, unflatten

V = 128256
CODES = np.array([[1, 2, 3], [10, 20, 30], [100, 200, 300], [2047, 0, 5]])  # [4, 3] as earlier trainers stored it

GOLDEN = {
    "shared": [128257, 128266, 128356, 130303, 128258, 128276, 128456, 128256, 128259, 128286, 128556, 128261],
    "offset": [128257, 130314, 132452, 136447, 128258, 130324, 132552, 134400, 128259, 130334, 132652, 134405],
}


@pytest.mark.parametrize("ids", ["shared", "offset"])
def test_golden_ids(ids):
    layout = Layout(V, ids=ids)
    assert flatten(CODES.T, layout).tolist() == GOLDEN[ids]
    assert (layout.bos, layout.eos) == {"shared": (130304, 130305), "offset": (136448, 136449)}[ids]
    inputs, codebook, labels = music(CODES.T, layout, final=True)
    assert inputs[:, 0].tolist() == [layout.bos, *GOLDEN[ids]]
    assert codebook[:, 0].tolist() == [4, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    # One label per position, in the column of its codebook, shifted once: the first code is A_BOS's label.
    shifted = [max(row) for row in labels.tolist()]
    assert shifted == [*GOLDEN[ids], layout.eos]
    assert [row.index(max(row)) for row in labels.tolist()] == [0, 1, 2, 3] * 3 + [0]
    assert (np.sort(labels, axis=1)[:, :-1] == IGNORE).all()


def test_a_window_that_stops_early_has_no_end_label():
    _, _, labels = music(CODES.T, Layout(V), final=False)
    assert (labels[-1] == IGNORE).all() and (labels[:-1].max(1) > 0).all()


@pytest.mark.parametrize("ids", ["shared", "offset"])
@pytest.mark.parametrize("frames", [*range(1, 8), 500])
def test_unflatten_is_the_inverse_of_flatten(ids, frames):
    layout = Layout(V, ids=ids)
    codes = np.random.default_rng(frames).integers(0, 2048, (frames, 4))
    stream = flatten(codes, layout)
    assert np.array_equal(unflatten(stream, layout), codes)
    if frames > 1:
        wrong = (stream - V).reshape(4, frames).T % 2048  # what the first trainer's inference did
        assert (wrong == codes).mean() < 0.5


@pytest.mark.parametrize("ids", ["shared", "offset"])
def test_codes_and_ids_out_of_range_are_errors_never_clamped(ids):
    layout = Layout(V, ids=ids)
    for bad in (-1, 2048):
        with pytest.raises(UserError, match=f"code {bad} is outside"):
            flatten(np.full((1, 4), bad), layout)
    good = flatten(np.zeros((2, 4), dtype=int), layout)
    for bad in (V - 1, layout.bos, layout.eos):
        with pytest.raises(UserError, match=f"id {bad} at frame 1"):
            unflatten(np.concatenate([good[:5], [bad], good[6:]]), layout)
    with pytest.raises(UserError, match="not whole frames"):
        unflatten(good[:-1], layout)
    if ids == "offset":  # a code of the neighbour's range
        with pytest.raises(UserError, match="not a code of codebook 1"):
            unflatten(np.concatenate([good[:1], [V], good[2:]]), layout)


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
    assert layout.frames_in(layout.positions(frames)) == frames
