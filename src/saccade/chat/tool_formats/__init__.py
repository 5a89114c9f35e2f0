"""Parse the tool calls of published systems: one file and one pure function per syntax."""
