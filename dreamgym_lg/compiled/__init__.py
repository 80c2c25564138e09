"""A world compiled from traces: code that answers tool calls as the recorded backend did."""

from dreamgym_lg.compiled.compile import compile_world
from dreamgym_lg.compiled.drawing import draw_tasks
from dreamgym_lg.compiled.imputation import Imputed
from dreamgym_lg.compiled.replaying import ToolReplay
from dreamgym_lg.compiled.responder import Compiled, EndState, compiled_dream

__all__ = ["Compiled", "EndState", "Imputed", "ToolReplay", "compile_world", "compiled_dream", "draw_tasks"]
