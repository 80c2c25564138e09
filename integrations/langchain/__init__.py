"""LangChain's own way to put a policy into an agent: middleware of `create_agent`."""
