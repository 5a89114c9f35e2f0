"""Define Qwen2.5-VL: it has a default system prompt; only the tags of tool calls are single tokens.

The tags around a tool's response are plain text in this family, so a tool that prints them produces the same tokens;
turn and image tokens can't be forged that way.
"""

from saccade.chat.families._qwen import QwenFamily

qwen2_5_vl = QwenFamily(name="qwen2_5_vl", default_system_prompt="You are a helpful assistant.")
