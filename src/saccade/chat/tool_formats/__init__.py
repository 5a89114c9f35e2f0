"""How published systems write their calls: one file and one pure function per surface syntax."""
