"""The experience model: a language model that plays the environment in text (paper, section 4)."""

from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.experience.model import ExperienceModel

__all__ = ["DreamEnvironment", "ExperienceModel"]
