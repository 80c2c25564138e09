"""Metrics of training iterations: computed, judged, and named for trackers."""
