"""The raw bytes that a token stands for: the byte-level alphabet and SentencePiece's markers."""

from __future__ import annotations

import re
from enum import Enum
from functools import cache

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Family(Enum):
    """How a vocabulary spells bytes.

    BYTE_LEVEL: every byte has a printable character of its own (GPT-2). SENTENCEPIECE: text as it is, with U+2581
    for a space and `<0xNN>` for a byte that has no token.
    """

    BYTE_LEVEL = "byte-level BPE"
    SENTENCEPIECE = "SentencePiece"


@cache
def byte_alphabet() -> dict[int, int]:
    """Map the code point of each of the 256 byte-level characters to its byte, for `str.translate`.

    Printable Latin-1 characters stand for themselves; the other bytes take the code points from 256 on, in order
    (Radford et al. 2019, the GPT-2 encoder).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {**{byte: byte for byte in printable}, **{256 + index: byte for index, byte in enumerate(others)}}


def raw_bytes(token: str, family: Family, added: bool) -> bytes:
    """The bytes of one vocabulary entry; `added` tokens are plain text in either family."""
    if family is Family.SENTENCEPIECE:
        match = None if added else _BYTE_TOKEN.fullmatch(token)
        if match:
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode("utf-8", "replace")
    alphabet = byte_alphabet()
    if not added and all(ord(char) in alphabet for char in token):
        return token.translate(alphabet).encode("latin-1")
    return token.encode("utf-8", "replace")
