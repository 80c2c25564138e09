"""The `dreamgym` command line."""
