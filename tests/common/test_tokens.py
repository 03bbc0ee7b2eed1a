"""The token dataset: zero-copy reading, and every kind of damage named."""

import json

import numpy as np
import pyarrow as pa
import pytest

from common.arrow import flat_views
from common.config import UserError
from common.tokens import TokenDataset


def rewrite(folder, **changes):
    path = folder / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(folder, *words, verify=True):
    with pytest.raises(UserError) as error:
        tokens = TokenDataset(str(folder))
        if verify:
            tokens.verify()
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


# ---- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_clips_come_back_as_written(make_tokens, random_clips, shards):
    clips = random_clips(5, 1, 9, 3, 7)
    tokens = TokenDataset(str(make_tokens(clips, texts=["a", "bä", "c", "d", "e"], shards=shards)))
    tokens.verify()
    assert len(tokens) == 5 and tokens.frames.tolist() == [5, 1, 9, 3, 7]
    for i, codes in enumerate(clips):
        assert np.array_equal(tokens.codes(i), codes) and tokens.codes(i).dtype == np.int16
    assert (tokens.id(np.int64(4)), tokens.text(1)) == ("clip-4", "bä")


def test_codes_are_views_of_the_mapped_file(make_tokens, random_clips):
    folder = make_tokens(random_clips(50, 60))
    before = pa.total_allocated_bytes()
    tokens = TokenDataset(str(folder))
    codes = tokens.codes(1)
    assert np.shares_memory(codes, tokens._values[0]) and np.shares_memory(codes, tokens.codes(1))
    assert not codes.flags.owndata and not codes.flags.writeable
    address = codes.__array_interface__["data"][0]
    spans = [line.split()[0].split("-") for line in open("/proc/self/maps") if str(folder) in line]
    assert any(int(low, 16) <= address < int(high, 16) for low, high in spans), "the codes are not in the file's map"
    assert pa.total_allocated_bytes() - before < 60 * 9 * 2, "Arrow copied the codes"


def test_sliced_and_chunked_columns_keep_their_clips(random_clips):
    """Arrow's `values` ignore a slice, its `offsets` do not: mixing them up shifts every clip."""
    clips = random_clips(3, 5, 2, 4, 6, 1, channels=2)
    whole = pa.array([c.reshape(-1) for c in clips], pa.list_(pa.int16()))
    column = pa.chunked_array([whole.slice(1, 2), whole.slice(4, 2)])
    chosen = [clips[i] for i in (1, 2, 4, 5)]
    frames = np.array([len(c) for c in chosen])
    values, chunk_of, starts = flat_views(column, 2 * frames, None, "codes")
    for i, codes in enumerate(chosen):
        flat = values[chunk_of[i]][starts[i] : starts[i] + 2 * frames[i]]
        assert np.array_equal(flat.reshape(-1, 2), codes)


def test_long_texts_and_patterns_are_found(make_tokens, random_clips):
    tokens = TokenDataset(str(make_tokens(random_clips(1, 1, 1), texts=["ä" * 5, "", "b" * 9])))
    assert tokens.long_texts(9).tolist() == [0]
    assert tokens.long_texts(0).tolist() == [0, 2]
    assert tokens.texts_matching("^b+$").tolist() == [2]


def test_a_text_that_is_null_is_empty(make_tokens, random_clips):
    tokens = TokenDataset(str(make_tokens(random_clips(1, 1), texts=[None, "b"])))
    assert tokens.text(0) == "" and tokens.long_texts(0).tolist() == [1] and tokens.texts_matching("b").tolist() == [1]


def test_the_fingerprint_follows_the_content(make_tokens, random_clips, tmp_path):
    import shutil

    clips, prints = random_clips(3, 4), []
    for texts in (["a", "b"], ["a", "b"], ["a", "c"]):
        folder = make_tokens(clips, texts=texts)
        prints.append(TokenDataset(str(folder)).fingerprint())
        shutil.rmtree(folder)
    assert prints[0] == prints[1] != prints[2]


# ---- refusing --------------------------------------------------------------------------------------------------


def test_another_codec_or_channel_count_names_both_values(make_tokens, random_clips):
    tokens = TokenDataset(str(make_tokens(random_clips(3), codec="encodec")))
    with pytest.raises(UserError, match="codec = 'encodec' but the model needs 'dac'"):
        tokens.require(codec="dac")
    with pytest.raises(UserError, match="channels = 9 but the model needs 18"):
        tokens.require(channels=18)
    tokens.require(codec="encodec", channels=9)


def test_a_folder_without_dataset_json_is_no_dataset(tmp_path):
    refused(tmp_path / "nowhere", "no dataset.json")
    refused(tmp_path, "no dataset.json")


@pytest.mark.parametrize("content", ["", "{", "3", "null", '"codec"', "[1]", "{}", '{"codec": "dac"}'])
def test_a_damaged_dataset_json_is_refused(make_tokens, random_clips, content):
    folder = make_tokens(random_clips(3))
    (folder / "dataset.json").write_text(content)
    refused(folder, "dataset.json")


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
@pytest.mark.parametrize("damage", ["delete", "truncate"])
def test_damage_to_the_files_of_the_datasets_library_is_refused(make_tokens, random_clips, name, damage):
    folder = make_tokens(random_clips(3))
    (folder / name).unlink() if damage == "delete" else (folder / name).write_text("{")
    refused(folder, str(folder))


def test_a_missing_arrow_file_is_named(make_tokens, random_clips):
    folder = make_tokens(random_clips(3, 4), shards=2)
    file = sorted(folder.glob("*.arrow"))[1]
    file.unlink()
    refused(folder, file.name, "is missing", verify=False)


@pytest.mark.parametrize("cut", [8, 1, 500])
def test_a_cut_tail_is_refused_at_once(make_tokens, random_clips, cut):
    """`datasets` itself reads a file without its last 8 bytes (the end-of-stream mark) and says nothing."""
    folder = make_tokens(random_clips(30))
    file = next(folder.glob("*.arrow"))
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-cut])
    refused(folder, file.name, f"has {size - cut} bytes, not {size}", verify=False)


def test_a_flipped_bit_is_found_by_verify(make_tokens, random_clips):
    clips = random_clips(30)
    folder = make_tokens(clips)
    file = next(folder.glob("*.arrow"))
    data = bytearray(file.read_bytes())
    data[data.index(clips[0].tobytes()) + 100] ^= 1
    file.write_bytes(data)
    assert not np.array_equal(TokenDataset(str(folder)).codes(0), clips[0])
    refused(folder, file.name, "checksum")


@pytest.mark.parametrize("code", [1024, -1, 32767])
@pytest.mark.parametrize("clip", [0, 2, 4])
def test_a_code_outside_the_codebook_names_the_clip(make_tokens, random_clips, code, clip):
    clips = random_clips(4, 5, 6, 1, 3)
    clips[clip][-1, -1] = code
    refused(make_tokens(clips, shards=2), f"'clip-{clip}'", f"code {code}", "0..1023")


def test_duplicate_ids_are_named(make_tokens, random_clips):
    refused(make_tokens(random_clips(3, 4, 5), ids=["a", "b", "a"]), "'a'", "twice")


def test_an_empty_clip_is_named(make_tokens, random_clips):
    refused(make_tokens(random_clips(3, 0, 5)), "'clip-1'", "empty")


@pytest.mark.parametrize("dtype", ["int32", "float64", "bool"])
def test_another_dtype_is_named(make_tokens, random_clips, dtype):
    refused(make_tokens(random_clips(3), dtype=dtype), dtype.replace("float64", "double"), "int16")


def test_codes_with_holes_are_refused(make_tokens):
    codes = [[1] * 9 + [None] * 9]
    refused(make_tokens([np.zeros((2, 9))], columns={"codes": codes}), "int16")


@pytest.mark.parametrize("column", ["id", "text", "codes", "frames"])
def test_a_missing_column_is_named(make_tokens, random_clips, column):
    refused(make_tokens(random_clips(3), columns={column: False}), column)


def test_frames_that_disagree_with_the_codes_name_the_clip(make_tokens, random_clips):
    refused(make_tokens(random_clips(3, 4, 5), columns={"frames": [3, 4, 6]}, shards=2), "'clip-2'")


def test_a_dataset_without_clips_is_refused(make_tokens):
    refused(make_tokens([]), "no clip")


def test_a_listed_file_outside_the_folder_is_refused(make_tokens, random_clips, tmp_path):
    folder = make_tokens(random_clips(3))
    (tmp_path / "secret").write_text("x")
    rewrite(folder, files=[{"name": "../secret", "bytes": 1, "sha256": "0"}])
    refused(folder, "../secret", verify=False)


def test_an_arrow_file_that_dataset_json_does_not_list_is_refused(make_tokens, random_clips):
    """Its checksum would never be looked at."""
    folder = make_tokens(random_clips(3, 4), shards=2)
    rewrite(folder, files=json.loads((folder / "dataset.json").read_text())["files"][:1])
    refused(folder, "data-00001-of-00002.arrow", verify=False)
