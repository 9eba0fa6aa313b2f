"""Streaming: pieces add up to the full text, characters stay whole, stop texts never leak."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowlane.ops.text_stream import StopFilter, TextStream


class Bytes:
    """Byte-level BPE in small: an id below 256 is a byte, 300 the bytes of "né", 999 special."""

    def decode(self, ids: Sequence[int]) -> str:
        pieces = [{300: "né".encode()}.get(i) or bytes([i]) for i in ids if i != 999]
        return b"".join(pieces).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id == 999

    def is_byte_piece(self, token_id: int) -> bool:
        return False


def stream(ids: Sequence[int], stop: Sequence[str] = (), tokenizer=None) -> tuple[list[str], str]:
    """The pieces as the ids come, and what `finish` adds."""
    text_stream = TextStream(tokenizer or Bytes(), stop)
    return [text_stream.push(token_id) for token_id in ids], text_stream.finish()


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the stop text that is complete first, found character by character."""
    for end in range(len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word)]
        if found:
            return text[: end - max(map(len, found))]
    return text


def test_a_character_comes_whole():
    pieces, rest = stream([*"a😀b".encode(), 999, *"é".encode()])
    assert pieces == ["a", "", "", "", "😀", "b", "", "", "é"]
    assert rest == ""


def test_bytes_that_are_no_text_show_once_that_is_certain():
    assert stream([0xF0, 0x9F, 0x41]) == (["", "", "\ufffdA"], "")
    assert stream([0xFF, 0xFF]) == (["", "\ufffd"], "\ufffd")
    assert stream([*"é".encode(), 0xC3]) == (["", "é", ""], "\ufffd")


@given(st.lists(st.sampled_from([*range(256), 300, 999]), max_size=40))
def test_pieces_add_up_to_the_whole(ids):
    pieces, rest = stream(ids)
    assert "".join(pieces) + rest == Bytes().decode(ids)


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_stop_texts_never_leak(text, stop, data):
    stop_filter, passed, rest = StopFilter(stop), "", text
    while rest:
        length = data.draw(st.integers(1, len(rest)))
        passed += stop_filter.push(rest[:length])
        rest = rest[length:]
        assert cut(text, stop).startswith(passed)
    passed += stop_filter.finish()
    assert passed == cut(text, stop)
    assert stop_filter.is_stopped == (passed != text)


def test_only_what_may_become_a_stop_text_is_held_back():
    stop_filter = StopFilter(["</end>", "###"])
    pieces = ["Hello", " <", "b> #", "#", "1 </en", "d> more"]
    assert [stop_filter.push(piece) for piece in pieces] == ["Hello", " ", "<b> ", "", "##1 ", ""]
    assert stop_filter.is_stopped
    assert stop_filter.finish() == ""


def test_a_stop_text_may_end_in_what_was_held_back():
    pieces, rest = stream([*b"ab", 0xC3], stop=["b\ufffd"])
    assert pieces == ["a", "", ""]
    assert rest == ""


@pytest.mark.parametrize("stop", [["é"], ["x", "n"]])
def test_nothing_follows_a_stop_text(stop):
    text_stream = TextStream(Bytes(), stop)
    pieces = [text_stream.push(token_id) for token_id in [*b"a", 300, *b"more"]]
    assert text_stream.is_stopped
    assert "".join(pieces) + text_stream.finish() == ("an" if stop == ["é"] else "a")
