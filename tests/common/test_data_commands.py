"""Commands of data/ that a process with a model runs in another one."""

import numpy as np
import pytest

from common.data_commands import encode_recording, run_data
from common.errors import UserError
from common.tokens import TokenDataset


@pytest.mark.long
def test_a_recording_gets_the_codes_it_has_in_a_dataset_also_through_a_link(demo, tmp_path):
    tokens = TokenDataset(str(demo / "tokens/train"))
    (tmp_path / "voice.wav").symlink_to(demo / "audio/train/ada_000.wav")
    codes = encode_recording(tmp_path / "voice.wav", "--voice", "dac", demo / "codec")
    [row] = [i for i in range(len(tokens)) if tokens.id(i) == "train-ada_000"]
    assert np.array_equal(codes, tokens.codes(row))
    with pytest.raises(UserError, match=r"data/decode.py failed: .*no.npy"):
        run_data("decode.py", "--codec-weights", demo / "codec", tmp_path / "no.npy")


def test_a_missing_recording_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="--voice .*no.wav does not exist"):
        encode_recording(tmp_path / "no.wav", "--voice", "dac", tmp_path)
