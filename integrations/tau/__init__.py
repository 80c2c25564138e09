"""tau-bench (Yao et al., 2024): airline and retail as LangChain tools over a database. Exact against the official tools.

`domain` holds databases, tools, tasks and the official reward, `airline` and `retail` the tools' code, `key_order` the order of
their answers' keys, `agent` the graph and its worlds.
"""

from dreamgym_lg.integrations.tau.domain import Domain, load_conversations, load_domain, load_tasks

__all__ = ["Domain", "load_conversations", "load_domain", "load_tasks"]
