"""MkDocs hooks: the shipped package as one folder, build/docs/dreamgym_lg, which mkdocstrings reads; and the clone address.

`graphs/` and `integrations/` lie at the top of the repository and ship inside `dreamgym_lg`.
"""

import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "build/docs/dreamgym_lg"


@event_priority(100)  # before mkdocstrings, which leaves out a search path that does not exist yet
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    shutil.rmtree(PACKAGE, ignore_errors=True)
    for folder, target in {
        "dreamgym_lg": PACKAGE,
        "graphs": PACKAGE / "graphs",
        "integrations": PACKAGE / "integrations",
    }.items():
        shutil.copytree(ROOT / folder, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return config


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: object) -> str:
    """Puts the repository's address (`repo_url` of mkdocs.yml) into `git clone REPOSITORY`."""
    return markdown.replace("git clone REPOSITORY", f"git clone {config.repo_url or 'REPOSITORY'}")
