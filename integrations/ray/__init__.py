"""Ray: episodes of CPU-heavy agents and real environments on the cores of many machines."""
