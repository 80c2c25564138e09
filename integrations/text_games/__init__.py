"""What the adapters of text games share."""
