"""The one way from a text to ids, against DiaTokenizer."""

import functools
import json
import re
import unicodedata

import numpy as np
import pytest

from common.errors import UserError
from models.dia.layout import augment_tags, continue_text, read_tag_map, split_text, text_bytes

TEXTS = [
    "[S1] Hello. [S2] Hi!",
    "[S1][S2][S1]",
    "[S1] Größe, naïve, Ærø, çà et là",
    "日本語のテキスト 한국어 العربية",
    "emoji 🎧👩‍👩‍👧 and (laughs)",
    "[S3] [s1] [S1 ] S1 []",
    " leading and  double blanks ",
    "~!@#$%^&*()_+{}|:<>?`-=[];',./\\\"",
    "\x80\x9f are letters to UTF-8",
    "",
]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import DiaTokenizer

    return DiaTokenizer()


def ids(text, tag_map=None):
    return text_bytes(text, tag_map or {}, "x").tolist()


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_the_hf_tokenizers(text, tokenizer):
    assert ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_random_texts_equal_the_hf_tokenizers(tokenizer):
    rng = np.random.default_rng(0)
    pieces = ["[S1]", "[S2]", " ", "a", "Z", ".", "ä", "é", "ß", "中", "🎧", "[", "]", "S1"]
    for _ in range(200):
        text = "".join(rng.choice(pieces, size=rng.integers(1, 30)))
        assert ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_composed_and_decomposed_letters_are_the_same_text():
    assert ids(unicodedata.normalize("NFD", "Größe é")) == ids("Größe é") == list("Größe é".encode())


def test_line_breaks_are_blanks_and_nul_is_dropped():
    """Byte 0 is padding: with a mask of 1 it would be part of every unconditional text."""
    assert ids("a\nb\tc\rd\0e") == list(b"a b c de")


@pytest.mark.parametrize("char", ["\x01", "\x02", "\x03", "\x07", "\x0b", "\x1b", "\x7f"])
def test_a_stray_control_character_is_refused_with_the_clip(char):
    with pytest.raises(UserError, match="'clip-7'"):
        text_bytes(f"a{char}b", {}, "clip-7")


# ---- tag map ---------------------------------------------------------------------------------------------------


def write_map(tmp_path, content):
    path = tmp_path / "tags.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def test_a_tag_becomes_the_id_that_the_hf_tokenizer_gives_its_byte(tmp_path, tokenizer):
    tag_map = read_tag_map(write_map(tmp_path, {"[de]": 4, "[nl]": 14}))
    assert tag_map == {"[de]": 4, "[nl]": 14}
    mapped = ids("[de] [S1] Hallo [nl]", tag_map)
    assert mapped == [4, 32, 1, *b" Hallo ", 14]
    assert mapped == tokenizer("\x04 [S1] Hallo \x0e", add_special_tokens=False)["input_ids"]


def test_a_tag_that_contains_another_keeps_its_own_byte(tmp_path):
    tag_map = read_tag_map(write_map(tmp_path, {"[de]": 4, "[de][old]": 5}))
    assert ids("[de][old] [de]", tag_map) == [5, 32, 4]


def test_a_tag_matches_however_its_letters_are_composed(tmp_path):
    tag_map = read_tag_map(write_map(tmp_path, {unicodedata.normalize("NFD", "[é]"): 4}))
    assert ids("[é]", tag_map) == ids(unicodedata.normalize("NFD", "[é]"), tag_map) == [4]


def test_no_file_is_no_map():
    assert read_tag_map("") == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "JSON"),
        ([1], "must be an object"),
        ({"[de]": "4"}, "must be an object"),
        ({"[de]": True}, "True"),
        ({"[de]": 4, "[fr]": 4}, "share"),
        ({"": 4}, "empty"),
        ({"[S1]": 4}, r"\[S1\]"),
        *(({"[de]": byte}, str(byte)) for byte in (-1, 0, 1, 2, 8, 13, 32, 127, 255, 256)),
    ],
)
def test_a_map_that_would_collide_is_refused(content, words, tmp_path):
    with pytest.raises(UserError, match=words):
        read_tag_map(write_map(tmp_path, content))


def test_a_missing_map_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere.json"):
        read_tag_map(str(tmp_path / "nowhere.json"))


# ---- tag prompts -----------------------------------------------------------------------------------------------

TAGS = "calm, piano, 90 bpm, night"


def split(text):
    return text.split(", ")


def test_tags_are_shuffled_but_none_is_lost_without_dropout():
    seen = {augment_tags(TAGS, 0.0, 0, epoch, "x") for epoch in range(40)}
    assert len(seen) > 10 and all(sorted(split(text)) == sorted(split(TAGS)) for text in seen)


def test_each_tag_is_dropped_with_the_given_probability():
    kept = [split(augment_tags(TAGS, 0.3, 0, 0, f"clip-{i}")) for i in range(2000)]
    for tag in split(TAGS):
        share = np.mean([tag in tags for tags in kept])
        assert abs(share - 0.7) < 4 * (0.3 * 0.7 / 2000) ** 0.5


def test_one_tag_is_always_kept():
    kept = [augment_tags(TAGS, 1.0, 0, 0, f"clip-{i}") for i in range(200)]
    assert set(kept) == set(split(TAGS))


@pytest.mark.parametrize("text", ["", " ", ",", " , ,"])
def test_a_prompt_without_tags_stays_as_it_is(text):
    assert augment_tags(text, 0.5, 0, 0, "x") == text


def test_the_key_alone_decides():
    import random

    before = augment_tags(TAGS, 0.3, 0, 1, "x")
    random.seed(4), np.random.seed(4)
    assert augment_tags(TAGS, 0.3, 0, 1, "x") == before


# ---- long texts ------------------------------------------------------------------------------------------------


def test_a_long_text_is_split_where_it_pauses_and_no_word_is_lost():
    text = "[S1] One two. Three, four five! Six? [S2] Seven eight nine ten. (laughs) [S1] Eleven; twelve thirteen."
    for limit in range(16, 120):
        parts = split_text(text, limit, size)
        assert all(re.match(r"\[S[12]\] ", part) and size(part) <= limit for part in parts)
        assert functools.reduce(continue_text, parts).split() == text.split()
        spoken = [[word for word in part.split() if word[0] != "["] for part in parts]
        assert sum(spoken, []) == [word for word in text.split() if word[0] != "["]
    assert split_text(text, 200, size) == [text]
    assert split_text(text, 40, size) == [
        "[S1] One two. Three, four five! Six?",
        "[S2] Seven eight nine ten. (laughs)",
        "[S1] Eleven; twelve thirteen.",
    ]
    assert split_text("[S1] 你好。我是谁？", 13, size) == ["[S1] 你好。", "[S1] 我是谁？"]
    assert split_text("[S1] ab " + "c" * 30, 12, size) == ["[S1] ab", "[S1] " + "c" * 30], "a long word stays whole"


def size(text):
    return len(text_bytes(text, {}, "text"))


@pytest.mark.parametrize(
    ("before", "text", "expected"),
    [
        ("[S1] One.", "[S1] Two.", "[S1] One. Two."),
        ("[S1] One. [S2] Two.", "[S1] Three.", "[S1] One. [S2] Two. [S1] Three."),
        ("[S1] One. [S2] Two. ", "[S2] Three.", "[S1] One. [S2] Two. Three."),
        ("[S2] One. [S1] Two.", "[S1] Three. [S2] Four.", "[S2] One. [S1] Two. Three. [S2] Four."),
    ],
)
def test_a_speaker_who_goes_on_is_not_named_again(before, text, expected):
    assert continue_text(before, text) == expected
