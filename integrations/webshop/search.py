"""WebShop's search: the results of its Lucene index (BM25, English analysis), computed without Lucene.

The numbers are Lucene's to the last bit of a 32-bit float, so that equal scores stay equal and the order of results is exact.
"""

import logging
import os
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from dreamgym_lg.errors import MissingDependency

try:
    import regex
    from nltk.stem.porter import PorterStemmer
except ImportError as error:
    raise MissingDependency.extra("nltk", "webshop") from error

logger = logging.getLogger(__name__)

RESULTS = 50
"""Most products that a search finds."""
_FORMAT = "1"
"""Of the files on disk; another format's are built anew."""
_K1, _B = np.float32(0.9), np.float32(0.4)
_LONGEST = 255
"""Characters of a token: Lucene cuts longer ones."""
_STOP_WORDS = frozenset(
    (  # noqa: SIM905 (a list would take a line a word)
        "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to "
        "was will with"
    ).split()
)

# --- Analysis --------------------------------------------------------------------------------------------------------

# Unicode's word boundaries (UAX #29) as of Unicode 9 and its emoji as of 12, which Lucene has. The installed Unicode is newer:
# where it counts more characters as letters or fewer as emoji, the classes below say so.
_PICTURES = (
    r"\xa9\xae\u203c\u2049\u2122\u2139\u2194-\u2199\u21a9\u21aa\u231a\u231b\u2328\u2388\u23cf\u23e9-\u23f3\u23f8-\u23fa\u24c2"
    r"\u25aa\u25ab\u25b6\u25c0\u25fb-\u25fe\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2714\u2716\u271d"
    r"\u2721\u2728\u2733\u2734\u2744\u2747\u274c\u274e\u2753-\u2755\u2757\u2763-\u2767\u2795-\u2797\u27a1\u27b0\u27bf\u2934"
    r"\u2935\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55\u3030\u303d\u3297\u3299\U0001f000-\U0001f0ff\U0001f10d-\U0001f10f\U0001f12f"
    r"\U0001f16c-\U0001f171\U0001f17e\U0001f17f\U0001f18e\U0001f191-\U0001f19a\U0001f1ad-\U0001f1e5\U0001f201-\U0001f20f"
    r"\U0001f21a\U0001f22f\U0001f232-\U0001f23a\U0001f23c-\U0001f23f\U0001f249-\U0001f3fa\U0001f400-\U0001f53d"
    r"\U0001f546-\U0001f64f\U0001f680-\U0001f6ff\U0001f774-\U0001f77f\U0001f7d5-\U0001f7ff\U0001f80c-\U0001f80f"
    r"\U0001f848-\U0001f84f\U0001f85a-\U0001f85f\U0001f888-\U0001f88f\U0001f8ae-\U0001f8ff\U0001f90c-\U0001f93a"
    r"\U0001f93c-\U0001f945\U0001f947-\U0001fffd"
)
_TONES = r"\U0001f3fb-\U0001f3ff"
_MARK = rf"[[\p{{WB=Extend}}\p{{WB=Format}}\p{{WB=ZWJ}}]--[{_TONES}]]"


def _word_pattern() -> str:
    """A token of letters, digits and underscores: runs of letters or digits, each joined inside by what joins its kind."""
    hebrew = r"\p{WB=Hebrew_Letter}"
    letter = rf"(?:[[\p{{WB=ALetter}}&&\p{{Alphabetic}}]{hebrew}\u05f3]{_MARK}*)"
    digit = rf"(?:[\p{{WB=Numeric}}\uff10-\uff19]{_MARK}*)"
    katakana = rf"(?:\p{{WB=Katakana}}{_MARK}*)"
    low = rf"(?:\p{{WB=ExtendNumLet}}{_MARK}*)"
    both = r"\p{WB=MidNumLet}'"
    in_letters = rf"(?:[{both}\p{{WB=MidLetter}}:\u02d7]{_MARK}*|(?<={hebrew})\"(?={hebrew}))"
    in_digits = rf"(?:[{both}\p{{WB=MidNum}}]{_MARK}*)"
    letters = rf"{letter}+(?:{in_letters}{letter}+)*(?:(?<={hebrew})')?"
    digits = rf"{digit}+(?:{in_digits}{digit}+)*"
    part = rf"(?:{katakana}+|(?:{letters}|{digits})+)"
    return rf"{low}*{part}(?:{low}+{part})*{low}*"


def _emoji_pattern() -> str:
    mark = rf"[{_MARK}--[\ufe0e\ufe0f]]*"
    picture = rf"\u200d*[{_PICTURES}]{mark}\ufe0f?"
    toned = rf"(?:\u200d*\p{{Emoji_Modifier_Base}}{mark})?[{_TONES}]{mark}"
    one = rf"(?:{toned}|{picture})"
    keycap = rf"[0-9#*]{mark}\ufe0f?\u20e3{mark}"
    flag = rf"(?:\p{{Regional_Indicator}}{_MARK}*){{2}}"
    joined = rf"(?:\u200d|(?<=\u200d)){one}"  # the joiner may have been taken for a mark
    return rf"{one}(?:[\U000e0020-\U000e007e]+\U000e007f|(?:{joined})*)|{keycap}|{flag}"


_TOKEN = regex.compile(
    rf"{_word_pattern()}|{_emoji_pattern()}|\p{{Line_Break=Complex_Context}}[\p{{Line_Break=Complex_Context}}{_MARK}]*"
    rf"|[\p{{Script=Han}}\p{{Script=Hiragana}}]{_MARK}*",
    regex.V1,
)
_ASCII_TOKEN = regex.compile(
    r"_*(?:[a-zA-Z]+(?:[.:'][a-zA-Z]+)*|[0-9]+(?:[.,;'][0-9]+)*)(?:_*(?:[a-zA-Z]+(?:[.:'][a-zA-Z]+)*|[0-9]+(?:[.,;'][0-9]+)*))*_*"
)
"""The same for text without other characters, four times as fast."""
_POSSESSIVE = ("'s", "\u2019s", "\uff07s")
_stemmer = PorterStemmer(PorterStemmer.MARTIN_EXTENSIONS)


@lru_cache(200_000)
def _term(token: str) -> str:
    """The term that a lower-case token is indexed under; "" for one that is not."""
    if token.endswith(_POSSESSIVE):
        token = token[:-2]
    return "" if token in _STOP_WORDS else _stemmer.stem(token, to_lowercase=False)


def analyse(text: str) -> list[str]:
    """The terms of a text in order: lower-case words without stop words and possessive `'s`, stemmed by Porter."""
    tokens = (_ASCII_TOKEN if text.isascii() else _TOKEN).findall(text.lower())
    cut = (token[at : at + _LONGEST] for token in tokens for at in range(0, len(token), _LONGEST))
    return [term for token in cut if (term := _term(token))]


# --- Index -----------------------------------------------------------------------------------------------------------


class SearchIndex(NamedTuple):
    """Postings of every term and the factors of their scores."""

    terms: Mapping[str, int]
    """Each term's number."""
    starts: NDArray[np.int64]
    """Shape (terms + 1,): where the documents of each term begin in the arrays below."""
    documents: NDArray[np.int32]
    scales: NDArray[np.float32]
    """1 + term frequency / (k1 * length factor), for each document of each term."""
    idf: NDArray[np.float32]
    """Shape (terms,)."""
    size: int
    """Number of documents, the empty ones included."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays; the terms' own strings are not counted."""
        return self.starts.nbytes + self.documents.nbytes + self.scales.nbytes + self.idf.nbytes

    def search(self, query: str) -> list[int]:
        """Numbers of the `RESULTS` best documents, the best first; of equal scores the lower number first."""
        counts = Counter(term for term in analyse(query) if term in self.terms)
        if not counts:
            return []
        numbers = [self.terms[term] for term in counts]
        spans = [slice(self.starts[number], self.starts[number + 1]) for number in numbers]
        weights = np.fromiter(counts.values(), np.float32, len(numbers)) * self.idf[numbers]
        weight = np.repeat(weights, [span.stop - span.start for span in spans])
        scores = weight - weight / np.concatenate([self.scales[span] for span in spans])
        documents = np.concatenate([self.documents[span] for span in spans])
        totals = np.bincount(documents, scores, self.size).astype(np.float32)  # bincount sums doubles, as Lucene does
        candidates = np.flatnonzero(totals)
        if len(candidates) > RESULTS:
            candidates = candidates[totals[candidates] >= np.partition(totals[candidates], -RESULTS)[-RESULTS]]
        return [int(number) for number in candidates[np.lexsort((candidates, -totals[candidates]))][:RESULTS]]


def load_index(documents: Sequence[str], *, cache: Path | None = None) -> SearchIndex:
    """The index of these texts, from the cache on disk or built anew; numbers are positions.

    A file is named by the texts' hash and put in place whole. Where the folder cannot be written, a warning is logged.

    Args:
        cache: Folder of the indexes. Default: `dreamgym-lg/webshop` in $XDG_CACHE_HOME or ~/.cache.
    """
    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dreamgym-lg" / "webshop"
    key = blake2b(_FORMAT.encode(), digest_size=16)
    for text in documents:
        key.update(text.encode("utf-8", "surrogatepass") + b"\0")
    file = folder / f"{key.hexdigest()}.npz"
    try:
        with np.load(file) as stored:
            return _index(
                bytes(stored["terms"]).decode(), stored["starts"], stored["documents"], stored["scales"], len(documents)
            )
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        pass
    terms, starts, numbers, scales = _build(documents)
    draft = folder / f"{key.hexdigest()}-{uuid4().hex}.draft"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as written:
            np.savez(written, terms=np.frombuffer(terms.encode(), np.uint8), starts=starts, documents=numbers, scales=scales)
        draft.replace(file)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        logger.warning("the search index cannot be kept in %s (%s): the next process builds it again", folder, error)
    return _index(terms, starts, numbers, scales, len(documents))


def _index(
    terms: str, starts: NDArray[np.int64], documents: NDArray[np.int32], scales: NDArray[np.float32], size: int
) -> SearchIndex:
    frequencies = np.diff(starts)
    holding = len(np.unique(documents))  # Lucene counts the documents that have terms
    idf = np.log(1 + (holding - frequencies + 0.5) / (frequencies + 0.5)).astype(np.float32)
    numbers = {term: number for number, term in enumerate(terms.split("\n"))} if terms else {}
    return SearchIndex(numbers, starts, documents, scales, idf, size)


def _build(texts: Sequence[str]) -> tuple[str, NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """All terms, one a line, and the arrays of `SearchIndex`."""
    terms: dict[str, int] = {}
    numbers, counts, different, lengths = array("i"), array("i"), array("i"), array("i")
    for text in texts:
        counts_in_text = Counter(analyse(text))
        numbers.extend(terms.setdefault(term, len(terms)) for term in counts_in_text)
        counts.extend(counts_in_text.values())
        different.append(len(counts_in_text))
        lengths.append(counts_in_text.total())
    of_term = np.frombuffer(numbers, np.int32)
    order = np.argsort(of_term, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(of_term, minlength=len(terms)))]).astype(np.int64)
    documents = np.repeat(np.arange(len(texts), dtype=np.int32), different)
    average = np.float32(sum(lengths) / max(sum(map(bool, lengths)), 1))
    kept = np.array([_kept_length(length) for length in lengths], np.float32)
    factors = np.float32(1) / (_K1 * ((np.float32(1) - _B) + _B * kept / average))
    scales = np.float32(1) + np.frombuffer(counts, np.int32).astype(np.float32) * factors[documents]
    return "\n".join(terms), starts, documents[order], scales[order]


def _kept_length(length: int) -> int:
    """A document's length in Lucene's one byte: four binary digits of the part above 24."""
    above = max(length - 24, 0)
    cut = max(above.bit_length() - 4, 0)
    return length - above + (above >> cut << cut)
