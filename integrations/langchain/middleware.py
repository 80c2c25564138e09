"""`PolicyMiddleware`: the trained policy in a `create_agent` agent, with nothing patched."""

from collections.abc import Awaitable, Callable

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.errors import ConfigurationError, MissingDependency

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:
    raise MissingDependency.extra("langchain", "openai") from error


class PolicyMiddleware(AgentMiddleware):
    """Answers with a policy in place of the agent's model. Tools, prompts and other middleware stay.

    ```python
    agent = create_agent(model, tools, middleware=[PolicyMiddleware(load_policy("policies/support-v1"))])
    ```
    Put it last: middleware before it still sees, and may replace, the agent's own model.

    Args: `policy`, any chat model without bound tools.
    """

    def __init__(self, policy: BaseChatModel) -> None:
        if not isinstance(policy, BaseChatModel):
            raise ConfigurationError(f"policy={policy!r} is no chat model: give a BaseChatModel, without bound tools")
        super().__init__()
        self.policy = policy

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
        return handler(request.override(model=self.policy))

    async def awrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
    ) -> ModelResponse:
        return await handler(request.override(model=self.policy))
