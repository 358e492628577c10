"""What a model may call."""

from pace_agent.tools.base import Tool, ToolError, ToolResult, ToolSet, tool
from pace_agent.tools.calculator import calculator

__all__ = ["Tool", "ToolError", "ToolResult", "ToolSet", "calculator", "tool"]
