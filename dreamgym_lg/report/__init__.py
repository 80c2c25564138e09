"""Pictures and pages: the proof's report, and the pages of `dreamgym ui`."""
