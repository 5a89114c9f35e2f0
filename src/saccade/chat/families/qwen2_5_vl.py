"""Qwen2.5-VL: a default system message; only the tags of tool calls are single tokens.

The tags around a tool's response are plain text in this family, so a tool that prints them writes the same tokens;
the marks of turns and pictures can't be written that way.
"""

from saccade.chat.families._qwen import QwenFamily

qwen2_5_vl = QwenFamily(name="qwen2_5_vl", default_system="You are a helpful assistant.")
