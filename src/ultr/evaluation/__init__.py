"""Evaluation of rankings: metrics, 95% intervals, paired tests, and metrics estimated from logged feedback."""
