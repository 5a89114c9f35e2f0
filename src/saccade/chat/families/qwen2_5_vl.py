"""Qwen2.5-VL: a default system message; only the tags of tool calls are single tokens."""

from saccade.chat.families._qwen import QwenFamily

qwen2_5_vl = QwenFamily(name="qwen2_5_vl", default_system="You are a helpful assistant.")
