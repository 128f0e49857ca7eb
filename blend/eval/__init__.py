"""Measuring: question files, metrics, methods side by side, reports."""
