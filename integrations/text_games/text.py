"""Texts of observations: their one form, and hashes of them."""

from hashlib import blake2b


def one_line(text: str) -> str:
    """The text with every run of white space made one space: how observations are kept and compared."""
    return " ".join(text.split())


def digest(*parts: str) -> str:
    """16 hexadecimal digits that stand for `parts`, on every machine and for ever."""
    return blake2b("\x1f".join(parts).encode(), digest_size=8).hexdigest()
