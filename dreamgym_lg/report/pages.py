"""HTML pages from `templates/`, on one base and one style."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dreamgym_lg.actions import is_answer, readable
from dreamgym_lg.dream.goals import has_user_turns
from dreamgym_lg.errors import MissingDependency
from dreamgym_lg.types import DECIDERS, is_missing, is_unanswered, is_user_fault

if TYPE_CHECKING:
    from jinja2 import Environment


def check_installed(*packages: str, extra: str) -> None:
    """Raise `MissingDependency` for a package that is not there, with the extra that brings it."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingDependency.extra(package, extra)


def create_templates(**filters: Callable[..., Any]) -> "Environment":
    """The templates, with additional filters; they escape all values."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("dreamgym_lg", "templates")
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    templates.filters.update(text=text, **filters)
    templates.tests |= {
        "missing": is_missing,
        "unanswered": is_unanswered,
        "user_fault": is_user_fault,
        "message": is_answer,
        "conversation": has_user_turns,
    }
    templates.filters["readable"] = readable
    templates.globals["deciders"] = DECIDERS
    return templates


def text(value: Any, spec: str = "") -> str:
    """The formatted value; a dash for None."""
    return "–" if value is None else format(value, spec)
