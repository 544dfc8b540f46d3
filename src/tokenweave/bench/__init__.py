"""How speed is measured: a folder a subject; beside them what they share."""
