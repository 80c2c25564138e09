"""tau-bench (Yao et al., 2024): airline and retail as LangChain tools over a database. Exact against the official tools."""

from dreamgym_lg.integrations.tau.domain import Domain, load_conversations, load_domain, load_tasks

__all__ = ["Domain", "load_conversations", "load_domain", "load_tasks"]
