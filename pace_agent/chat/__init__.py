"""Messages to token ids and back, by the model's own chat template."""

from pace_agent.chat.format import ChatFormat

__all__ = ["ChatFormat"]
