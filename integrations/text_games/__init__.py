"""Parts that the adapters of text games share."""
