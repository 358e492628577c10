"""Environments: what a task is, which tools it has, and how an answer is scored."""

from pace_agent.envs.rewards import load_reward
from pace_agent.envs.tasks import DatasetTasks, Fields, JsonlTasks, Procedural, load_tasks, make_task
from pace_agent.envs.tool_env import ToolEnv
from pace_agent.tools.base import Tool, ToolError, tool
from pace_agent.types import Message, Task, ToolCall

__all__ = [
    "DatasetTasks",
    "Fields",
    "JsonlTasks",
    "Message",
    "Procedural",
    "Task",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "load_reward",
    "load_tasks",
    "make_task",
    "tool",
]
