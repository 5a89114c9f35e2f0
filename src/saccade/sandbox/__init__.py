"""Running Python that a model wrote: persistent, fast to start, and jailed by the kernel rather than by good manners.

    host (trainer, evaluation) ──exec──> keeper ──fork──> zygote ──fork──> guest, one per episode, jailed
      │   Sandbox (client.py)              │                │                 │
      │                                    │                └─ libraries imported once; never sees data
      │                                    └─ ends the zygote, and with it every guest, when the host ends
      └─ line (requests, replies), text (what is printed), life (how it ended), a pidfd (signals)

The host takes every byte of a guest for hostile. What a guest may do is decided by walls.py, applied by jail.py and
refused by the kernel; what it is promised (variables, shown pictures, videos) is in guest.py, gallery.py and reader.py.
"""
