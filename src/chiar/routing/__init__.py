"""Calibration of routing thresholds, and the FLOPs of routed models."""
