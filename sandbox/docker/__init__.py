"""Sandboxes as Docker containers: one for each session, with the same program inside as everywhere."""
