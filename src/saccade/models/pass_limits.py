"""How much one pass computes at once: what the model obeys and the memory estimate counts, without torch."""

MAX_VISION_TOKENS = 4096  # per pass of the vision tower: about 80 frames of 50,176 pixels
MAX_LOGITS_PER_CHUNK = 2**27  # half a GiB in float32
