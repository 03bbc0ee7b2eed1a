"""The token dataset: zero-copy reading, and every kind of damage named."""

import json
import os
import time

import numpy as np
import pyarrow as pa
import pytest

from common import arrow
from common.errors import UserError
from common.tokens import TokenDataset
from helpers import support


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
    assert np.shares_memory(codes, tokens.codes(1))
    assert not codes.flags.owndata and not codes.flags.writeable
    address = codes.__array_interface__["data"][0]
    spans = [line.split()[0].split("-") for line in open("/proc/self/maps") if str(folder) in line]
    assert any(int(low, 16) <= address < int(high, 16) for low, high in spans), "the codes are not in the file's map"
    assert pa.total_allocated_bytes() - before < 60 * 9 * 2, "Arrow copied the codes"


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


# ---- names -------------------------------------------------------------------------------------------------------


def test_rows_are_found_by_name():
    draw = np.random.default_rng(0)
    names = [f"clip {i}" for i in draw.permutation(5000)]
    ids = pa.chunked_array([names[:1000], names[1000:1001], names[1001:]])
    wanted = [names[i] for i in draw.integers(0, 5000, 3000)] + ["clip 5000", None, "", "clip"]
    rows = arrow.rows_named(pa.chunked_array([wanted[:70], wanted[70:]]), ids)
    where = {name: row for row, name in enumerate(names)}
    assert rows.tolist() == [where.get(name, -1) for name in wanted]


# ---- verified once ---------------------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """Names of the data files that verifying opens."""
    names = []

    def counting(path, *more):
        names.append(path.name)
        return open(path, *more)

    monkeypatch.setattr(arrow, "open", counting, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return names


def age(folder, seconds=100):
    """As if the dataset had been written a while ago."""
    for file in folder.glob("*.arrow"):
        os.utime(file, (time.time() - seconds,) * 2)


def test_a_verified_dataset_is_not_read_again(make_tokens, random_clips, opened):
    folder = make_tokens(random_clips(30, 40), shards=2)
    age(folder)
    TokenDataset(str(folder)).verify()
    assert opened == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    again = TokenDataset(str(folder))
    again.check_rows = None  # nor are its rows looked at
    again.verify()
    assert len(opened) == 2


@pytest.mark.parametrize("change", ["content", "replaced by a copy", "dataset.json", "broken note"])
def test_a_changed_dataset_is_read_again(make_tokens, random_clips, opened, change):
    folder = make_tokens(random_clips(30))
    age(folder)
    TokenDataset(str(folder)).verify()
    [file], content = folder.glob("*.arrow"), next(folder.glob("*.arrow")).read_bytes()
    before = file.stat()
    if change == "content":
        file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        refused(folder, "checksum")
    elif change == "replaced by a copy":  # another inode, same size and time
        file.rename(folder / "old")
        file.write_bytes(content)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        TokenDataset(str(folder)).verify()
    elif change == "dataset.json":
        rewrite(folder, codebook_size=3)
        refused(folder, "outside 0..2")
    else:
        (folder / ".verified.json").write_text("{")
        TokenDataset(str(folder)).verify()
    assert len(opened) == 2


def test_a_file_written_just_now_is_not_remembered(make_tokens, random_clips, opened):
    """Its next change could leave the same time: a file system's clock ticks as rarely as once a second."""
    folder = make_tokens(random_clips(30))
    for _ in range(2):
        TokenDataset(str(folder)).verify()
    assert len(opened) == 2 and not (folder / ".verified.json").exists()


def test_for_a_read_only_folder_the_users_cache_remembers(make_tokens, random_clips, opened, monkeypatch, tmp_path):
    folder = make_tokens(random_clips(30))
    age(folder)
    (folder / ".verified.json").mkdir()  # cannot be replaced by a file, not even by root
    for _ in range(2):
        TokenDataset(str(folder)).verify()
    [note] = (tmp_path / "cache" / "audio-finetune").iterdir()
    assert len(opened) == 1 and note.name.endswith(".verified.json")
    assert not list(folder.glob("*.tmp")) or os.getuid() == 0


def test_hashing_gives_a_sign_of_life_per_chunk(make_tokens, random_clips, opened, monkeypatch):
    folder = make_tokens(random_clips(500, 600), shards=2)
    monkeypatch.setattr(arrow, "CHUNK", 1000)
    sizes = [file.stat().st_size for file in folder.glob("*.arrow")]
    signs = []
    TokenDataset(str(folder)).verify(lambda: signs.append(1))
    assert len(signs) >= sum(-(-size // 1000) for size in sizes) > 15


def test_weights_are_read_or_refused(tmp_path):
    def weights(*values):
        clips = [{"id": f"c{i}", "text": "x", "codes": np.zeros((3, 9))} for i in range(len(values))]
        folder = tmp_path / f"tokens-{len(list(tmp_path.iterdir()))}"
        return TokenDataset(str(support.write_tokens(folder, clips, columns={"weight": list(values)}))).weights()

    assert weights(1, 0, 2).tolist() == [1.0, 0.0, 2.0] and weights(0.5, 1.0).tolist() == [0.5, 1.0]
    for values, sentence in (
        ((1.0, -0.5), "clip 'c1' has the weight -0.5"),
        ((1.0, None), "clip 'c1' has the weight None"),
        (("heavy",), "the column `weight` does not hold numbers"),
        ((0.0, 0.0), "is 0 for every clip"),
    ):
        with pytest.raises(UserError, match=sentence):
            weights(*values)
