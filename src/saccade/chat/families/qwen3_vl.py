"""Qwen3-VL (dense): no system message of its own, think and tool tags are single tokens."""

from saccade.chat.families._qwen import QwenFamily

qwen3_vl = QwenFamily(name="qwen3_vl")
