"""Per-token losses, registered by name."""
