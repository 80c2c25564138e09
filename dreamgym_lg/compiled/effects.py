"""Documents after a writing call whose rule reads them."""

from collections.abc import Mapping, Sequence
from typing import Any

from dreamgym_lg.compiled.examples import Binding, Example, equal_json, place_of
from dreamgym_lg.compiled.expressions import Build, Expression, Ref, Scope
from dreamgym_lg.compiled.generalizing import generalize
from dreamgym_lg.compiled.limits import MIN_EXAMPLES
from dreamgym_lg.compiled.runtime import Refusal

Usable = Sequence[tuple[Example, Scope]]
"""Examples whose bound documents are known, with their scopes."""


def documents_after(binding: Binding, groups: Sequence[Usable], *, is_limit: bool) -> list[Expression | None]:
    """The bound document after the call, for each case; None if it is unknown.

    If some case is known to change it, the cases without a later read are taken to change nothing.
    """
    documents = [_document_after(binding, group, is_limit=is_limit) for group in groups]
    changes = any(is_known and document != Ref(binding.name) for is_known, document in documents)
    return [document if is_known or is_limit or not changes else Ref(binding.name) for is_known, document in documents]


def _document_after(binding: Binding, group: Usable, *, is_limit: bool) -> tuple[bool, Expression | None]:
    """True if a later read or the answer shows the document; and its expression."""
    if isinstance(group[0][0].answer, Refusal):  # an error changes nothing
        return True, Ref(binding.name)
    later_reads, scopes = [], []
    for example, scope in group:
        looks, place = {**example.others_after, **example.after}, place_of(binding, scope)
        if place in looks:
            later_reads.append(looks[place])
            scopes.append(Scope(scope.args, {**scope.documents, "answer": example.answer}))
    if later_reads:
        document = generalize(later_reads, scopes, arithmetic=len(later_reads) >= MIN_EXAMPLES)
        return True, _with_own_fields(document, binding, later_reads, scopes)
    document = None if is_limit else _echo(group, binding)
    return document is not None, document


def _with_own_fields(
    document: Expression | None, binding: Binding, later_reads: Sequence[Any], scopes: Sequence[Scope]
) -> Expression | None:
    """The new document with the fields that no example changed, taken from the old one."""
    if not isinstance(document, Build) or document.keys is None:
        return document
    pairs = [(read, scope.documents[binding.name]) for read, scope in zip(later_reads, scopes, strict=True)]
    kept = {
        key
        for key in document.keys
        if all(isinstance(old, Mapping) and key in old and equal_json(new[key], old[key]) for new, old in pairs)
    }
    values = zip(document.keys, document.values, strict=True)
    return Build(document.keys, tuple(Ref(binding.name, (key,)) if key in kept else value for key, value in values))


def _echo(group: Usable, binding: Binding) -> Expression | None:
    """The new document, if the answer contains it or some of its fields; else None."""
    pairs = [(example.answer, scope.documents[binding.name]) for example, scope in group]
    if not all(isinstance(answer, Mapping) and isinstance(document, Mapping) for answer, document in pairs):
        return None
    answer, document = pairs[0]
    if all(set(new) >= set(old) for new, old in pairs):
        return Ref("answer")
    if not (shared := [key for key in document if key in answer]) or any(list(old) != list(document) for _, old in pairs):
        return None
    return Build(tuple(document), tuple(Ref("answer" if key in shared else binding.name, (key,)) for key in document))
