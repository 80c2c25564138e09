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
_FORMAT = "2"
"""Format of the files on disk; those of another are built anew."""
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

_BOUNDARY = regex.compile(r"(?w)\b", regex.V1)
"""Unicode's word boundaries (UAX #29). Lucene has them but for scripts without spaces, such as Thai."""
_WORD = regex.compile(
    r"_*[\p{Alphabetic}\p{Nd}\p{Extended_Pictographic}\p{Regional_Indicator}"
    r"\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2763-\u2767]"  # pictures of the older Unicode that Lucene has
)
_POSSESSIVE = ("'s", "\u2019s", "\uff07s")
_stemmer = PorterStemmer(PorterStemmer.MARTIN_EXTENSIONS)


@lru_cache(200_000)
def _term(token: str) -> str:
    """The term that a lower-case token is indexed under; "" for one that is not."""
    if token.endswith(_POSSESSIVE):
        token = token[:-2]
    return "" if token in _STOP_WORDS else _stemmer.stem(token, to_lowercase=False)


def analyse(text: str) -> list[str]:
    """The terms of a text in order. Lower-case words without stop words and possessive `'s`, stemmed by Porter."""
    tokens = (part for part in _BOUNDARY.split(text.lower()) if _WORD.match(part))
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

    def search(self, query: str) -> list[int]:
        """Numbers of the `RESULTS` best documents, the best first. Of equal scores the lower number comes first."""
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
    """The index of these texts, from the cache on disk or built anew. Numbers are positions.

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
