"""Models of transformers: the model that is trained and its policy, attention, adapters, checkpoints."""

import logging

# transformers imports torchao if it is installed, also where nothing uses it. torchao then warns of compiled kernels
# that this machine can't load, and torch of functions that torchao calls.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
