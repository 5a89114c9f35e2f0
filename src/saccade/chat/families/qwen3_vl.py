"""Define Qwen3-VL (dense): it has no default system prompt; think and tool tags are single tokens."""

from saccade.chat.families._qwen import QwenFamily

qwen3_vl = QwenFamily(name="qwen3_vl")
