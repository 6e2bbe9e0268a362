"""Embedded small snapshots and clips."""
