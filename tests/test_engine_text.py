import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenweave.engine.text import TextStream


class Bytes:
    """Token i is byte i; 256 is special."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class Words:
    """Token i is a word; words are separated by spaces, but a text doesn't begin with one (as SentencePiece decodes)."""

    words = ("Hello", "wor", "ld", "STOP", "!")

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(self.words[i] for i in ids)


@given(st.text(max_size=20), st.lists(st.text(alphabet="abé€😀", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300, deadline=None)
def test_text_is_the_whole_decoded_text_up_to_the_first_stop_string(text, stop):
    text = text + "aé€b😀ab€a"
    stream = TextStream(Bytes(), stop)
    deltas = []
    for byte in text.encode():
        deltas.append(stream.push(byte))
        if stream.stopped:
            break
        assert not any(s in stream.text for s in stop)
    deltas.append(stream.finish())
    places = [(text.find(s), s) for s in stop if s in text]
    assert stream.stopped == bool(places)
    assert "".join(deltas) == stream.text
    if not places:
        assert stream.text == text
    else:  # the first to be complete, and of those that complete with the same character, the one that begins first
        end = min(place + len(s) for place, s in places)
        begin = min(place for place, s in places if place + len(s) == end)
        assert stream.text == text[:begin]


def test_what_may_become_a_stop_string_is_held_back():
    stream = TextStream(Bytes(), ["END"])
    assert [stream.push(b) for b in b"aENENDx"] == ["a", "", "", "EN", "", "", ""]
    assert stream.stopped
    assert stream.text == "aEN"
    assert stream.finish() == ""


def test_held_back_text_comes_at_the_end():
    stream = TextStream(Bytes(), ["END"])
    assert [stream.push(b) for b in b"aEN"] == ["a", "", ""]
    assert stream.finish() == "EN"
    assert not stream.stopped


def test_unfinished_characters_are_held_back():
    stream = TextStream(Bytes())
    assert [stream.push(b) for b in "é€".encode()] == ["", "é", "", "", "€"]
    stream.push("€".encode()[0])
    assert stream.finish() == "\ufffd"


def test_special_tokens_leave_no_text():
    stream = TextStream(Bytes())
    assert [stream.push(i) for i in (104, 256, 105)] == ["h", "", "i"]


@pytest.mark.parametrize("stop", ["ld STOP", "d S", "STOP"])
def test_spaces_between_tokens_survive_and_stop_strings_cross_tokens(stop):
    stream = TextStream(Words())
    assert [stream.push(i) for i in range(3)] == ["Hello", " wor", " ld"]
    stream = TextStream(Words(), [stop])
    for i in range(4):
        stream.push(i)
    assert stream.stopped
    assert stream.text == "Hello wor ld STOP".split(stop)[0]
