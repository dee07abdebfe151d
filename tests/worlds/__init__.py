"""Simulated logs with known truth that share no code with `ultr`: neither its users, nor its rankers, nor its files."""
